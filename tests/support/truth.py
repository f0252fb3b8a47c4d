"""What the instruments say, held against what vLLM counts itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvops_connectors.journal import HoldEnd, Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvops_connectors.journal import Line


class Scrape(Protocol):
    """The metrics of one engine."""

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""


def records_of(lines: list[Line]) -> list[Record]:
    return [line for line in lines if isinstance(line, Record)]


def check_tokens(metrics: Scrape, lines: list[Line]) -> None:
    """Check that tokens add up to the prompts, in records, in metrics and in vLLM's counters."""
    records = records_of(lines)
    scheduled = [record.tokens for record in records if record.tokens.recomputed]
    for spent in scheduled:
        computed = sum(count for reason, count in spent.recomputed.items() if reason != "preempted")
        assert spent.local_hit + spent.remote + computed == spent.prompt, spent
    ours = {
        source: metrics.total("kvops_prompt_tokens_total", source=source)
        for source in ("local_hit", "remote", "computed")
    }
    assert sum(ours.values()) == sum(spent.prompt for spent in scheduled)
    assert ours["remote"] == sum(spent.remote for spent in scheduled)
    assert ours["remote"] == metrics.total("kvops_loaded_tokens_total")
    again = metrics.total("kvops_recompute_tokens_total", reason="preempted")
    assert ours["computed"] == metrics.total("kvops_recompute_tokens_total") - again
    theirs = "vllm:prompt_tokens_by_source_total"
    uncounted = (
        ours["local_hit"] - metrics.total(theirs, source="local_cache_hit"),
        sum(map(loaded, records)) - metrics.total(theirs, source="external_kv_transfer"),
    )
    assert uncounted in sums_of_some((record.tokens.local_hit, loaded(record)) for record in left_by_client(records))


def loaded(record: Record) -> int:
    """Return the tokens as vLLM counts them: with the last one, although it is always computed again."""
    return record.tokens.remote + (record.tokens.recomputed.get("last_token", 0) if record.direction else 0)


def left_by_client(records: list[Record]) -> list[Record]:
    """Return what vLLM may not have counted: its output processor ignores outputs of requests that it has aborted."""
    return [record for record in records if record.outcome == "aborted"]


def sums_of_some(pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the sums of all subsets, of both parts."""
    sums = {(0, 0)}
    for one, other in pairs:
        sums |= {(left + one, right + other) for left, right in sums}
    return sums


def check_moves(metrics: Scrape, lines: list[Line]) -> None:
    """Check that transfers, bytes and descriptors are those of vLLM's NIXL counters and of the records."""
    moved = metrics.total("kvops_transfer_bytes_total")
    assert moved == metrics.total("vllm:nixl_bytes_transferred_sum") == metrics.total("kvops_peer_bytes_total")
    assert moved == sum(line.transfer.bytes for line in lines if line.transfer)
    transfers = metrics.total("kvops_transfers_total", outcome="ok")
    assert transfers == metrics.total("vllm:nixl_bytes_transferred_count")
    assert metrics.total("kvops_transfer_descriptors_total") == metrics.total("vllm:nixl_num_descriptors_sum")


def check_holds(metrics: Scrape, lines: list[Line]) -> None:
    """Check that holds granted are those that have ended and those that last, in metrics and records."""
    granted, ended = metrics.total("kvops_holds_total"), metrics.total("kvops_holds_ended_total")
    assert granted == ended + metrics.total("kvops_held_requests")
    assert granted == sum(1 for record in records_of(lines) if record.hold)
    assert ended == sum(1 for line in lines if isinstance(line, HoldEnd))


def check_instruments(metrics: Scrape, lines: list[Line]) -> None:
    """Check that every record was written, and nothing went wrong inside the instruments."""
    assert metrics.total("kvops_journal_records_total") == len(lines)
    assert metrics.total("kvops_journal_dropped_total") == metrics.total("kvops_instrument_errors_total") == 0
