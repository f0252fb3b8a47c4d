"""The scheduler's side, fed with what vLLM's scheduler and the ranks would hand it."""

from __future__ import annotations

import time
from enum import Enum
from types import SimpleNamespace

import pytest

from kvops_connectors import events
from kvops_connectors.catalogue import CATALOGUE
from kvops_connectors.journal import Engine, HoldEnd, Record
from kvops_connectors.scheduler import SchedulerInstrument
from kvops_connectors.settings import Settings

ENGINE = Engine("e0", "both", 0, "7f1c8c1e-1b7e-4d1c-a0d5-1d2b4b7f8a11")
NAME = "cmpl-7f-0-1234abcd"
HANDLE = {
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_engine_id": "0e1dd4f2-60ac-4f20-95a7-2993d1aa29cb",
    "remote_request_id": "cmpl-7f-0-a7e3ef03",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "remote_num_tokens": 200,
}
LOAD = {"do_remote_prefill": True, "do_remote_decode": False, **HANDLE}
PREFILL = {"do_remote_prefill": False, "do_remote_decode": True}
Status = Enum("Status", ["FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR"])


class Journal:
    def __init__(self) -> None:
        self.lines: list[Record | HoldEnd] = []
        self.dropped = {"queue_full": 0, "write_error": 0}

    @property
    def written(self) -> int:
        return len(self.lines)

    def write(self, line) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def make(journal):
    def made(mode: str = "bidirectional", **settings):
        scheduler = SimpleNamespace(_reqs_need_send={}, use_host_buffer=False)
        return SchedulerInstrument(
            scheduler,
            engine=ENGINE,
            mode=mode,
            settings=Settings(**settings),
            block_tokens=32,
            total_blocks=1000,
            backend="UCX",
            writer=journal,
        )

    return made


def request(params=None, prompt=200, name=NAME):
    tokens = list(range(prompt))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        all_token_ids=[*tokens, *range(1000, 1008)],
        num_prompt_tokens=prompt,
        num_tokens=prompt + 8,
        num_computed_tokens=0,
        num_output_tokens=8,
        num_preemptions=0,
        prefill_stats=None,
        status=Status.FINISHED_STOPPED,
    )


def output(received=(), sent=(), failed=()):
    return SimpleNamespace(finished_recving=set(received), finished_sending=set(sent), failed_recving=set(failed))


def load(ours, one, local=0):
    ours.arrived(one)
    ours.matched(one, local, one.num_prompt_tokens - local)
    ours.allocated(one, one.num_prompt_tokens - local)


def arrive(ours, one, *seen):
    ours.output(seen, output(received=[one.request_id]))
    one.num_computed_tokens = one.num_prompt_tokens - 1
    ours.allocated(one, 0)


def end(ours, one, held=0, ttl=30.0):
    if held:
        ours._scheduler._reqs_need_send[one.request_id] = time.perf_counter() + ttl
    params = {"remote_num_tokens": one.num_prompt_tokens, "do_remote_decode": False} if held else None
    ours.finished(one, [[0] * held], bool(held), params)
    ours.step_over()
    return params


def ended(rank, wire, ok=True, peer="10.0.0.7:5600"):
    return events.Ended(rank, 1, NAME, "READ", ok, peer, 0.01, wire, 4096, 3)


def samples(ours):
    found = ours.samples.drain()
    assert all(len(labels) == len(CATALOGUE[name].labels) for name, labels, _, _ in found)
    return {(name, *labels): value for name, labels, value, _ in found}


def test_events_of_all_ranks_are_joined_into_one_record(make, journal):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    arrive(ours, one, ended(0, 0.2), ended(1, 0.5))
    end(ours, one)
    (record,) = journal.lines
    moved = record.transfer
    assert (moved.bytes, moved.transfers, moved.ranks, moved.wire_seconds) == (8192, 2, 2, 0.5)
    assert (record.tokens.remote, record.tokens.recomputed, record.outcome) == (199, {"last_token": 1}, "ok")


def test_every_sample_fits_the_catalogue(make):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    posted = events.Posted(0, 1, NAME, "READ")
    levels = events.Levels(1, 0, 0, 0.0, 0.0, 2, 1, 3)
    arrive(ours, one, posted, ended(0, 0.2), events.Handshake(0, 0.1, "ok"), levels, events.Errors(2))
    end(ours, one, held=7)
    found = samples(ours)
    assert found["kvops_transfer_bytes_total", "p_to_d"] == 4096
    assert found["kvops_prompt_tokens_total", "remote"] == 199
    assert found["kvops_instrument_errors_total", "worker"] == 2
    assert found["kvops_held_blocks", "decode"] == 7


