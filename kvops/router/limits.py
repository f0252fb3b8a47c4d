"""How many requests one client may send."""

from __future__ import annotations

import time
from collections import OrderedDict

from kvops.router.errors import RouterError

# One bucket a client; the longest unused ones go first. Without keys the addresses are the clients.
_MOST_CLIENTS = 10_000
# A client that was quiet may send this many seconds' worth at once.
_BURST_SECONDS = 2.0


class RateLimit:
    """A token bucket for every client."""

    def __init__(self, per_second: float) -> None:
        """Allow ``per_second`` requests of each client; 0 allows all."""
        self._per_second = per_second
        self._most = max(1.0, per_second * _BURST_SECONDS)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, client: str) -> None:
        """Count a request of ``client``.

        Raises:
            RouterError: it has sent too many (429).
        """
        if not self._per_second:
            return
        now = time.monotonic()
        tokens, seen = self._buckets.pop(client, (self._most, now))
        tokens = min(self._most, tokens + (now - seen) * self._per_second)
        self._buckets[client] = (max(0.0, tokens - 1), now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if tokens < 1:
            raise RouterError(
                429,
                "rate_limit_exceeded",
                f"more than {self._per_second:g} requests a second",
                retry_after_seconds=max(1, round((1 - tokens) / self._per_second)),
            )
