"""Advice on a fleet's settings from what its journals measured; each piece with its reason, or with what is missing."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvops.journal import fits, observations
from kvops.journal.intervals import estimate, ratio
from kvops.journal.legs import ALL
from kvops.router.settings import margin_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.journal.fits import PrefillCost, TransferCost
    from kvops.journal.legs import Leg
    from kvops.journal.observations import Turns
    from kvops.journal.tables import Journal

MIN_GAPS = 30
MIN_HOLDS = 30
# A TTL that wins this share of all reuse; the last few percent are long pauses, each held for at the full price.
_REUSE_SHARE = 0.95
_CURVE_POINTS = 12
_MAX_TTL_SECONDS = 86_400
# Renewals come every sixth of a lease, so a hold within a third of it survives two that are lost.
_LEASE_FACTOR = 3
_DEFAULT_LEASE_SECONDS = 30
_POST_SHARE = 0.2
# Below this share of the time to first token a gain is not worth a mode's constraints.
_GAIN_SHARE = 0.05
_BUSY_GOAL, _BUSY_HIGH, _BUSY_LOW = 0.7, 0.85, 0.3
_QUEUE_SHARE = 0.1


class Point(msgspec.Struct, frozen=True):
    """One TTL: what it would have won and paid over the time of the journal."""

    ttl_seconds: int
    reused_tokens: int
    block_seconds: float


class Advice(msgspec.Struct, kw_only=True):
    """One piece of advice.

    Attributes:
        topic: what it is about.
        setting: path of the setting in kvops.yaml; empty if there is none, or if hardware must change first.
        value: the advised value; None where there is nothing to change or not enough data.
        reason: why, with the figures.
        measured: the quantities behind it, by name with unit.
        missing: what is missing to say more; empty if nothing is.
        curve: of the TTL.
    """

    topic: str
    setting: str = ""
    value: int | str | None = None
    reason: str = ""
    measured: dict[str, float] = {}
    missing: str = ""
    curve: list[Point] = []


class Costs(NamedTuple):
    """Fitted costs with their resamples, and the transfers they come from."""

    transfers: tuple[TransferCost, list[TransferCost]]
    prefills: tuple[PrefillCost, list[PrefillCost]]
    direction: str
    observations: int


def advise(legs: Sequence[Leg]) -> list[Advice]:
    """Return advice from the journals of ``legs``; from several legs of a run, the mode by comparing them."""
    journals = [(leg, leg.journal) for leg in legs if leg.journal]
    if not journals:
        return [mode_by_comparison(legs)]
    # Readback is measured only where it took place, so such a leg says most.
    reads = "SELECT count(*) FROM requests WHERE direction = 'd_to_p'"
    leg, journal = max(journals, key=lambda pair: pair[1].one(reads))
    # Prefill works alike in all legs of a run, and those without readback show prompts of more lengths.
    costs, missing = fit_costs(journal, [other for one, other in journals if one.conditions == leg.conditions])
    turns = observations.turns(journal)
    mode = (
        mode_by_comparison(legs) if len({one.mode for one in legs}) > 1 else mode_of_journal(leg, costs, missing, turns)
    )
    return [
        mode,
        recompute_threshold(costs, missing),
        decoder_ttl(turns),
        lease(journal),
        descriptors(journal),
        ratio_of_roles(leg),
    ]


def patch(advice: Sequence[Advice]) -> dict[str, object]:
    """Return what to change in kvops.yaml, nested as there; empty if nothing."""
    found: dict[str, object] = {}
    for one in advice:
        if one.setting and one.value is not None:
            *sections, key = one.setting.split(".")
            place = found
            for section in sections:
                place = place.setdefault(section, {})  # type: ignore[assignment]
            place[key] = one.value
    return found


def fit_costs(journal: Journal, alike: Sequence[Journal]) -> tuple[Costs | None, str]:
    """Return the costs of moving and of computing, or None and what is missing.

    Args:
        journal: of which transfers are taken.
        alike: of which prefills are taken; ``journal`` is among them.
    """
    tokens, history, seconds = observations.prefills(alike)
    missing = fits.missing(tokens, "prefills")
    direction = "d_to_p"
    moved, moving = observations.transfers(journal, direction)
    if fits.missing(moved, "transfers"):
        direction = "p_to_d"
        moved, moving = observations.transfers(journal, direction)
    missing = "; ".join(filter(None, (missing, fits.missing(moved, "transfers of KV"))))
    if missing:
        return None, missing
    count = min(tokens.size, moved.size)
    return Costs(fits.fit_transfer(moved, moving), fits.fit_prefill(tokens, history, seconds), direction, count), ""


def recompute_threshold(costs: Costs | None, missing: str) -> Advice:
    """Return the number of tokens from which reading KV back is faster than computing it."""
    advice = Advice(topic="kv_recompute_threshold", setting="kv.recompute_threshold", missing=missing)
    if costs is None:
        return advice
    transfer, prefill = costs.transfers[0], costs.prefills[0]
    found = fits.break_even_estimate(costs.transfers, costs.prefills, costs.observations)
    advice.measured = {
        "transfer_fixed_seconds": transfer.fixed,
        "transfer_seconds_per_token": transfer.each,
        "prefill_fixed_seconds": prefill.fixed,
        "prefill_seconds_per_token": prefill.each,
        "prefill_seconds_per_token_squared": prefill.square,
        "break_even_tokens": found.value,
        "break_even_low_tokens": found.low,
        "break_even_high_tokens": found.high,
    }
    if not math.isfinite(found.value):
        advice.reason = "computing was faster than moving at every length that was seen: readback does not pay here"
        return advice
    advice.value = max(1, math.ceil(found.value))
    advice.reason = (
        f"moving n tokens took {transfer.fixed * 1e3:.2f} ms + {transfer.each * 1e6:.3f} us n, computing them adds "
        f"{prefill.each * 1e6:.3f} us n + {prefill.square * 1e12:.2f} ps n^2: equal at {found.value:.0f} tokens "
        f"[{found.low:.0f}, {found.high:.0f}]"
    )
    if costs.direction == "p_to_d":
        advice.reason += "; from transfers of prefill to decode, for too few went back"
    return advice


def decoder_ttl(turns: Turns) -> Advice:
    """Return the smallest TTL that wins nearly all reuse, with the curve of what others win and pay."""
    advice = Advice(topic="decoder_kv_blocks_ttl", setting="kv.decoder_ttl")
    useful = np.isfinite(turns.gap_seconds) & (turns.reusable_tokens > 0)
    gaps, tokens = turns.gap_seconds[useful], turns.reusable_tokens[useful]
    if gaps.size < MIN_GAPS:
        advice.missing = f"{MIN_GAPS - gaps.size} more turns that continue a conversation (there are {gaps.size})"
        return advice
    order = np.argsort(gaps)
    won = np.cumsum(tokens[order]) / tokens.sum()
    value = ttl_for_gap(gaps[order][int(np.searchsorted(won, _REUSE_SHARE - 1e-9))])
    candidates = {ttl_for_gap(gap) for gap in np.quantile(gaps, np.linspace(0, 1, _CURVE_POINTS), method="higher")}
    advice.curve = [ttl_point(turns, ttl) for ttl in sorted(candidates | {value, 480})]
    chosen = ttl_point(turns, value)
    default = ttl_point(turns, 480)
    advice.value = value
    advice.measured = {
        "gap_median_seconds": float(np.median(gaps)),
        "gap_p95_seconds": float(np.quantile(gaps, 0.95)),
        "reuse_share": chosen.reused_tokens / float(tokens.sum()),
        "block_seconds": chosen.block_seconds,
        "block_seconds_at_480": default.block_seconds,
    }
    advice.reason = (
        f"wins {advice.measured['reuse_share']:.1%} of the tokens that next turns could read back, for "
        f"{chosen.block_seconds:,.0f} block-seconds; 480 s would win {default.reused_tokens / float(tokens.sum()):.1%} "
        f"for {default.block_seconds:,.0f}; half of the gaps are under {np.median(gaps):.1f} s"
    )
    return advice


def ttl_for_gap(gap_seconds: float) -> int:
    """Return the smallest TTL with which the router still uses the handle after a gap."""
    longer = itertools.count(math.floor(gap_seconds) + 1)
    return min(next(ttl for ttl in longer if gap_seconds < _usable_seconds(ttl)), _MAX_TTL_SECONDS)


def ttl_point(turns: Turns, ttl_seconds: int) -> Point:
    """Return what a TTL would have won and paid; a hold ends with the next turn, the TTL or the journal."""
    in_time = turns.gap_seconds < _usable_seconds(ttl_seconds)
    held = np.where(in_time, turns.gap_seconds, np.minimum(ttl_seconds, turns.seen_seconds))
    return Point(ttl_seconds, int(turns.reusable_tokens[in_time].sum()), float((held * turns.blocks).sum()))


def _usable_seconds(ttl_seconds: int) -> float:
    return ttl_seconds - margin_of(ttl_seconds)


def lease(journal: Journal) -> Advice:
    """Return the lease that prefill's longest hold asks for."""
    advice = Advice(topic="kv_lease_duration", setting="kv.lease")
    row = journal.rows(
        "SELECT count(*) FILTER (ended_by = 'read'), max(held) FILTER (ended_by = 'read'),"
        " count(*) FILTER (ended_by = 'expired'), max(granted) FROM holds WHERE holder = 'prefill'"
    )[0]
    read, longest, expired, granted = (
        int(row[0]),
        float(row[1] or 0),
        int(row[2]),
        float(row[3] or _DEFAULT_LEASE_SECONDS),
    )
    advice.measured = {
        "holds_read": read,
        "longest_hold_seconds": longest,
        "holds_expired": expired,
        "lease_seconds": granted,
    }
    if read + expired < MIN_HOLDS:
        advice.missing = f"{MIN_HOLDS - read - expired} more holds of prefill that ended (there are {read + expired})"
        return advice
    needed = max(_DEFAULT_LEASE_SECONDS, math.ceil(_LEASE_FACTOR * longest))
    if expired:
        needed = max(needed, math.ceil(2 * granted))
        advice.reason = (
            f"{expired} holds expired unread under a lease of {granted:.0f} s, so how long they needed is unknown: "
            "double it, look why with kvops trace --failed, and measure again"
        )
    else:
        advice.reason = (
            f"the longest of {read} holds lasted {longest:.1f} s; {_LEASE_FACTOR} times that survives lost renewals, "
            f"and vLLM's default of {_DEFAULT_LEASE_SECONDS} s is the least"
        )
    advice.value = needed
    return advice


