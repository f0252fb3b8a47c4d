"""paired_latency on the CPU: starts a pair without instruments and one with them, and compares the two.

The pair without is vLLM's own connectors, left unpinned and with a sleeping progress thread as kvops leaves its own:
otherwise the comparison would be one of two schedulings, which kvops would win without merit.

Rounds of one request, many of them, get the most out of a machine that is not quiet; the CPU time of both pairs, to
which the same requests went, is told beside:

    python tests/bench/cpu_pairs.py --mode pull --input-tokens 1024 --output-tokens 32 --rate 0 --seconds 1 --rounds 150

With --control both pairs are without: what it says then is the noise.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "connectors"), str(ROOT / "tests" / "support")]

import paired_latency  # noqa: E402
import psutil  # noqa: E402
from engine_pair import Engine, Pair, tokens  # noqa: E402

# The tiny model's printable tokens.
TOKENS = (33, 123)


def engines(mode: str, folder: Path, name: str, *, stock: bool) -> list[Engine]:
    connector = "NixlPushConnector" if mode == "push" else "NixlConnector"
    roles = ("kv_producer", "kv_consumer") if mode == "push" else ("kv_both", "kv_both")
    args = ("--no-enable-prefix-caching",)
    sides = zip(("prefill", "decode"), roles, strict=True)
    return [Engine(f"{name}-{side}", folder, connector, role, args=args, stock=stock) for side, role in sides]


def spec(name: str, prefill: Engine, decode: Engine) -> str:
    """Return what paired_latency takes; prefill's first answer tells its engine id."""
    handle = Pair(prefill, decode).prefill_leg(tokens(64)).handle
    assert handle is not None
    side_channel = f"{handle['remote_host']}:{handle['remote_port']}"
    urls = (f"http://127.0.0.1:{engine.port}" for engine in (prefill, decode))
    return ",".join((name, *urls, handle["remote_engine_id"], side_channel))


def cpu_seconds(pair: list[Engine]) -> float:
    """Return what all processes of the pair have used so far."""
    roots = [psutil.Process(engine.process.pid) for engine in pair if engine.process is not None]
    times = [process.cpu_times() for root in roots for process in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main() -> None:
    parser = paired_latency.parser()
    parser.add_argument("--control", action="store_true", help="compare the pair without instruments with another one")
    options = parser.parse_args()
    names = ("stock", "control" if options.control else "kvops")
    options.token_range = TOKENS
    with tempfile.TemporaryDirectory() as folder:
        pairs = [engines(options.mode, Path(folder), name, stock=name != "kvops") for name in names]
        started = [engine for pair in pairs for engine in pair]
        try:
            for engine in started:
                engine.start()
            for engine in started:
                engine.wait_ready()
            options.a, options.b = (spec(name, *pair) for name, pair in zip(names, pairs, strict=True))
            before = [cpu_seconds(pair) for pair in pairs]
            asyncio.run(paired_latency.main(options))
            a, b = (cpu_seconds(pair) - used for pair, used in zip(pairs, before, strict=True))
            print(f"CPU   A {a:.1f} s  B {b:.1f} s  B/A {b / a:.4f}")
        finally:
            for engine in started:
                engine.stop()


if __name__ == "__main__":
    main()
