"""What is installed: Python distributions, Debian and RPM packages, shared libraries, kernel modules."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from kvops.doctor.parsers import ParseError

if TYPE_CHECKING:
    from collections.abc import Iterable

_DIST = re.compile(r"^(?P<name>[A-Za-z0-9._]+?)-(?P<version>\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info$")


def normal_name(name: str) -> str:
    """Return a distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_dist_infos(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of distributions from the names in a site-packages directory."""
    found = (_DIST.match(name) for name in names)
    return {normal_name(match["name"]): match["version"] for match in found if match}


def parse_pip_list(text: str) -> dict[str, str]:
    """Return the versions of ``pip list`` in its column, freeze or JSON format; empty for anything else."""
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        named = [row for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)]
        return {normal_name(row["name"]): str(row.get("version")) for row in named}
    pairs = re.findall(r"^([A-Za-z0-9][\w.-]*)(?:==|\s+)(\d\S*)", text, re.MULTILINE)
    return {normal_name(name): value for name, value in pairs}


def parse_os_packages(text: str) -> dict[str, str]:
    """Return package versions of ``dpkg-query -W``, or of ``rpm -qa`` with name, tab, version."""
    pairs = re.findall(r"^([a-z0-9][\w.+-]*)(?::\w+)?\t(\S+)$", text, re.MULTILINE)
    return dict(pairs)


def parse_loader_cache(text: str) -> dict[str, list[str]]:
    """Return the paths of each library name in ``ldconfig -p``, first choice first.

    Raises:
        ParseError: neither a library nor the heading of the list.
    """
    paths: dict[str, list[str]] = {}
    for name, path in re.findall(r"^\s+(\S+) \([^)]*\) => (/\S+)$", text, re.MULTILINE):
        paths.setdefault(name, []).append(path)
    if not paths and "libs found in cache" not in text:
        raise ParseError(f"no library in {text.strip()[:60]!r}")
    return paths


def parse_ldd(text: str) -> dict[str, str]:
    """Return where ``ldd`` finds each library; an empty path where it says ``not found``."""
    found = re.findall(r"^\s*(\S+) => (not found|/\S+)", text, re.MULTILINE)
    return {name: "" if path == "not found" else path for name, path in found}


def parse_modinfo(text: str) -> dict[str, str]:
    """Return the first value of each field of ``modinfo``."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"^(\w+):[ \t]*(.*)$", text, re.MULTILINE):
        fields.setdefault(name, value.strip())
    return fields


def parse_dkms(text: str) -> list[tuple[str, str]]:
    """Return (module and kernel, state) of each line of ``dkms status``, e.g. ``("efa/2.13.0", "added")``."""
    return re.findall(r"^([\w.-]+[/,][^:\n]*):\s*(\w+)", text, re.MULTILINE)


def parse_installer_version(text: str) -> str:
    """Return the version on line 1 of ``efa_installed_packages``; empty when it has none."""
    found = re.match(r"#\s*EFA installer version:\s*(\d\S*)", text)
    return found[1] if found else ""