def descriptors(journal: Journal) -> Advice:
    """Return what to do about the time that posting descriptors takes."""
    advice = Advice(topic="block size and descriptors")
    row = journal.rows(
        "SELECT count(wire), sum(post), sum(wire), sum(descriptors), sum(transfers), sum(bytes) FROM"
        " (SELECT wire, post, descriptors, transfers, bytes FROM requests WHERE wire > 0"
        " UNION ALL SELECT wire, post, descriptors, transfers, bytes FROM holds WHERE wire > 0)"
    )[0]
    count = int(row[0])
    if count < fits.MIN_OBSERVATIONS:
        advice.missing = f"{fits.MIN_OBSERVATIONS - count} more transfers (there are {count})"
        return advice
    post, wire, each, transfers, moved = (float(value or 0) for value in row[1:])
    size = observations.block_tokens(journal)
    advice.measured = {
        "post_share": post / wire,
        "descriptors_per_transfer": each / transfers if transfers else 0.0,
        "bytes_per_descriptor": moved / each if each else 0.0,
        "block_tokens": size,
    }
    share = f"posting takes {post / wire:.0%} of a transfer ({advice.measured['descriptors_per_transfer']:,.0f} "
    share += f"descriptors of {advice.measured['bytes_per_descriptor'] / 1e3:,.0f} kB)"
    if post / wire < _POST_SHARE:
        advice.reason = f"{share}: a block size of {size} tokens is large enough"
        return advice
    advice.reason = (
        f"{share}: raise --block-size on both sides from {size} to {min(4 * size, 128)} tokens if the attention "
        "backend allows it, or use push, which posts from a thread of its own"
    )
    return advice


