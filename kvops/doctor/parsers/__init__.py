"""Pure functions from what a tool printed to what it said. They raise `ParseError` and nothing else."""

from __future__ import annotations

import re


class ParseError(ValueError):
    """The text is not what the tool is documented to print."""


def whole_number(text: str) -> int | None:
    """Return a text of up to 20 decimal digits as a number, None for any other: Python refuses to read endless ones."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
