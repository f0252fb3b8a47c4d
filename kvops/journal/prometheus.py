"""Advice from a Prometheus server alone: averages and shares, for it knows no single request."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request

from kvops.errors import KvopsError
from kvops.journal.advice import MIN_HOLDS, Advice

_WINDOW = "1d"
_TIMEOUT_SECONDS = 20
_MAX_ANSWER_BYTES = 4 * 2**20
_JOURNALS = "the journals (kvops advise --journal): Prometheus knows no single request"


class Prometheus:
    """A server, asked by instant queries."""

    def __init__(self, url: str) -> None:
        """Remember the base URL.

        Raises:
            KvopsError: it is no http or https URL.
        """
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise KvopsError(f"{url} is no http or https URL", "give one such as http://127.0.0.1:9090")
        self._url = url.rstrip("/")

    def ask(self, query: str) -> dict[str, float]:
        """Return the values of a vector by their one label, or by the empty text.

        Raises:
            KvopsError: the server cannot be reached or does not answer as Prometheus does.
        """
        address = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - scheme checked
                found = json.loads(answer.read(_MAX_ANSWER_BYTES))["data"]["result"]
            return {next(iter(each["metric"].values()), ""): float(each["value"][1]) for each in found}
        except urllib.error.URLError as error:
            raise KvopsError(f"Prometheus at {self._url} does not answer: {error}", "check the URL") from None
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise KvopsError(f"{self._url} does not answer as Prometheus does", "check the URL") from None

    def increase(self, metric: str, by: str = "", only: str = "") -> dict[str, float]:
        """Return how much a counter grew within a day, by one label."""
        return self.ask(f"sum by ({by}) (increase({metric}{{{only}}}[{_WINDOW}]))")


def advise(url: str) -> list[Advice]:
    """Return advice from the metrics of the last day."""
    server = Prometheus(url)
    return [
        Advice(topic="mode", missing=_JOURNALS),
        Advice(topic="kv_recompute_threshold", missing=_JOURNALS),
        _ttl(server),
        _lease(server),
        _posting(server),
    ]


def _ttl(server: Prometheus) -> Advice:
    """Tell how old the blocks were that were read back, and what the holds cost that nobody read."""
    advice = Advice(topic="decoder_kv_blocks_ttl")
    ends = server.increase("kvops_held_block_seconds_total", "ended_by", 'holder="decode"')
    age = server.ask(f"histogram_quantile(0.95, sum by (le) (increase(kvops_readback_age_seconds_bucket[{_WINDOW}])))")
    reads = sum(server.increase("kvops_readback_age_seconds_count").values())
    if reads < MIN_HOLDS:
        advice.missing = f"{MIN_HOLDS - round(reads)} more readbacks (there are {round(reads)} in {_WINDOW})"
        return advice
    total = sum(ends.values())
    unread = total - ends.get("read", 0.0)
    p95 = next(iter(age.values()), float("nan"))
    advice.measured = {"readback_age_p95_seconds": p95, "unread_block_seconds_share": unread / total if total else 0.0}
    advice.reason = (
        f"95 % of readbacks came within {p95:.0f} s, and {advice.measured['unread_block_seconds_share']:.0%} of the "
        "block-seconds on decode were never read; later turns are not seen here, so take the value from the journals"
    )
    return advice


def _lease(server: Prometheus) -> Advice:
    advice = Advice(topic="kv_lease_duration", setting="kv.lease")
    ends = server.increase("kvops_holds_ended_total", "ended_by", 'holder="prefill"')
    lease = next(iter(server.ask('max(kvops_config_seconds{param="kv_lease_duration"})').values()), 0.0)
    if sum(ends.values()) < MIN_HOLDS or not lease:
        advice.missing = (
            f"{MIN_HOLDS} holds of prefill that ended within {_WINDOW} (there are {sum(ends.values()):.0f})"
        )
        return advice
    expired = ends.get("expired", 0.0)
    advice.measured = {"lease_seconds": lease, "holds_expired": expired}
    if expired:
        advice.value = round(2 * lease)
        advice.reason = f"{expired:.0f} holds expired under a lease of {lease:.0f} s: double it and find out why"
    else:
        advice.reason = f"no hold expired under the lease of {lease:.0f} s: keep it"
    return advice


def _posting(server: Prometheus) -> Advice:
    advice = Advice(topic="block size and descriptors")
    post = sum(server.increase("kvops_transfer_post_seconds_sum").values())
    wire = sum(server.increase("kvops_transfer_duration_seconds_sum").values())
    if not wire:
        advice.missing = f"transfers within {_WINDOW}: kvops_transfer_duration_seconds has none"
        return advice
    advice.measured = {"post_share": post / wire}
    told = f"posting takes {post / wire:.0%} of a transfer"
    advice.reason = f"{told}: raise --block-size, or use push" if post / wire >= 0.2 else f"{told}: nothing to do"
    return advice
