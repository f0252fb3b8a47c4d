from __future__ import annotations

import contextlib
import queue
import threading

import pytest

from kvops_connectors.push import CANCELLED
from kvops_connectors.reconnect import PullReconnect, PushReconnect
from kvops_connectors.settings import Settings


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - named as NIXL names it
    pass


class Agent:
    """A NIXL agent that keeps the metadata of a peer that it refuses to reach."""

    def __init__(self):
        self.error = None

    def transfer(self, handle):
        if self.error:
            raise self.error
        return "PROC"

    def send_notif(self, agent, notif_msg):
        return self.transfer(None)

    def check_remote_metadata(self, agent):
        return True


class Worker:
    """As much of vLLM's pull worker as asks whether a peer is still known."""

    def __init__(self):
        self.nixl_wrapper = Agent()
        self.failed, self.invalid = set(), set()

    def _cleanup_remote_engines(self):
        self.invalid |= {name for name in self.failed if not self.nixl_wrapper.check_remote_metadata(name)}
        self.failed.clear()


@pytest.fixture
def worker():
    worker = Worker()
    PullReconnect(worker)
    return worker


def fail(worker, error):
    worker.nixl_wrapper.error = error
    with pytest.raises(type(error)):
        worker.nixl_wrapper.transfer("handle")
    worker.nixl_wrapper.error = None
    worker.failed.add("prefill")
    worker._cleanup_remote_engines()


def test_a_peer_that_disconnected_is_shaken_hands_with_again(worker):
    fail(worker, nixlRemoteDisconnectError())
    assert worker.invalid == {"prefill"}


def test_any_other_failure_leaves_the_peer_known(worker):
    fail(worker, ValueError())
    assert worker.invalid == set()


def test_a_disconnect_counts_once(worker):
    fail(worker, nixlRemoteDisconnectError())
    worker.invalid.clear()
    fail(worker, ValueError())
    assert worker.invalid == set()


def test_calls_that_work_are_handed_on(worker):
    assert worker.nixl_wrapper.transfer("handle") == "PROC"
    assert worker.nixl_wrapper.check_remote_metadata("prefill") is True


def test_a_worker_of_another_version_is_left_alone():
    worker = Worker()
    worker.nixl_wrapper = None
    PullReconnect(worker)


class PushWorker:
    """As much of vLLM's push worker as holds what is known of two peers, decode of one rank and prefill of two."""

    def __init__(self):
        self.nixl_wrapper = Agent()
        self._remote_agents = {"decode": {(0, 0): "d0"}, "prefill": {(0, 0): "p0", (0, 1): "p1"}}
        self._sending_transfers, self._sending_transfers_lock = {}, threading.Lock()
        self._reg_send_inbox, self._push_writer_wake = queue.Queue(), threading.Event()
        self._push_finished_blocks = {}

    def _cleanup_remote_engines(self):
        """Do nothing, as vLLM does in push mode."""

    def _cleanup_remote_engine(self, engine_id, *, log_eviction):
        del self._remote_agents[engine_id]

    def _do_send_reg_notif(self, req_id, reg_data):
        for agent in self._remote_agents[reg_data["remote_engine_id"]].values():
            with contextlib.suppress(nixlRemoteDisconnectError):
                self.nixl_wrapper.send_notif(agent, notif_msg=b"PUSH_REG:")


REGISTRATION = {"request_id": "r", "remote_engine_id": "prefill"}


@pytest.fixture
def push_worker():
    return PushWorker()


@pytest.fixture
def awaited():
    return {"r"}


@pytest.fixture
def reconnect(push_worker, awaited):
    return PushReconnect(push_worker, Settings(), {"w": "decode"}.get, awaited.__contains__)


def register(reconnect, worker, registration=REGISTRATION):
    reconnect.register(worker._do_send_reg_notif, "r", registration)


def test_decode_that_a_write_could_not_reach_is_let_go_of(reconnect, push_worker):
    reconnect.failed("w", nixlRemoteDisconnectError(), "decode")
    reconnect.let_go()
    assert list(push_worker._remote_agents) == ["prefill"]


def test_a_write_that_failed_on_its_way_tells_its_decode_by_the_request(reconnect, push_worker):
    reconnect.failed("w", nixlRemoteDisconnectError(), None)
    reconnect.let_go()
    assert list(push_worker._remote_agents) == ["prefill"]