def test_a_request_that_ends_before_the_ranks_events_of_its_step_still_has_them(make, journal):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    one.status = Status.FINISHED_ERROR
    ours.finished(one, [[]], False, None)
    ours.output([events.LoadFailed(NAME, "remote_gone")], output(received=[NAME], failed=[NAME]))
    ours.step_over()
    (record,) = journal.lines
    assert (record.outcome, record.error, record.tokens.recomputed) == ("failed", "remote_gone", {})


def test_a_load_that_fails_without_a_word_has_an_unknown_reason(make, journal):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    one.status = Status.FINISHED_ERROR
    ours.finished(one, [[]], False, None)
    ours.output([], output(received=[NAME], failed=[NAME]))
    ours.step_over()
    assert journal.lines[0].error == "unknown"


def test_tokens_of_another_connector_are_found_and_not_computed(make, journal):
    ours, one = make("pull"), request(dict(PREFILL))
    ours.arrived(one)
    ours.matched(one, 64, 0)
    one.prefill_stats = SimpleNamespace(num_local_cached_tokens=64, num_external_cached_tokens=96)
    ours.allocated(one, 0)
    end(ours, one)
    spent = journal.lines[0].tokens
    assert (spent.local_hit, spent.remote, spent.recomputed) == (160, 0, {"new_tokens": 40})


def test_a_peer_has_a_series_for_its_failures_before_the_first_one(make):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    ours.output([events.ReadBegan(NAME, "10.0.0.7:5600", "engine", 0.0, None)], output())
    known = {key: value for key, value in samples(ours).items() if key[0] == "kvops_peer_transfers_total"}
    name, peer = "kvops_peer_transfers_total", "10.0.0.7:5600"
    assert known == {(name, peer, "p_to_d", "ok"): 0, (name, peer, "p_to_d", "failed"): 0}


def test_a_write_that_is_begun_again_is_counted_and_no_failure_any_more(make, journal):
    ours, one = make("push"), request(dict(PREFILL))
    ours.arrived(one)
    ours.matched(one, 0, 0)
    ours.allocated(one, 0)
    end(ours, one, held=7)
    ours.output([events.LoadFailed(NAME, "remote_gone"), events.PushRetried(NAME)], output())
    ours.output([events.PeerDone(NAME, 9.0)], output(sent=[NAME]))
    assert samples(ours)["kvops_mends_total", "push_retry"] == 1
    assert (journal.lines[-1].hold.ended_by, journal.lines[-1].error) == ("read", None)


def test_a_readback_lost_on_two_ranks_is_mended_once(make):
    ours, one = make(), request({**PREFILL, **HANDLE})
    load(ours, one)
    lost = events.ReadbackLost(NAME)
    ours.output([events.LoadFailed(NAME, "ttl_expired"), lost, lost], output())
    assert ours.lost == {NAME}
    assert ours.readback(NAME) is one
    assert samples(ours)["kvops_mends_total", "expired_readback"] == 1


def test_a_request_that_is_aborted_while_it_loads_keeps_its_transfer(make, journal):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    one.status = Status.FINISHED_ABORTED
    ours.finished(one, [[]], False, None)
    ours.step_over()
    assert journal.lines == []
    ours.output([ended(0, 0.2)], output(received=[NAME]))
    ours.step_over()
    (record,) = journal.lines
    assert (record.outcome, record.transfer.bytes) == ("aborted", 4096)


def test_a_preempted_request_counts_what_is_computed_twice(make, journal):
    ours, one = make("pull"), request(dict(PREFILL))
    ours.arrived(one)
    ours.matched(one, 0, 0)
    ours.allocated(one, 0)
    one.num_preemptions = 1
    ours.matched(one, 64, 0)
    ours.allocated(one, 0)
    end(ours, one)
    assert journal.lines[0].tokens.recomputed == {"new_tokens": 200, "preempted": 208 - 64}


def hold(make, journal, seen, ttl=30.0):
    ours, one = make("pull"), request(dict(PREFILL))
    ours.arrived(one)
    ours.matched(one, 0, 0)
    ours.allocated(one, 0)
    end(ours, one, held=7, ttl=ttl)
    ours.output(seen, output(sent=[NAME]))
    ours.step_over()
    return ours, journal.lines[1].hold


