"""Keeps an instrument's own mistakes away from the request."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.kvops")

# One line a minute: a hook that breaks does so thousands of times a second.
LOG_INTERVAL_SECONDS = 60.0


class Guard:
    """Runs hooks, swallows and counts what they raise.

    Attributes:
        where: the place that errors are counted under.
        errors: errors since the last ``take_errors``.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.errors = 0
        self._quiet_until = 0.0

    def __call__(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Return what the hook returns, or None if it raised."""
        try:
            return hook(*args)
        except Exception as error:
            self.failed(getattr(hook, "__name__", str(hook)), error)
            return None

    def failed(self, hook: str, error: BaseException) -> None:
        """Count an error, and log it unless one was logged within the last minute."""
        self.errors += 1
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + LOG_INTERVAL_SECONDS
            logger.warning("kvops: %s in the %s failed, the request goes on", hook, self.where, exc_info=error)

    def take_errors(self) -> int:
        """Return the errors since the last call, and start again from 0."""
        errors, self.errors = self.errors, 0
        return errors
