"""What ships with the package, ready to use: dashboards as JSON and rules as YAML. Nothing here needs the SDK."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import yaml

_COMMAND = re.compile(r"`kvops runbook ([\w-]+)`")
_ANNOTATION = re.compile(r"^( +)runbook: kvops runbook (\w+)$", re.MULTILINE)


def dashboards(runbook_url: str = "") -> dict[str, dict[str, Any]]:
    """Return every committed dashboard by its uid.

    Args:
        runbook_url: where the folder ``runbooks`` is published; panels then link the page instead of naming the command
            that shows it.
    """
    folder = resources.files("kvops_dashboards").joinpath("json")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    boards = {file.name.removesuffix(".json"): json.loads(file.read_text()) for file in files}
    if runbook_url:
        for panel in (panel for board in boards.values() for panel in board["panels"] if "description" in panel):
            panel["description"] = _COMMAND.sub(rf"[\1]({runbook_url.rstrip('/')}/\1.md)", panel["description"])
    return boards


def rule_files(runbook_url: str = "") -> dict[str, str]:
    """Return the text of every Prometheus rule file by its name.

    Args:
        runbook_url: where the folder ``runbooks`` is published; alerts then carry the annotation ``runbook_url`` too.
    """
    folder = resources.files("kvops_dashboards").joinpath("rules")
    files = sorted((file for file in folder.iterdir() if file.name.startswith("kvops-")), key=lambda file: file.name)
    texts = {file.name: file.read_text() for file in files}
    if not runbook_url:
        return texts
    link = rf"\g<0>\n\1runbook_url: {runbook_url.rstrip('/')}/\2.md"
    return {name: _ANNOTATION.sub(link, text) for name, text in texts.items()}


def rules() -> list[dict[str, Any]]:
    """Return every recording and alerting rule of every rule file."""
    files = [yaml.safe_load(text) for text in rule_files().values()]
    return [rule for file in files for group in file.get("groups", []) for rule in group["rules"]]
