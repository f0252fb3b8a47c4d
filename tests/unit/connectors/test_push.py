"""Writes of push whose handshake with decode has failed."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import msgspec
import pytest

from kvops_connectors import events
from kvops_connectors.push import Pushes
from kvops_connectors.settings import Settings

BLOCKS = ([1, 2],)
REGISTRATION = {"request_id": "cmpl-7f-0-a7e3ef03", "decode_engine_id": "d", "local_block_ids": [[5, 6]]}
NAME = "cmpl-7f-0-1234abcd"
LATER = 1e9


@pytest.fixture
def worker():
    return SimpleNamespace(
        _deferred_push_inbox=queue.Queue(),
        _evict_finished_inbox=queue.Queue(),
        _pending_d_registrations={},
        _push_writer_wake=threading.Event(),
    )


@pytest.fixture
def emitted() -> list[events.Event]:
    return []


@pytest.fixture
def pushes(worker, emitted) -> Pushes:
    made = Pushes(worker, Settings(), emitted.append)
    made.began(NAME, BLOCKS, REGISTRATION)
    return made


def cancelled() -> bytes:
    return msgspec.msgpack.encode({**REGISTRATION, "kvops_cancelled": True})


def test_a_write_whose_handshake_failed_is_begun_again_after_a_pause(pushes, worker, emitted):
    pushes.parted(NAME)
    pushes.retry(0.0)
    assert worker._deferred_push_inbox.empty()
    pushes.retry(LATER)
    assert worker._deferred_push_inbox.get_nowait() == (NAME, BLOCKS, REGISTRATION)
    assert worker._push_writer_wake.is_set()
    assert emitted == [events.PushRetried(NAME)]


def test_it_is_tried_again_as_often_as_the_handshake_fails(pushes, worker):
    for _ in range(3):
        pushes.parted(NAME)
        pushes.retry(LATER)
    assert worker._deferred_push_inbox.qsize() == 3


def test_a_write_that_began_well_is_not_repeated(pushes, worker):
    pushes.retry(LATER)
    assert worker._deferred_push_inbox.empty()


def test_nothing_is_tried_again_once_the_hold_is_over(pushes, worker):
    pushes.parted(NAME)
    pushes.over(NAME)
    pushes.retry(LATER)
    assert worker._deferred_push_inbox.empty()


def test_a_write_is_stale_once_prefills_blocks_are_free(pushes):
    assert not pushes.is_stale(NAME, REGISTRATION)
    pushes.over(NAME)
    assert pushes.is_stale(NAME, REGISTRATION)


def test_a_write_is_stale_once_decode_has_taken_its_registration_back(pushes):
    pushes.registered(msgspec.msgpack.encode(REGISTRATION))
    assert not pushes.is_stale(NAME, REGISTRATION)
    pushes.registered(cancelled())
    assert pushes.is_stale(NAME, REGISTRATION)


@pytest.mark.parametrize(("seconds", "stale"), [(0.0, True), (60.0, False)])
def test_a_write_is_stale_once_decode_no_longer_waits_for_it_by_its_own_word(pushes, seconds, stale):
    pushes.registered(msgspec.msgpack.encode({**REGISTRATION, "kvops_timeout_seconds": seconds}))
    assert pushes.is_stale(NAME, REGISTRATION) is stale


def test_a_write_knows_its_decode_until_the_hold_is_over(pushes):
    assert pushes.decode_of(NAME) == "d"
    pushes.over(NAME)
    assert pushes.decode_of(NAME) is None


@pytest.mark.parametrize("said", [{"kvops_cancelled": True}, {"kvops_timeout_seconds": 60.0}])
def test_a_registration_that_decode_no_longer_waits_for_is_dropped(pushes, worker, said):
    pushes.registered(msgspec.msgpack.encode({**REGISTRATION, **said}))
    worker._pending_d_registrations[REGISTRATION["request_id"]] = REGISTRATION
    pushes.forget(LATER)
    assert worker._evict_finished_inbox.get_nowait() == REGISTRATION["request_id"]
    assert worker._push_writer_wake.is_set()


@pytest.mark.parametrize("said", [{}, {"kvops_timeout_seconds": 2 * LATER}])
def test_a_registration_that_decode_waits_for_is_kept(pushes, worker, said):
    pushes.registered(msgspec.msgpack.encode({**REGISTRATION, **said}))
    worker._pending_d_registrations[REGISTRATION["request_id"]] = REGISTRATION
    pushes.forget(LATER)
    assert worker._evict_finished_inbox.empty()


def test_switched_off_nothing_is_tried_again(worker):
    pushes = Pushes(worker, Settings(push_retry=False), lambda event: None)
    pushes.began(NAME, BLOCKS, REGISTRATION)
    pushes.parted(NAME)
    pushes.retry(LATER)
    assert worker._deferred_push_inbox.empty()
