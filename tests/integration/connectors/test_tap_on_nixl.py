"""The tap on real NIXL agents: two in this process, real memory, real notices."""

from __future__ import annotations

import time
import uuid
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvops_connectors import events
from kvops_connectors.guard import Guard
from kvops_connectors.tap import AgentTap

BLOCK_BYTES, BLOCKS = 4096, 8


class Side:
    """One rank: an agent, its memory, and what vLLM's worker would know."""

    def __init__(self) -> None:
        # Both take seconds to import, which the collection of tests must not.
        torch, nixl = import_module("torch"), import_module("nixl._api")
        self.name = uuid.uuid4().hex
        self.nixl_wrapper = nixl.nixl_agent(self.name, nixl.nixl_agent_config(capture_telemetry=True))
        self.memory = torch.zeros(BLOCK_BYTES * BLOCKS, dtype=torch.uint8)
        self.nixl_wrapper.register_memory(self.memory)
        self._reqs_to_send: dict[str, float] = {}
        self._reqs_to_process: set[str] = set()
        self._recving_metadata: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.guard = Guard("worker")
        self.tap = AgentTap(self, 0, self.guard, self.seen.append)

    def blocks(self, owner: str) -> Any:
        base = self.memory.data_ptr()
        spans = [(base + number * BLOCK_BYTES, BLOCK_BYTES, 0) for number in range(BLOCKS)]
        return self.nixl_wrapper.prep_xfer_dlist(owner, self.nixl_wrapper.get_xfer_descs(spans, "DRAM"))


def eventually(check: Any) -> Any:
    deadline = time.monotonic() + 20
    while not (result := check()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


@pytest.fixture
def sides() -> tuple[Side, Side]:
    reader, owner = Side(), Side()
    for one, other in ((reader, owner), (owner, reader)):
        one.nixl_wrapper.add_remote_agent(other.nixl_wrapper.get_agent_metadata())
    return reader, owner


def read(reader: Side, owner: Side, blocks: list[int], notice: bytes) -> None:
    agent = reader.nixl_wrapper
    base = owner.memory.data_ptr()
    spans = [(base + number * BLOCK_BYTES, BLOCK_BYTES, 0) for number in range(BLOCKS)]
    theirs = agent.prep_xfer_dlist(owner.name, agent.get_xfer_descs(spans, "DRAM"))
    handle = agent.make_prepped_xfer("READ", reader.blocks(""), blocks, theirs, blocks, notif_msg=notice)
    agent.transfer(handle)
    assert eventually(lambda: agent.check_xfer_state(handle) == "DONE")
    agent.get_xfer_telemetry(handle)
    agent.release_xfer_handle(handle)


def test_a_read_is_seen_with_its_bytes_and_request(sides):
    reader, owner = sides
    owner.memory.fill_(7)
    reader.tap.current.request_id, reader.tap.current.peer = "d-1", "10.0.0.7:5600"
    read(reader, owner, [0, 2, 5], b"p-1:1")
    posted, ended = reader.seen
    assert posted == events.Posted(0, 1, "d-1", "READ")
    assert (ended.request_id, ended.ok, ended.bytes, ended.peer) == ("d-1", True, 3 * BLOCK_BYTES, "10.0.0.7:5600")
    assert ended.wire_seconds > 0
    assert int(reader.memory.sum()) == 7 * 3 * BLOCK_BYTES
    assert reader.guard.errors == owner.guard.errors == 0


def test_the_owner_sees_the_notice_of_a_read_and_what_was_left_of_its_hold(sides):
    reader, owner = sides
    owner._reqs_to_send["p-1"] = time.perf_counter() + 30
    read(reader, owner, [1], b"p-1:1")
    notices = eventually(owner.nixl_wrapper.get_new_notifs)
    assert list(notices.values()) == [[b"p-1:1"]]
    assert 0 < owner.tap.noticed["p-1"] < 30


def test_the_notice_of_a_read_after_the_hold_is_seen_as_late(sides):
    reader, owner = sides
    read(reader, owner, [1], b"p-1:1")
    assert eventually(owner.nixl_wrapper.get_new_notifs)
    assert owner.seen == [events.LateNotice("p-1")]


def test_heartbeats_and_registrations_arrive_unchanged_and_are_seen(sides):
    reader, owner = sides
    owner._reqs_to_send = {"p-1": time.perf_counter() + 30, "p-2": time.perf_counter() + 30}
    arrived: list[bytes] = []
    owner.tap.on_registration = arrived.append
    registration = msgspec.msgpack.encode({"request_id": "d-1", "local_block_ids": [[1, 2, 3]]})
    messages = [b"HB:p-1,p-2,p-9", b"PUSH_REG:" + registration]
    for message in messages:
        reader.nixl_wrapper.send_notif(owner.name, notif_msg=message)
    got: list[bytes] = []

    def both() -> bool:
        for some in owner.nixl_wrapper.get_new_notifs().values():
            got.extend(some)
        return len(got) == 2

    assert eventually(both)
    assert sorted(got) == sorted(messages)
    assert (reader.tap.heartbeats_sent, owner.tap.lease_renewals, arrived) == (1, 2, [registration])


def test_a_transfer_that_cannot_be_made_raises_as_without_the_tap(sides):
    reader, _ = sides
    with pytest.raises(Exception, match=r".+"):
        reader.nixl_wrapper.make_prepped_xfer("READ", SimpleNamespace(), [0], SimpleNamespace(), [0])
    assert reader.seen == []
    assert reader.guard.errors == 0