def test_a_write_that_failed_for_another_reason_leaves_decode_known(reconnect, push_worker):
    reconnect.failed("w", ValueError(), "decode")
    reconnect.failed("unknown", nixlRemoteDisconnectError(), None)
    reconnect.let_go()
    assert list(push_worker._remote_agents) == ["decode", "prefill"]


@pytest.mark.parametrize("request_id", ["w", "of a hold that has ended"])
def test_decode_is_kept_while_something_may_be_on_its_way_to_it(reconnect, push_worker, request_id):
    push_worker._sending_transfers[request_id] = ["handle"]
    reconnect.failed("w", nixlRemoteDisconnectError(), "decode")
    reconnect.let_go()
    assert "decode" in push_worker._remote_agents
    push_worker._sending_transfers.clear()
    reconnect.let_go()
    assert "decode" not in push_worker._remote_agents


def test_prefill_that_a_heartbeat_could_not_reach_is_let_go_of(reconnect, push_worker):
    push_worker.nixl_wrapper.error = nixlRemoteDisconnectError()
    with pytest.raises(nixlRemoteDisconnectError):
        push_worker.nixl_wrapper.send_notif("p1", notif_msg=b"HB:r")
    reconnect.let_go()
    assert list(push_worker._remote_agents) == ["decode"]


def test_a_registration_that_reached_no_rank_is_sent_again(reconnect, push_worker):
    push_worker.nixl_wrapper.error = nixlRemoteDisconnectError()
    register(reconnect, push_worker)
    assert push_worker._reg_send_inbox.empty()
    reconnect.let_go()
    assert push_worker._reg_send_inbox.get_nowait() == ("r", REGISTRATION)
    assert push_worker._push_writer_wake.is_set()


def test_a_registration_that_reached_some_rank_is_not_sent_again(reconnect, push_worker):
    send = push_worker.nixl_wrapper.send_notif

    def refuse_one(agent, notif_msg):
        push_worker.nixl_wrapper.error = nixlRemoteDisconnectError() if agent == "p1" else None
        return send(agent, notif_msg)

    push_worker.nixl_wrapper.send_notif = refuse_one
    register(reconnect, push_worker)
    reconnect.let_go()
    assert "prefill" not in push_worker._remote_agents
    assert push_worker._reg_send_inbox.empty()


def test_a_registration_that_nobody_waits_for_any_more_is_not_sent_again(reconnect, push_worker, awaited):
    push_worker.nixl_wrapper.error = nixlRemoteDisconnectError()
    register(reconnect, push_worker)
    awaited.clear()
    reconnect.let_go()
    assert push_worker._reg_send_inbox.empty()


def test_the_word_that_nobody_waits_any_more_replaces_the_registration(reconnect, push_worker, awaited):
    push_worker.nixl_wrapper.error = nixlRemoteDisconnectError()
    register(reconnect, push_worker)
    awaited.clear()
    cancelled = REGISTRATION | {CANCELLED: True}
    register(reconnect, push_worker, cancelled)
    reconnect.let_go()
    assert push_worker._reg_send_inbox.get_nowait() == ("r", cancelled)
    assert push_worker._reg_send_inbox.empty()


def test_a_registration_that_arrived_is_forgotten(reconnect, push_worker):
    register(reconnect, push_worker)
    reconnect.failed("r", nixlRemoteDisconnectError(), "prefill")
    reconnect.let_go()
    assert push_worker._reg_send_inbox.empty()


def test_switched_off_a_peer_that_disconnected_stays_known(push_worker, awaited):
    reconnect = PushReconnect(push_worker, Settings(reconnect=False), {"w": "decode"}.get, awaited.__contains__)
    push_worker.nixl_wrapper.error = nixlRemoteDisconnectError()
    register(reconnect, push_worker)
    reconnect.failed("w", nixlRemoteDisconnectError(), "decode")
    reconnect.let_go()
    assert list(push_worker._remote_agents) == ["decode", "prefill"]


def test_a_push_worker_of_another_version_is_left_alone(awaited):
    PushReconnect(object(), Settings(), {}.get, awaited.__contains__)
