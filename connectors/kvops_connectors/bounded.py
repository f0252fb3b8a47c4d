"""A dict that forgets its oldest entry instead of growing."""

from __future__ import annotations

from typing import Generic, TypeVar

# Requests that a rank keeps track of; more than any engine runs at once.
TRACKED_BY_RANK = 10_000

Key = TypeVar("Key")
Value = TypeVar("Value")


class Bounded(dict[Key, Value], Generic[Key, Value]):
    """A dict with at most ``limit`` entries.

    Attributes:
        limit: the most entries it holds.
        forgotten: entries dropped to keep within the limit.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.forgotten = 0

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self.limit:
            self.pop(next(iter(self)), None)
            self.forgotten += 1
        super().__setitem__(key, value)
