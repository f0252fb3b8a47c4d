"""Which engines there are: from the command line, from a file that may change, from DNS.

An engine is written as its URL; ``#0-7`` behind it means its data-parallel ranks, each an endpoint of its own, and
``dns+http://NAME:PORT`` one engine for each address of NAME, as a headless Kubernetes service has them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import TYPE_CHECKING, get_args
from urllib.parse import urlsplit

import yaml

from kvops.router.pool import Endpoint, Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = get_args(Role)
_RANKS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_DNS = "dns+"
_MOST_ENGINES = 4096


class EndpointError(ValueError):
    """An engine cannot be meant by this; the text says why.

    Attributes:
        status: HTTP status for whoever asked by HTTP: 400, or 404 and 409 where the engines are not such.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        """Keep both."""
        super().__init__(message)
        self.status = status


class Sources:
    """Where the engines of both roles come from."""

    def __init__(self, given: Mapping[Role, Sequence[str]], file: Path | None = None) -> None:
        """Check what is given; the file, where there is one, replaces it.

        Raises:
            EndpointError: a spec or the file is wrong, or a role has no engine.
        """
        self._file = file
        self._file_seen = _stamp(file)
        self._specs = {role: list(given.get(role, ())) for role in ROLES} if file is None else _read(file)
        for role in ROLES:
            if not self._specs[role]:
                raise EndpointError(f"there is no {role} engine")
            _check(self._specs[role])

    @property
    def specs(self) -> dict[Role, list[str]]:
        """Return the engines of each role as they are written."""
        return self._specs

    def add(self, role: Role, spec: str) -> None:
        """Add an engine until the file is read again.

        Raises:
            EndpointError: ``spec`` is wrong or already there.
        """
        _check([spec])
        if spec in self._specs[role]:
            raise EndpointError(f"{spec} is there already", 409)
        self._specs[role].append(spec)

    def remove(self, role: Role, spec: str) -> None:
        """Remove an engine, as it was written when it was added.

        Raises:
            EndpointError: it is not there, or the last of its role.
        """
        if spec not in self._specs[role]:
            raise EndpointError(f"there is no {role} engine {spec}", 404)
        if len(self._specs[role]) == 1:
            raise EndpointError(f"{spec} is the last {role} engine; add another one first", 409)
        self._specs[role].remove(spec)

    def reload(self) -> None:
        """Read the file again.

        Raises:
            EndpointError: there is no file, or what it says is wrong; then nothing changes.
        """
        if self._file is None:
            raise EndpointError("the router was started without an endpoints file", 409)
        # Noted before reading: a wrong file is complained of once, not every few seconds.
        self._file_seen = _stamp(self._file)
        self._specs = _read(self._file)

    def file_changed(self) -> bool:
        """Return whether the file is another one than when it was read."""
        return self._file is not None and _stamp(self._file) != self._file_seen

    def names_dns(self) -> bool:
        """Return whether addresses must be looked up again and again."""
        return any(spec.startswith(_DNS) for specs in self._specs.values() for spec in specs)

    async def resolve(self, role: Role) -> list[Endpoint]:
        """Return the endpoints of one role as they are now.

        Raises:
            OSError: a name cannot be resolved.
        """
        urls: list[str] = []
        for spec in self._specs[role]:
            urls += await _addresses(spec) if spec.startswith(_DNS) else [spec]
        return [endpoint for url in dict.fromkeys(urls) for endpoint in parse(role, url)]


def parse(role: Role, spec: str) -> list[Endpoint]:
    """Return the endpoints that ``spec`` means: one, or one a rank.

    Raises:
        EndpointError: it is no engine's URL.
    """
    url, _, ranks = spec.partition("#")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise EndpointError(f"{spec!r} is not an engine's URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
        raise EndpointError(f"{spec!r} is not an engine's URL; write it as http://HOST:PORT")
    if not ranks:
        return [Endpoint(role, url)]
    match = _RANKS.fullmatch(ranks)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise EndpointError(f"{ranks!r} in {spec!r} names no data-parallel ranks; write #0 or #0-7")
    return [Endpoint(role, url, rank) for rank in range(int(match[1]), int(match[2] or match[1]) + 1)]


def _check(specs: Sequence[str]) -> None:
    count = sum(len(parse("prefill", spec.removeprefix(_DNS))) for spec in specs)
    if count > _MOST_ENGINES:
        raise EndpointError(f"{count} engines are more than the {_MOST_ENGINES} that one router watches")


def _read(file: Path) -> dict[Role, list[str]]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise EndpointError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise EndpointError(f"{file} is not YAML") from None
    if not isinstance(content, dict) or set(content) != set(ROLES):
        raise EndpointError(f"{file} should have the keys prefill and decode, each with a list of URLs")
    for role, specs in content.items():
        if not isinstance(specs, list) or not specs or not all(isinstance(spec, str) for spec in specs):
            raise EndpointError(f"{role} in {file} should be a list of URLs")
        _check(specs)
    return content


def _stamp(file: Path | None) -> tuple[int, int] | None:
    try:
        status = file.stat() if file else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if status else None


async def _addresses(spec: str) -> list[str]:
    url, _, ranks = spec.removeprefix(_DNS).partition("#")
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    suffix = f"#{ranks}" if ranks else ""
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{suffix}" for host in hosts]