@pytest.mark.parametrize(
    ("seen", "ttl", "ended_by"),
    [
        ([events.PeerDone(NAME, 21.0)], 30.0, "read"),
        ([], 0.0, "expired"),
        ([], 30.0, "released"),
    ],
)
def test_a_hold_ends_in_one_of_three_ways(make, journal, seen, ttl, ended_by):
    ours, over = hold(make, journal, seen, ttl)
    found = samples(ours)
    assert over.ended_by == ended_by
    assert found["kvops_holds_ended_total", "prefill", ended_by] == found["kvops_holds_total", "prefill"] == 1
    assert found["kvops_held_requests", "prefill"] == 0


def test_the_headroom_is_that_of_the_slowest_rank(make, journal):
    _, over = hold(make, journal, [events.PeerDone(NAME, 21.0), events.PeerDone(NAME, 19.5)])
    assert over.ttl_left_seconds == 19.5


def test_a_notice_after_the_end_of_a_hold_names_its_holder(make, journal):
    ours, _ = hold(make, journal, [], 0.0)
    ours.output([events.LateNotice(NAME), events.LateNotice("other")], output())
    found = samples(ours)
    assert found["kvops_reads_after_expiry_total", "prefill"] == 1
    assert found["kvops_reads_after_expiry_total", "unknown"] == 1


def test_a_second_notice_for_blocks_read_in_time_is_no_read_after_expiry(make, journal):
    ours, over = hold(make, journal, [events.PeerDone(NAME, 21.0)], 30.0)
    ours.output([events.LateNotice(NAME)], output())
    assert over.ended_by == "read"
    assert samples(ours).get(("kvops_reads_after_expiry_total", "prefill"), 0) == 0


def test_peers_beyond_the_limit_share_a_label(make):
    ours = make("pull", peer_limit=2)
    ours.output([ended(0, 0.1, peer=f"10.0.0.{number}:5600") for number in range(5)], output())
    found = samples(ours)
    assert found["kvops_peer_bytes_total", "10.0.0.1:5600", "p_to_d"] == 4096
    assert found["kvops_peer_bytes_total", "other", "p_to_d"] == 3 * 4096


def test_waiting_requests_and_transfers_in_flight_are_shown_and_go_back_to_0(make):
    ours, one = make("pull"), request(dict(LOAD))
    load(ours, one)
    ours.output([events.Posted(0, 1, NAME, "READ")], output())
    ours.step_over()
    found = samples(ours)
    assert found["kvops_requests_waiting_kv", "p_to_d"] == found["kvops_transfers_inflight", "p_to_d"] == 1
    arrive(ours, one, ended(0, 0.2))
    ours.step_over()
    found = samples(ours)
    assert found["kvops_requests_waiting_kv", "p_to_d"] == found["kvops_transfers_inflight", "p_to_d"] == 0
    assert found["kvops_oldest_waiting_kv_age_seconds", "p_to_d"] == 0


def test_a_quiet_step_has_nothing_to_report(make):
    ours = make("pull")
    ours.step_over()
    ours.samples.drain()
    ours.output([], output())
    ours.step_over()
    assert not ours.samples


def test_the_request_that_vllm_makes_up_to_free_blocks_is_not_recorded(make, journal):
    ours, one = make("pull"), request(dict(LOAD), prompt=1)
    ours.arrived(one)
    one.status = Status.FINISHED_ABORTED
    end(ours, one)
    assert journal.lines == []


def test_decodes_handle_carries_what_prefill_needs_to_judge_it(make):
    ours, one = make(), request(dict(LOAD))
    load(ours, one)
    arrive(ours, one, ended(0, 0.2))
    ours._scheduler._reqs_need_send[NAME] = time.perf_counter() + 480
    params = {"do_remote_decode": True, "remote_num_tokens": 207}
    ours.finished(one, [[1] * 7], True, params)
    said = params["kvops"]
    assert said["prefix"]["tokens"] == 207
    assert 479 < said["ttl_seconds"] <= 480
    assert abs(said["expires_at"] - time.time() - 480) < 5


SWITCHED_OFF = {
    "token_truth": ({"kvops": {"prefix": "ours"}}, 200),
    "expired_readback": ({"kvops": {"expires_at": 1.0, "ttl_seconds": 480}}, 200),
    "valid_handle": ({"remote_port": "x"}, 200),
}


@pytest.mark.parametrize("mend", SWITCHED_OFF)
def test_a_mend_that_is_switched_off_leaves_the_params_alone(make, mend):
    change, tokens = SWITCHED_OFF[mend]
    params = {**PREFILL, **HANDLE, **change}
    before = dict(params)
    make(**{mend: False}).arrived(request(params))
    assert params == before
    assert params["remote_num_tokens"] == tokens
