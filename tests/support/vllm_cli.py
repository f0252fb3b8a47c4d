"""vLLM's own command, which alone starts several API servers; the CPU build's dies looking for a distribution "vllm"."""

import importlib.metadata

from vllm.entrypoints.cli.main import main

version = importlib.metadata.version


def found_version(name: str) -> str:
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        # The local part is how vLLM tells its builds apart.
        return f"{version(f'{name}-cpu')}+cpu"


if __name__ == "__main__":
    importlib.metadata.version = found_version
    main()
