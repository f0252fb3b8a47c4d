from __future__ import annotations

import aiohttp
import pytest

from kvops.bench import counters, running
from kvops.bench.client import Client
from kvops.bench.results import Cell
from kvops.bench.running import Runner, Server, expected_requests
from kvops.bench.workload import Sweep, Turns
from kvops.errors import KvopsError


class Sink:
    def __init__(self):
        self.requests, self.cells = [], []

    def request(self, result):
        self.requests.append(result)

    def cell(self, counted):
        self.cells.append(counted)


def sweep(**changes):
    fields = {
        "cells": (Cell(input_tokens=8, rate_per_second=50.0),), "seconds": 0.2, "output_tokens": 2, "arrivals": "constant",
        "rounds": 1, "warm_up": 1, "prefill_cache": "cold", "unique_prompts": True, "seed": 0,
    }  # fmt: skip
    return Sweep(**(fields | changes))


def turns(**changes):
    fields = {
        "conversations": 2, "turns": 3, "start_tokens": 10, "end_tokens": 50, "output_tokens": 4, "think_seconds": 0.0,
        "rate_per_second": 100.0, "abort_rate": 0.0, "arrivals": "constant", "rounds": 1, "prefill_cache": "cold", "seed": 0,
    }  # fmt: skip
    return Turns(**(fields | changes))


async def run(fleet, workload, *legs):
    sink = Sink()
    async with aiohttp.ClientSession() as session:
        servers = [Server(leg, Client(fleet.url, "tiny")) for leg in legs or (fleet.leg(),)]
        runner = Runner(session, servers, sink)
        await (runner.sweep(workload) if isinstance(workload, Sweep) else runner.turns(workload))
        for server in servers:
            server.client.close()
    return sink


async def test_warm_up_is_sent_and_in_no_figure(fleet):
    sink = await run(fleet, sweep())
    assert len(sink.requests) == expected_requests(sweep(), 1) == 10
    assert len(fleet.bodies) == 11


async def test_no_prompt_is_sent_twice(fleet):
    await run(fleet, sweep(rounds=2), fleet.leg("a"), fleet.leg("b"))
    assert len({tuple(body["prompt"]) for body in fleet.bodies}) == len(fleet.bodies)


async def test_one_prompt_over_and_over_where_that_is_asked_for(fleet):
    await run(fleet, sweep(unique_prompts=False, warm_up=0))
    assert len({tuple(body["prompt"]) for body in fleet.bodies}) == 1


async def test_a_warm_prefill_has_seen_every_prompt_before_it_is_measured(fleet):
    await run(fleet, sweep(prefill_cache="warm", warm_up=0))
    prompts = [tuple(body["prompt"]) for body in fleet.bodies]
    assert prompts[:10] == prompts[10:]
    assert {body["max_tokens"] for body in fleet.bodies[:10]} == {1}


async def test_requests_leave_when_due_although_none_has_been_answered(fleet):
    fleet.seconds = 0.5
    sink = await run(fleet, sweep(warm_up=0))
    first_end = min(result.sent + result.e2e_seconds for result in sink.requests)
    assert all(result.sent < first_end for result in sink.requests)


async def test_a_server_that_stands_still_ends_the_run_rather_than_filling_memory(fleet, monkeypatch):
    monkeypatch.setattr(running, "_MAX_UNDER_WAY", 3)
    fleet.seconds = 0.5
    with pytest.raises(KvopsError, match="3 requests were under way"):
        await run(fleet, sweep(warm_up=0))


async def test_one_at_a_time_waits_for_each_answer(fleet):
    sink = await run(fleet, sweep(cells=(Cell(input_tokens=8),)))
    ends = [result.scheduled + result.e2e_seconds for result in sink.requests]
    assert all(later.sent >= end - 0.001 for end, later in zip(ends, sink.requests[1:], strict=False))


async def test_the_leg_that_begins_changes_with_every_round(fleet):
    sink = await run(fleet, sweep(rounds=2), fleet.leg("a"), fleet.leg("b"))
    assert [counted.leg for counted in sink.cells] == ["a", "b", "b", "a"]


async def test_a_warm_up_that_fails_ends_the_run(fleet):
    fleet.behaviour = "short"
    with pytest.raises(KvopsError, match="1 tokens instead of 2"):
        await run(fleet, sweep())


async def test_a_turn_holds_the_answers_before_it(fleet):
    sink = await run(fleet, turns(conversations=1))
    first, second, third = (body["prompt"] for body in fleet.bodies[-3:])
    assert [len(first), len(second), len(third)] == [10, 30, 50]
    assert second[:14] == [*first, 7, 8, 9, 7]
    assert [result.new_tokens for result in sink.requests] == [10, 16, 16]


async def test_turns_of_one_conversation_bear_one_name(fleet):
    await run(fleet, turns(conversations=1), fleet.leg("on", conversation_ids=True))
    assert len({headers["X-Conversation-ID"] for headers in fleet.headers[-3:]}) == 1


async def test_aborted_turns_do_not_end_the_conversation(fleet):
    sink = await run(fleet, turns(conversations=1, abort_rate=1.0))
    assert [result.outcome for result in sink.requests] == ["aborted"] * 3


async def test_what_the_engines_counted_is_told_per_cell(fleet):
    sink = await run(fleet, sweep())
    assert sink.cells[0].decode.transferred_tokens == 80
    assert counters.problems(sink.cells[0], fleet.leg(), continues=False) == []


async def test_a_cell_without_kv_movement_is_a_problem(fleet, monkeypatch):
    monkeypatch.setattr(counters, "_SETTLE_SECONDS", 0.1)
    fleet.moves_kv = False
    sink = await run(fleet, sweep())
    assert "no KV moved" in counters.problems(sink.cells[0], fleet.leg(), continues=False)[0]


async def test_conversations_without_any_readback_are_a_problem(fleet):
    named = fleet.leg("on", conversation_ids=True, prefill_cache="cold")
    sink = await run(fleet, turns(), named)
    assert "nothing was read back" in counters.problems(sink.cells[0], named, continues=True)[0]
    assert counters.problems(sink.cells[0], named, continues=False) == []


async def test_a_prefill_that_is_called_cold_but_knew_the_prompts_is_a_problem(fleet):
    sink = await run(fleet, sweep(warm_up=0))
    sink.cells[0].prefill.computed_tokens, sink.cells[0].prefill.cached_tokens = 40, 40
    (problem,) = counters.problems(sink.cells[0], fleet.leg(prefill_cache="cold"), continues=False)
    assert "called cold but found 40 of 80 prompt tokens in its own cache" in problem
    assert counters.problems(sink.cells[0], fleet.leg(prefill_cache="warm"), continues=False) == []


async def test_a_read_after_expiry_is_a_problem(fleet):
    fleet.late_reads = 3
    sink = await run(fleet, sweep(warm_up=0))
    assert "3 times KV was read after" in counters.problems(sink.cells[0], fleet.leg(), continues=False)[0]
