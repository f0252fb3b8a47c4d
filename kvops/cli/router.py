"""``kvops router``: the reference router alone."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from kvops.errors import KvopsError


@click.command()
@click.option("--prefill", "prefill", multiple=True, required=True, metavar="URL", help="A prefill engine; repeat it.")
@click.option("--decode", "decode", multiple=True, required=True, metavar="URL", help="A decode engine; repeat it.")
@click.option("--mode", type=click.Choice(["pull"]), default="pull", show_default=True, help="How KV moves.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File with one accepted API key a line.")
def command(
    *, prefill: tuple[str, ...], decode: tuple[str, ...], mode: str, host: str, port: int, api_key_file: Path | None
) -> None:
    """Route OpenAI requests over prefill and decode engines that are already up.

    \b
    Example:
      kvops router --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
    """
    from kvops.router.app import make_app, serve  # noqa: PLC0415

    for url in (*prefill, *decode):
        if not url.startswith(("http://", "https://")):
            raise KvopsError(f"{url!r} is not an engine's URL", "write it as http://HOST:PORT")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keys = _read_keys(api_key_file) if api_key_file else []
    logging.getLogger("kvops.router").info(
        "serving mode %s on %s:%d: prefill %s, decode %s", mode, host, port, ", ".join(prefill), ", ".join(decode)
    )
    try:
        serve(make_app(prefill, decode, keys), host, port)
    except OSError as error:
        raise KvopsError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another --host or --port"
        ) from None


def _read_keys(file: Path) -> list[str]:
    try:
        keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise KvopsError(f"cannot read {file}: {error.strerror}", "give a file with one API key a line") from None
    if not keys:
        raise KvopsError(f"{file} holds no API key", "write one key a line, or leave --api-key-file out")
    return keys
