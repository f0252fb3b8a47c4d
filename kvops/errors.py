"""The one exception that a user ever sees."""

from __future__ import annotations

import click


class KvopsError(click.ClickException):
    """Something the user can mend: one sentence with the value that is wrong, and what to do about it.

    Exit status 2 ("could not do it"), as the command line promises for everything that never got to run.
    """

    exit_code = 2

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem)
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message

    def format_message(self) -> str:
        """Return the sentence that is printed after "Error: "."""
        return str(self)
