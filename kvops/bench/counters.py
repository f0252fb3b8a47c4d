"""What the engines of a leg counted: read from their ``/metrics`` before and after."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import aiohttp

from kvops.bench.results import CellCounters, Leg, RoleCounters
from kvops.errors import KvopsError
from kvops.metrics_text import Samples
from kvops_connectors.catalogue import RECOMPUTE_REASONS

if TYPE_CHECKING:
    from collections.abc import Iterable

# Counters reach /metrics a scheduler step after the answer does.
_SETTLE_SECONDS = 5.0
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
# A share of the prompts that decode may compute itself: the last token of each, and what is left of a block.
_MOST_COMPUTED_BY_DECODE = 0.1
# A few prompts may begin alike by chance, but a cache that is on finds all of a conversation's history.
_MOST_CACHED_BY_COLD_PREFILL = 0.1

Counted = dict[str, RoleCounters]


async def read(session: aiohttp.ClientSession, leg: Leg) -> Counted:
    """Return what each role of a leg has counted since its engines started.

    Raises:
        KvopsError: an engine's metrics cannot be read.
    """
    urls = {"prefill": leg.prefill, "decode": leg.decode}
    return {role: _sum(await asyncio.gather(*(_scrape(session, url) for url in urls[role]))) for role in urls}


async def settled(session: aiohttp.ClientSession, leg: Leg, before: Counted, prompt_tokens: int) -> Counted:
    """Return what was added since ``before``, as soon as decode has accounted for ``prompt_tokens``."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        after = await read(session, leg)
        added = {role: _difference(after[role], before[role]) for role in after}
        decode = added["decode"]
        accounted = decode.computed_tokens + decode.cached_tokens + decode.transferred_tokens
        if (accounted >= prompt_tokens and _moved(added)) or time.monotonic() > deadline:
            return added
        await asyncio.sleep(0.05)


def problems(counters: CellCounters, leg: Leg, *, continues: bool) -> list[str]:
    """Return why the figures of a cell mean nothing: one sentence each.

    Args:
        counters: of the cell.
        leg: that ran it.
        continues: whether requests continued earlier ones, so that their KV could be read back.
    """
    where = f"{counters.leg}, round {counters.round + 1}, {counters.cell.input_tokens} tokens"
    prefill, decode = counters.prefill, counters.decode
    total = decode.computed_tokens + decode.cached_tokens + decode.transferred_tokens
    found = []
    if not _moved({"prefill": prefill, "decode": decode}) or not decode.transferred_tokens:
        found.append("no KV moved")
    elif decode.computed_tokens > _MOST_COMPUTED_BY_DECODE * total:
        found.append(f"decode computed {decode.computed_tokens} of {total} prompt tokens itself")
    asked = prefill.computed_tokens + prefill.cached_tokens + prefill.transferred_tokens
    cold = leg.prefill_cache == "cold"
    if continues and cold and leg.conversation_ids and not prefill.transferred_tokens:
        found.append("conversations were named, but nothing was read back from decode")
    if cold and prefill.cached_tokens > _MOST_CACHED_BY_COLD_PREFILL * asked:
        found.append(
            f"prefill is called cold but found {prefill.cached_tokens} of {asked} prompt tokens in its own cache: "
            "start it with --no-enable-prefix-caching, or say --prefill-cache warm"
        )
    if late := prefill.reads_after_expiry + decode.reads_after_expiry:
        found.append(f"{late} times KV was read after its lease or TTL had ended, so answers may be wrong")
    return [f"{where}: {problem}" for problem in found]


def _moved(counted: Counted) -> bool:
    return any(role.kv_bytes for role in counted.values())


async def _scrape(session: aiohttp.ClientSession, url: str) -> RoleCounters:
    try:
        async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=30)) as answer:
            samples = Samples(await answer.text())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise KvopsError(f"cannot read {url}/metrics: {error or type(error).__name__}", "check the engine") from None
    return RoleCounters(
        computed_tokens=round(samples.total(_PROMPT_TOKENS, source="local_compute")),
        cached_tokens=round(samples.total(_PROMPT_TOKENS, source="local_cache_hit")),
        transferred_tokens=round(samples.total(_PROMPT_TOKENS, source="external_kv_transfer")),
        recomputed_tokens={
            reason: round(tokens)
            for reason in RECOMPUTE_REASONS
            if (tokens := samples.total("kvops_recompute_tokens_total", reason=reason))
        },
        kv_bytes=round(samples.total("vllm:nixl_bytes_transferred_sum")),
        transfers=round(samples.total("vllm:nixl_bytes_transferred_count")),
        transfer_seconds=samples.total("vllm:nixl_xfer_time_seconds_sum"),
        post_seconds=samples.total("vllm:nixl_post_time_seconds_sum"),
        descriptors=round(samples.total("vllm:nixl_num_descriptors_sum")),
        reads_after_expiry=round(
            max(
                samples.total("vllm:nixl_num_notifications_after_expiry_total"),
                samples.total("kvops_reads_after_expiry_total"),
            )
        ),
        expired=round(samples.total("vllm:nixl_num_kv_expired_reqs_total")),
    )


def _sum(parts: Iterable[RoleCounters]) -> RoleCounters:
    total = RoleCounters()
    for part in parts:
        total.add(part)
    return total


def _difference(after: RoleCounters, before: RoleCounters) -> RoleCounters:
    total = _sum([after])
    total.add(before, sign=-1)
    total.recomputed_tokens = {reason: tokens for reason, tokens in total.recomputed_tokens.items() if tokens}
    return total
