"""Lines of kernel and server logs that decide something."""

from __future__ import annotations

import re


def matching(text: str, pattern: str) -> list[str]:
    """Return the lines that a regular expression finds, without surrounding blanks."""
    search = re.compile(pattern).search
    return [line.strip() for line in text.splitlines() if search(line)]


def numbers(text: str, pattern: str) -> list[int]:
    """Return the first group of every match as an integer."""
    return [int(value) for value in re.findall(pattern, text)]
