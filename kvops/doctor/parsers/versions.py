"""Version numbers as tools print them."""

from __future__ import annotations

import re

Version = tuple[int, ...]

_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})*")


def version(text: str) -> Version:
    """Return the leading dotted number of a version, without suffix: ``2.4.0amzn1.0`` gives ``(2, 4, 0)``.

    An empty tuple when there is none. Compare with `at_least`, which ignores missing trailing parts.
    """
    found = _NUMBER.search(text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def at_least(have: Version, want: Version) -> bool:
    """Tell whether a version reaches a minimum; ``2.4`` and ``2.4.0`` are equal."""
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))


def dotted(parts: Version) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, parts))
