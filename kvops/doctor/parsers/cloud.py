"""JSON of ``aws ... --output json`` and ``kubectl get ... -o json``, walked without trusting its shape."""

from __future__ import annotations

import json
from typing import Any

from kvops.doctor.parsers import ParseError


def parse_object(text: str) -> dict[str, Any]:
    """Return the object that a tool printed.

    Raises:
        ParseError: it printed something else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"no JSON: {text.strip()[:60]!r}") from error
    if not isinstance(value, dict):
        raise ParseError("the JSON is not an object")
    return value


def dig(value: object, *keys: str | int) -> Any:
    """Return the value under a path of keys and indices; None where the path ends early."""
    for key in keys:
        if isinstance(key, str):
            value = value.get(key) if isinstance(value, dict) else None
        else:
            value = value[key] if isinstance(value, list) and -len(value) <= key < len(value) else None
    return value


def rows(value: object, *keys: str | int) -> list[dict[str, Any]]:
    """Return the objects in the list under a path; other members of it are left out."""
    found = dig(value, *keys)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
