"""The runbooks: finding pages, searching them, and filling an alert's labels into their queries."""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvops.errors import KvopsError
from kvops_connectors.catalogue import BASE_LABELS, CATALOGUE

SEVERITIES = ("page", "ticket", "info")
_FENCE = re.compile(r"^( *)```(promql|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# vllm_version is a label.
_SELECTOR = re.compile(r"\b(kvops_\w+|vllm:\w+|vllm_(?!version\b)\w+)(\{[^}]*\})?")


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        name: the alert's name, or that of a reference page.
        text: Markdown without front matter.
        facts: the front matter: alert, severity, dashboard, symptom; empty for reference pages.
    """

    name: str
    text: str
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the page's first heading."""
        return next(line[2:] for line in self.text.splitlines() if line.startswith("# "))

    @property
    def severity(self) -> str:
        """Return page, ticket or info; ``reference`` for what is no alert."""
        return self.facts.get("severity", "reference")

    def code(self, language: str) -> list[str]:
        """Return the fenced blocks of a language (``promql`` or ``console``), one string each."""
        return [textwrap.dedent(block).strip() for _, found, block in _FENCE.findall(self.text) if found == language]


class Alert(msgspec.Struct):
    """One alert of Alertmanager's webhook payload (version 4)."""

    labels: dict[str, str]
    status: str = "firing"
    annotations: dict[str, str] = {}


class Payload(msgspec.Struct):
    """Alertmanager's webhook payload."""

    alerts: list[Alert]


def folder() -> Path:
    """Return where the pages are: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "runbooks"
    return installed if installed.is_dir() else here.parent / "runbooks"


@cache
def pages() -> dict[str, Page]:
    """Return every page by its name, without the index."""
    files = sorted(file for file in folder().glob("*.md") if file.stem != "README")
    return {file.stem: _read(file) for file in files}


def _read(file: Path) -> Page:
    text = file.read_text(encoding="utf-8")
    if not text.startswith("---\n"):
        return Page(file.stem, text)
    _, head, body = text.split("---\n", 2)
    return Page(file.stem, body.lstrip(), yaml.safe_load(head))


def find(name: str) -> Page:
    """Return a page by its name in any case.

    Raises:
        KvopsError: no such page; says which name is nearest.
    """
    known = {page.lower(): page for page in pages()}
    wanted = name.lower().removesuffix(".md")
    for spelling in (wanted, f"kvops{wanted}"):
        if spelling in known:
            return pages()[known[spelling]]
    near = difflib.get_close_matches(wanted, known, 1, 0.5)
    fix = f"did you mean {known[near[0]]}?" if near else "kvops runbook --list shows all"
    raise KvopsError(f"there is no runbook {name!r}", fix)


def search(words: str) -> list[Page]:
    """Return the pages that hold all words, those with most of them in name or symptom first."""
    wanted = words.lower().split()
    found = []
    for page in pages().values():
        prominent = f"{page.name} {page.title} {page.facts.get('symptom', '')}".lower()
        text = f"{prominent} {page.text.lower()}"
        if all(word in text for word in wanted):
            found.append((-sum(word in prominent for word in wanted), -sum(text.count(word) for word in wanted), page))
    return [page for *_, page in sorted(found, key=lambda each: each[:2])]


def firing(payload: bytes) -> list[tuple[Alert, Page | None]]:
    """Return the alerts of a webhook payload with their pages, firing and most severe first.

    Raises:
        KvopsError: not a payload of Alertmanager.
    """
    try:
        alerts = msgspec.json.decode(payload, type=Payload).alerts
    except msgspec.DecodeError as error:
        raise KvopsError(
            f"this is not Alertmanager's webhook payload: {error}",
            'it is JSON with the list "alerts", each with "labels"',
        ) from error
    ordered = sorted(alerts, key=lambda alert: (alert.status != "firing", _rank(alert)))
    return [(alert, pages().get(alert.labels.get("alertname", ""))) for alert in ordered]


def _rank(alert: Alert) -> int:
    severity = alert.labels.get("severity", "")
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def with_labels(page: Page, labels: dict[str, str]) -> Page:
    """Return the page with the alert's labels in its queries, where the metric has the label.

    The alert's own query gets all of them; the diagnosis gets only the model, for the cause may be on another engine.
    """
    verification, heading, rest = page.text.partition("## Diagnosis")
    model = {name: value for name, value in labels.items() if name == "model_name"}
    return Page(page.name, _filled(verification, labels) + heading + _filled(rest, model), page.facts)


def _filled(text: str, labels: dict[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        indent, language, block = match.groups()
        filled = _SELECTOR.sub(lambda found: _select(found, labels), block) if language == "promql" else block
        return f"{indent}```{language}\n{filled}{indent}```"

    return _FENCE.sub(fill, text)


def _select(found: re.Match[str], labels: dict[str, str]) -> str:
    name, braces = found.group(1), found.group(2) or ""
    # A recording rule's name holds a metric's between colons; what it kept of the labels is not known here.
    if found.string[: found.start()].endswith(":") or found.string[found.end() :].startswith(":"):
        return found.group(0)
    present = braces[1:-1].strip()
    taken = re.findall(r"(\w+)\s*[=!]", present)
    extra = [
        f'{label}="{_quoted(value)}"'
        for label, value in labels.items()
        if label in _labels_of(name) and label not in taken
    ]
    chosen = ",".join([*([present] if present else []), *extra])
    return f"{name}{{{chosen}}}" if chosen else name


def _labels_of(name: str) -> set[str]:
    metric = CATALOGUE.get(re.sub(r"_(bucket|sum|count)$", "", name)) or CATALOGUE.get(name)
    if metric is None:
        return {"instance", *BASE_LABELS}
    base = {"instance"} if metric.source == "router" else {"instance", *BASE_LABELS}
    return base | {label.name for label in metric.labels}


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def as_dict(page: Page, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what ``--json`` prints of a page."""
    return {
        "name": page.name,
        "severity": page.severity,
        "symptom": page.facts.get("symptom", ""),
        "labels": labels or {},
        "queries": page.code("promql"),
        "commands": [line.removeprefix("$ ") for block in page.code("console") for line in block.splitlines()],
        "text": page.text,
    }