def ratio_of_roles(leg: Leg) -> Advice:
    """Return which role is the bottleneck, by how busy prefill is and where requests queue."""
    advice = Advice(topic="prefill to decode ratio")
    assert leg.journal is not None  # noqa: S101 - the caller chose a leg with a journal
    prefill, decode = (observations.engines(leg.journal, role) for role in ("prefill", "decode"))
    ttft = estimate(leg.good(ALL, "ttft_seconds"))
    if not prefill.count or not decode.count or ttft is None:
        advice.missing = "journals of prefill and of decode, with requests that ended well"
        return advice
    advice.measured = {
        "prefill_engines": prefill.count,
        "decode_engines": decode.count,
        "prefill_busy_share": prefill.busy_share,
        "prefill_queue_seconds": prefill.queue_seconds,
        "decode_queue_seconds": decode.queue_seconds,
    }
    told = (
        f"prefill ({prefill.count}) has work {prefill.busy_share:.0%} of the time; requests queue "
        f"{prefill.queue_seconds * 1e3:.1f} ms there and {decode.queue_seconds * 1e3:.1f} ms on decode ({decode.count})"
    )
    enough = max(1, math.ceil(prefill.count * prefill.busy_share / _BUSY_GOAL))
    queued = _QUEUE_SHARE * ttft.value
    if decode.queue_seconds > max(queued, 2 * prefill.queue_seconds):
        advice.reason = f"{told}: decode is the bottleneck; try {decode.count + 1} decode engines"
    elif prefill.busy_share > _BUSY_HIGH or prefill.queue_seconds > max(queued, 2 * decode.queue_seconds):
        advice.reason = f"{told}: prefill is the bottleneck; try {max(enough, prefill.count + 1)} prefill engines"
    elif prefill.busy_share < _BUSY_LOW and enough < prefill.count:
        advice.reason = f"{told}: {enough} prefill engines would do"
    else:
        advice.reason = f"{told}: keep {prefill.count}:{decode.count}"
    return advice


