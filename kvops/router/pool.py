"""The engines behind the router and the choice among them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Endpoint:
    """One engine, and how many requests this router has under way there."""

    def __init__(self, url: str) -> None:
        """Remember the base URL, such as ``http://127.0.0.1:8100``."""
        self.url = url.rstrip("/")
        self.in_flight = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request for as long as the block runs."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Pool:
    """All engines of one role."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Make the endpoints.

        Raises:
            ValueError: no URL.
        """
        if not urls:
            raise ValueError("a pool needs at least one engine")
        self.endpoints = [Endpoint(url) for url in urls]
        self._turn = 0

    def least_loaded(self) -> Endpoint:
        """Return the engine with the fewest requests under way; equals take turns."""
        count = len(self.endpoints)
        order = [self.endpoints[(self._turn + offset) % count] for offset in range(count)]
        chosen = min(order, key=lambda endpoint: endpoint.in_flight)
        self._turn = (self.endpoints.index(chosen) + 1) % count
        return chosen
