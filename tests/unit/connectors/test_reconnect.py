from __future__ import annotations

import pytest

from kvops_connectors.reconnect import Reconnect


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
    Reconnect(worker)
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
    Reconnect(worker)