def mode_by_comparison(legs: Sequence[Leg]) -> Advice:
    """Return the mode whose leg had the shortest time to first token, the same work having been given to all."""
    advice = Advice(topic="mode", setting="mode")
    timed = [(leg, leg.good(ALL, "ttft_seconds")) for leg in legs if ALL in leg.samples]
    timed = [(leg, values[np.isfinite(values)]) for leg, values in timed]
    timed = sorted(((leg, values) for leg, values in timed if values.size), key=lambda pair: float(pair[1].mean()))
    advice.measured = {f"{leg.name}_ttft_seconds": float(values.mean()) for leg, values in timed}
    if len({leg.mode for leg, _ in timed}) < 2 or any(values.size < fits.MIN_OBSERVATIONS for _, values in timed):
        advice.missing = (
            f"two modes with {fits.MIN_OBSERVATIONS} good requests each: kvops bench sweep, or kvops bench turns"
        )
        return advice
    best = timed[0]
    other = next(pair for pair in timed if pair[0].mode != best[0].mode)
    found = ratio(best[1], other[1])
    assert found is not None  # noqa: S101 - both samples hold positive times
    told = f"mean TTFT of {best[0].name} is {found.value:.2f} [{found.low:.2f}, {found.high:.2f}] of {other[0].name}'s"
    if found.high < 1:
        advice.value, advice.reason = best[0].mode, told
    else:
        advice.reason = f"{told}: no difference is shown, so keep what you run"
    return advice


def mode_of_journal(leg: Leg, costs: Costs | None, missing: str, turns: Turns) -> Advice:
    """Return the mode by what readback and push would save in the time to first token of the requests seen."""
    advice = Advice(topic="mode", setting="mode")
    assert leg.journal is not None  # noqa: S101 - the caller chose a leg with a journal
    ttft = estimate(leg.good(ALL, "ttft_seconds"))
    if costs is None or ttft is None:
        advice.missing = missing or "requests that ended well, in the journals of the router and of decode"
        return advice
    saved = _readback_saves(costs, turns, ttft.count)
    advice.measured = {"ttft_seconds": ttft.value, "readback_saves_seconds": saved}
    if leg.mode == "push":
        pushed = None
        told = f"mean TTFT is {ttft.value * 1e3:.1f} ms; readback would save {saved * 1e3:.1f} ms of it"
        advice.missing = "a run of pull and push under the same load (kvops bench sweep) to say what push saves"
    else:
        pushed = _push_saves(leg.journal)
        advice.measured["push_saves_seconds"] = pushed
        told = (
            f"mean TTFT is {ttft.value * 1e3:.1f} ms; a request, readback saves {saved * 1e3:.1f} ms and push could "
            f"save up to {pushed * 1e3:.1f} ms of the handover"
        )
    floor = _GAIN_SHARE * ttft.value
    if saved > max(floor, pushed or 0.0):
        advice.value, advice.reason = "bidirectional", f"{told}: conversations come back"
    elif pushed is not None and pushed > floor:
        advice.value, advice.reason = "push", f"{told}; push needs decode to be chosen before prefill ends"
    elif pushed is not None:
        advice.value, advice.reason = "pull", f"{told}: neither is {_GAIN_SHARE:.0%}, and pull binds decode last"
    else:
        advice.reason = told
    return advice


def _readback_saves(costs: Costs, turns: Turns, requests: int) -> float:
    """Return the seconds of TTFT that readback saves a request, on the mean over all."""
    tokens = turns.reusable_tokens[turns.reusable_tokens > 0]
    gain = costs.prefills[0].extra_seconds(tokens) - costs.transfers[0].seconds(tokens)
    return float(np.maximum(gain, 0).sum()) / max(requests, 1)


def _push_saves(journal: Journal) -> float:
    """Return the mean seconds between the end of prefill and KV on decode in which no data moved."""
    found = observations.handovers(journal)
    data = np.nan_to_num(found["wire"]) - np.nan_to_num(found["post"])
    idle = np.maximum(found["handover"] - np.maximum(data, 0), 0)
    return float(np.mean(idle)) if idle.size else 0.0
