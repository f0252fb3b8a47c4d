"""Takes out of a capture what tells whose machine it is, and every secret that can be recognised.

A value keeps one placeholder (``<ip-1>``) through a whole bundle, so that what was equal stays equal.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import TYPE_CHECKING, Any

from kvops.doctor.manifest import SOCKET_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable

# The variables whose values checks look at; the values of all others stay on the machine.
ENV_PREFIXES = (
    "FI_",
    "NIXL_",
    "UCX_",
    "NCCL_",
    "OFI_",
    "RDMAV_",
    "IBV_",
    "VLLM_NIXL_",
    "VLLM_KV_",
    "VLLM_ATTENTION_",
    "NEURON_",
    "PYTORCH_",
    "CUDA_VISIBLE",
)
ENV_NAMES = {"PATH", "LD_LIBRARY_PATH", "KUBERNETES_SERVICE_HOST", *SOCKET_VARIABLES}
SECRET_WORD = r"(?:TOKEN(?!S|IZ)|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTHORIZATION)"  # noqa: S105
HIDDEN = "<redacted>"
DROPPED_JSON_KEYS = {"Tags", "KeyName", "IamInstanceProfile", "managedFields", "annotations", "OwnerId", "RequesterId"}

_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{4,}"), rf"\1 {HIDDEN}"),
    (re.compile(rf"(?i)(--[\w-]*{SECRET_WORD}[\w-]*)([ =\0]+)(?!-)\S[^\s\0]*"), rf"\1\2{HIDDEN}"),
    (re.compile(rf"(?i)(\"[\w.-]*{SECRET_WORD}[\w.-]*\"\s*:\s*)\"(?:[^\"\\]|\\.)*\""), rf'\1"{HIDDEN}"'),
    (re.compile(rf"(?i)\b([\w.-]*{SECRET_WORD}[\w.-]*)(\s*[=:]\s*)(?!//)[^\s\0,;\"']+"), rf"\1\2{HIDDEN}"),
    (re.compile(r"\b(?:sk|hf|ghp|gho|github_pat|xox[abp]|glpat|nvapi)[-_][\w-]{8,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"), HIDDEN),
    (re.compile(r"(\w+://)[^\s/@:]+:[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b(serial(?:[ _-]?number)?\"?\s*[:=]\s*\"?)[\w-]+"), rf"\1{HIDDEN}"),
)
_VERSION_BEFORE = re.compile(r"(?i)(?:version\W{0,16}v?|\.so\.|\brev\W{1,3}|vermagic\W{0,16})$")
_PACKAGE_BEFORE = re.compile(r"(?:^|\n)[a-z0-9][\w.+-]*(?:\t|==)(?:\d+:)?$")
_COUNTER_BEFORE = re.compile(
    r"(?:_(?:bytes|wrs|pkts|drops|events|err|cmds)|memory_size\"?|_total(?:\{[^}]*\})?)[\s:]{1,16}$"
)


class Redactor:
    """Replaces values by placeholders that are numbered in order of appearance."""

    def __init__(self, hostname: str) -> None:
        """Take the host's own name, which is replaced wherever it stands alone."""
        self._seen: dict[tuple[str, str], str] = {}
        names = sorted(
            {name for name in (hostname, hostname.split(".", maxsplit=1)[0]) if name and name != "localhost"}
        )
        alternatives = "|".join(map(re.escape, reversed(names)))
        self._hostname = re.compile(rf"(?<![\w.-])(?:{alternatives})(?![\w-])") if names else None

    def text(self, text: str) -> str:
        """Return a text without addresses, ids, serial numbers, account numbers and recognisable secrets."""
        for pattern, replacement in _SECRETS:
            text = pattern.sub(replacement, text)
        if self._hostname is not None:
            text = self._hostname.sub("<host>", text)
        for kind, pattern, keep in _RULES:
            text = pattern.sub(self._replacer(kind, keep), text)
        return text

    def _replacer(self, kind: str, keep: Callable[[re.Match[str]], bool] | None) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            if keep is not None and keep(match):
                return match[0]
            known = [number for (seen_kind, _), number in self._seen.items() if seen_kind == kind]
            return self._seen.setdefault((kind, match[0].lower()), f"<{kind}-{len(known) + 1}>")

        return replace

    def environ(self, text: str) -> str:
        """Return a process environment with the values of the variables that checks look at, and no others."""
        pairs = [entry.partition("=") for entry in re.split(r"[\0\n]", text) if "=" in entry]
        kept = [f"{name}={self.text(value)}" for name, _, value in pairs if is_kept(name)]
        return "\0".join(kept)

    def json(self, text: str) -> str:
        """Return a JSON text without the keys that name people, and with environment values filtered."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        return self.text(json.dumps(_pruned(value)))


def is_kept(variable: str) -> bool:
    """Tell whether the value of an environment variable may be in a capture."""
    if re.search(SECRET_WORD, variable, re.IGNORECASE):
        return False
    return variable in ENV_NAMES or variable.startswith(ENV_PREFIXES)


def _pruned(value: Any) -> Any:
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _pruned(item) for key, item in value.items() if key not in DROPPED_JSON_KEYS}
    if isinstance(kept.get("name"), str) and "value" in kept and not is_kept(kept["name"]):
        kept["value"] = HIDDEN
    return kept


def _before(match: re.Match[str]) -> str:
    return match.string[max(0, match.start() - 64) : match.start()]


def _is_version(match: re.Match[str]) -> bool:
    """Tell whether four numbers with dots are a version or an address that names nobody."""
    try:
        address = ipaddress.IPv4Address(match[0])
    except ValueError:
        return True
    before = _before(match)
    alone = match.string.strip() == match[0] and not address.is_private
    looks_like_version = _VERSION_BEFORE.search(before) or _PACKAGE_BEFORE.search(before)
    return address.is_loopback or address.is_unspecified or alone or bool(looks_like_version and not address.is_private)


def _is_not_ipv6(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:
        return True
    return address.is_loopback or address.is_unspecified


def _is_counter(match: re.Match[str]) -> bool:
    return match.string.strip() == match[0] or bool(_COUNTER_BEFORE.search(_before(match)))


def _is_zero(match: re.Match[str]) -> bool:
    return not match[0].strip("0:-")


_RULES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], bool] | None], ...] = (
    ("host", re.compile(r"\b(?:ip|i)-[0-9a-f-]+(?:\.[\w-]+)*\.(?:internal|amazonaws\.com)\b"), None),
    ("uuid", re.compile(r"(?i)\b(?:GPU-|MIG-)?[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"), None),
    ("id", re.compile(r"\b(?:i|eni|vol|r|eipalloc|eipassoc)-[0-9a-f]{8,17}\b"), None),
    ("serial", re.compile(r"(?i)\b(?:[0-9a-f]{2}-){7}[0-9a-f]{2}\b"), _is_zero),
    ("ip6", re.compile(r"(?i)(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])"), _is_not_ipv6),
    ("guid", re.compile(r"(?i)(?<![\w:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![\w:])"), _is_zero),
    ("guid", re.compile(r"(?im)(?<=\s)[0-9a-f]{16}$"), _is_zero),
    ("mac", re.compile(r"(?i)(?<![\w:-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])"), _is_zero),
    ("ip", re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)"), _is_version),
    ("account", re.compile(r"(?<![\d.])\d{12}(?!\.?\d)"), _is_counter),
    ("user", re.compile(r"(?<=/home/)[^/\s\0:]+"), None),
)
