from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvops.router import handles
from kvops.router.handles import Context, Handle, HandleError, Identity

CONTEXT = Context("r1", attempt=1, conversation="c", turn=2)
HANDLE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "default-prefill-0",
    "remote_request_id": "chatcmpl-f1b1417224844be8a376a953ccd94cae-a3c884e6",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 2,
    "remote_num_tokens": 271,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def read(handle: Any, host: str = "127.0.0.1") -> Handle:
    return handles.read(None if handle is ... else msgspec.Raw(json.dumps(handle).encode()), host)


def test_a_whole_handle_tells_where_its_holder_lives() -> None:
    assert read(HANDLE).identity == Identity("default-prefill-0", "127.0.0.1", 5600, 1, 2)


@pytest.mark.parametrize(
    "missing", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids", "tp_size"]
)
def test_a_handle_without_a_field_that_its_reader_needs_is_refused(missing: str) -> None:
    with pytest.raises(HandleError, match=missing):
        read({key: value for key, value in HANDLE.items() if key != missing})


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (..., "no kv_transfer_params"),
        (None, "no kv_transfer_params"),
        ([], "malformed"),
        (HANDLE | {"remote_block_ids": []}, "names no KV blocks"),
        (HANDLE | {"remote_block_ids": [[]]}, "names no KV blocks"),
        (HANDLE | {"remote_block_ids": [1, 2]}, "malformed"),
        (HANDLE | {"remote_port": "5600"}, "malformed"),
        (HANDLE | {"remote_port": 0}, "impossible port"),
        (HANDLE | {"remote_port": 65536}, "impossible port"),
        (HANDLE | {"remote_engine_id": ""}, "empty engine id"),
        (HANDLE | {"tp_size": 0}, "parallel size"),
        (HANDLE | {"tp_size": None}, "malformed"),
    ],
)
def test_what_is_no_usable_handle_is_refused(handle: Any, message: str) -> None:
    with pytest.raises(HandleError, match=message):
        read(handle)


@pytest.mark.parametrize(
    ("advertised", "engine", "expected"),
    [
        ("0.0.0.0", "10.0.0.7", "10.0.0.7"),
        ("localhost", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "p-0.svc", "p-0.svc"),
        ("::1", "2001:db8::7", "2001:db8::7"),
        ("10.1.0.7", "10.0.0.7", "10.1.0.7"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_an_address_that_only_the_engine_itself_can_dial_is_replaced(
    advertised: str, engine: str, expected: str
) -> None:
    handle = read(HANDLE | {"remote_host": advertised}, engine)
    assert handle.identity.host == expected
    assert msgspec.json.decode(handles.for_decode(handle, CONTEXT))["remote_host"] == expected


def test_decode_gets_the_handle_and_who_is_asking() -> None:
    params = msgspec.json.decode(handles.for_decode(read(HANDLE), CONTEXT, msgspec.Raw(b"[1,2]")))
    assert params.pop("kvops") == {"router_id": "r1", "attempt": 1, "conversation": "c", "turn": 2}
    assert params.pop("prompt_token_ids") == [1, 2]
    assert params == HANDLE


def test_what_the_engines_say_to_each_other_is_kept() -> None:
    handle = HANDLE | {"kvops": {"prefix": {"tokens": 3}, "ttl_seconds": 480, "router_id": "earlier"}}
    params = msgspec.json.decode(handles.for_readback(read(handle), Context("r1", attempt=1)))
    assert params["kvops"] == {"prefix": {"tokens": 3}, "ttl_seconds": 480, "router_id": "r1", "attempt": 1}
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)


@pytest.mark.parametrize(("ttl", "expected"), [(480, 480.0), (1.5, 1.5), (None, None), ("480", None)])
def test_the_lifetime_is_known_where_decode_says_it(ttl: Any, expected: float | None) -> None:
    handle = read(HANDLE | {"kvops": {"ttl_seconds": ttl}})
    assert handle.ttl_seconds == expected
    assert not handle.has_digests


def test_prefill_is_asked_to_keep_the_kv() -> None:
    params = msgspec.json.decode(handles.for_prefill(CONTEXT))
    del params["kvops"]
    assert params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
