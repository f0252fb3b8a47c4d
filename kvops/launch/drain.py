"""Waiting, before an engine's pod ends, until nobody needs the engine: ``python3 -m kvops.launch.drain URL SECONDS``.

An ending pod leaves its headless service, so the router sends it nothing new within seconds; what is left are requests
under way and KV that is held for a peer (``kvops_held_requests``).
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

# The router asks DNS every few seconds, and DNS answers from a cache of up to 30 s.
SETTLE_SECONDS = 40.0
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvops_held_requests")


def needed(text: str) -> float:
    """Return how many requests run, wait, or have KV held, from an engine's ``/metrics``."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name in _BUSY)


def drain(url: str, limit_seconds: float, *, settle_seconds: float = SETTLE_SECONDS, look_seconds: float = 1.0) -> bool:
    """Wait until the engine at ``url`` is idle; return False if ``limit_seconds`` ended first.

    An engine that does not answer has nothing left to wait for.
    """
    start = time.monotonic()
    time.sleep(min(settle_seconds, limit_seconds))
    while True:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310
                if not needed(answer.read().decode()):
                    return True
        except (urllib.error.URLError, OSError):
            return True
        if time.monotonic() - start > limit_seconds:
            return False
        time.sleep(look_seconds)


if __name__ == "__main__":
    if not drain(sys.argv[1], float(sys.argv[2])):
        print("requests or held KV were left when the time to drain ended", file=sys.stderr)  # noqa: T201
