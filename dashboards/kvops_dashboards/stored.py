"""What ships with the package, ready to use: dashboards as JSON and rules as YAML. Nothing here needs the SDK."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import yaml


def dashboards() -> dict[str, dict[str, Any]]:
    """Return every committed dashboard by its uid."""
    folder = resources.files("kvops_dashboards").joinpath("json")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return {file.name.removesuffix(".json"): json.loads(file.read_text()) for file in files}


def rule_files() -> dict[str, str]:
    """Return the text of every Prometheus rule file by its name."""
    folder = resources.files("kvops_dashboards").joinpath("rules")
    files = sorted((file for file in folder.iterdir() if file.name.startswith("kvops-")), key=lambda file: file.name)
    return {file.name: file.read_text() for file in files}


def rules() -> list[dict[str, Any]]:
    """Return every recording and alerting rule of every rule file."""
    files = [yaml.safe_load(text) for text in rule_files().values()]
    return [rule for file in files for group in file.get("groups", []) for rule in group["rules"]]
