"""``kvops router``: the reference router alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvops.errors import KvopsError

if TYPE_CHECKING:
    import ssl

    from kvops.router.endpoints import Sources
    from kvops.router.handles import Identity
    from kvops.router.settings import ModeName

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--prefill", "prefill", multiple=True, metavar="URL", help="A prefill engine; repeat it.")
@click.option("--decode", "decode", multiple=True, metavar="URL", help="A decode engine; repeat it.")
@click.option(
    "--endpoints", type=_FILE, help="YAML with prefill and decode, lists of URLs; read again when it changes."
)
@click.option(
    "--mode",
    type=click.Choice(["pull", "push", "bidirectional", "auto"]),
    default="pull",
    show_default=True,
    help="How KV moves; auto asks the engines.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--admin-port", type=click.IntRange(1, 65535), help="Loopback port of the admin API; none if left out.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes, a core each.")
@click.option("--api-key-file", type=_FILE, help="File with one accepted API key a line.")
@click.option("--tls-cert", type=_FILE, help="Certificate chain (PEM); serves HTTPS.")
@click.option("--tls-key", type=_FILE, help="Its private key (PEM).")
@click.option("--decoder-ttl", type=click.FloatRange(min=1), default=480, show_default=True, metavar="SECONDS",
              help="decoder_kv_blocks_ttl of the decode engines.")  # fmt: skip
@click.option("--rate-limit", type=click.FloatRange(min=0), default=0, show_default="none", metavar="PER_SECOND",
              help="Requests a second of one API key, or one address.")  # fmt: skip
@click.option("--identity", "identities", multiple=True, metavar="URL,KEY=VALUE,...",
              help="For push, a prefill engine's engine_id, host, port and tp_size; asked if left out.")  # fmt: skip
@click.option("--journal", type=_FILE, help="File that gets one JSON line a request.")
def command(
    *,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    endpoints: Path | None,
    mode: ModeName,
    host: str,
    port: int,
    admin_port: int | None,
    workers: int,
    api_key_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    decoder_ttl: float,
    rate_limit: float,
    identities: tuple[str, ...],
    journal: Path | None,
) -> None:
    """Route OpenAI requests over prefill and decode engines that are already up.

    A URL may end in #0-7 for the data-parallel ranks of an engine, or begin with dns+ for one engine at each address
    of the name.

    \b
    Example:
      kvops router --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
      kvops router --endpoints endpoints.yaml --mode auto --admin-port 8001
    """
    from kvops.router import app  # noqa: PLC0415
    from kvops.router import workers as several  # noqa: PLC0415
    from kvops.router.settings import Limits, Settings, margin_of  # noqa: PLC0415

    sources = _sources(prefill, decode, endpoints)
    settings = Settings(
        mode=mode,
        api_keys=tuple(_read_keys(api_key_file)) if api_key_file else (),
        decoder_ttl_seconds=decoder_ttl,
        ttl_margin_seconds=margin_of(decoder_ttl),
        limits=Limits(requests_per_second=rate_limit),
        journal=journal,
        identities=dict(map(_identity, identities)),
    )
    context = _tls(tls_cert, tls_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kvops.router").info("serving mode %s on %s:%d", mode, host, port)
    try:
        if workers == 1:
            app.serve(app.make_router(sources, settings), host, port, admin_port=admin_port, tls=context)
        else:
            tls = (tls_cert, tls_key) if tls_cert and tls_key else None
            several.serve(sources, settings, host, port, workers=workers, admin_port=admin_port, tls=tls)
    except several.WorkersFailedError as error:
        raise KvopsError(str(error), "see the lines above for why they end") from None
    except OSError as error:
        raise KvopsError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another --host or --port"
        ) from None


def _sources(prefill: tuple[str, ...], decode: tuple[str, ...], file: Path | None) -> Sources:
    from kvops.router.endpoints import EndpointError, Sources  # noqa: PLC0415

    if file is not None and (prefill or decode):
        raise KvopsError("--endpoints and --prefill or --decode are both given", "use one of the two ways")
    try:
        return Sources({"prefill": prefill, "decode": decode}, file)
    except EndpointError as error:
        raise KvopsError(str(error), "give --prefill URL and --decode URL, or --endpoints FILE") from None


def _identity(text: str) -> tuple[str, Identity]:
    import msgspec  # noqa: PLC0415

    from kvops.router.handles import Identity  # noqa: PLC0415

    name, *pairs = text.split(",")
    try:
        return name, msgspec.convert(dict(pair.split("=", 1) for pair in pairs), Identity, strict=False)
    except ValueError as error:
        raise KvopsError(
            f"--identity {text} is not one: {error}",
            "write it as http://HOST:PORT,engine_id=ID,host=HOST,port=PORT,tp_size=N",
        ) from None


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise KvopsError("only one of --tls-cert and --tls-key is given", "give both")
    from kvops.router.tls import server_context  # noqa: PLC0415

    try:
        return server_context(cert, key)
    except OSError as error:
        raise KvopsError(f"cannot use {cert} with {key}: {error}", "give a PEM chain and its key") from None


def _read_keys(file: Path) -> list[str]:
    try:
        keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise KvopsError(f"cannot read {file}: {error.strerror}", "give a file with one API key a line") from None
    if not keys:
        raise KvopsError(f"{file} holds no API key", "write one key a line, or leave --api-key-file out")
    return keys
