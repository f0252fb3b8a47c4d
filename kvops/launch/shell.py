"""Writing commands for a shell: quoted, with the variables that are meant left to the shell."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# The only variables that a rendered command may name; anything else with a dollar is taken literally.
_VARIABLE = re.compile(r"\$(?:POD_NAME|ENGINE_ID|LWS_WORKER_INDEX|LWS_LEADER_ADDRESS|SLURM_NODEID|MASTER|JOURNAL)\b")


def quote(word: str) -> str:
    """Return ``word`` for a shell that fills in our own variables and nothing else."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    literal = iter(_VARIABLE.split(word))
    parts = [_escape(next(literal))]
    for variable in _VARIABLE.findall(word):
        parts += ["${" + variable[1:] + "}", _escape(next(literal))]
    return '"' + "".join(parts) + '"'


def command(words: Iterable[str], last: str = "") -> list[str]:
    """Return quoted words, ``--option value`` as one; ``last`` is added as it is."""
    result: list[str] = []
    option = ""
    for word in words:
        if option and not word.startswith("--"):
            result[-1] += f" {quote(word)}"
            option = ""
        else:
            result.append(quote(word))
            option = word if word.startswith("--") and "=" not in word else ""
    return [*result, last] if last else result


def wrapped(parts: list[str], indent: str = "  ") -> str:
    """Return ``parts`` as one command: what comes before the first option on one line, then an option a line."""
    first = next((index for index, part in enumerate(parts) if part.startswith("--")), len(parts))
    return f" \\\n{indent}".join([" ".join(parts[:first]), *parts[first:]])


def _escape(text: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", text)
