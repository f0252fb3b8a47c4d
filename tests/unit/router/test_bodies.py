from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.router import bodies

HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "default-prefill-0",
    "remote_request_id": "chatcmpl-f1b1417224844be8a376a953ccd94cae-a3c884e6",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 271,
    "transfer_mode": "pull",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def parsed(**fields: Any) -> bodies.Body:
    return bodies.parse(json.dumps(fields).encode())


def prefill_leg(**fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(bodies.encode(bodies.prefill_body(parsed(**fields))))
    return result


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"max_tokens": 500}, {"max_tokens": 1}),
        ({}, {"max_tokens": 1}),
        ({"max_completion_tokens": 500}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_output_tokens": 500}, {"max_output_tokens": 1}),
        ({"stream": True}, {"stream": False}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": "auto"}, {"tool_choice": "auto"}),
        ({"tool_choice": "required"}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tool_choice": "auto"}),
        ({"tools": [{"type": "function"}]}, {"tools": [{"type": "function"}]}),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        ({"cache_salt": "s"}, {"cache_salt": "s"}),
    ],
)
def test_the_prefill_leg_carries(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    leg = prefill_leg(model="m", **sent)
    assert {key: leg[key] for key in expected} == expected


@pytest.mark.parametrize(
    "field",
    [
        {"min_tokens": 5},
        {"stream_options": {"include_usage": True}},
        {"n": 3},
        {"best_of": 3},
        {"logprobs": True},
        {"top_logprobs": 5},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"use_beam_search": True},
    ],
)
def test_the_prefill_leg_drops(field: dict[str, Any]) -> None:
    assert not set(field) & set(prefill_leg(model="m", **field))


def test_the_prefill_leg_asks_to_keep_the_kv() -> None:
    assert prefill_leg(model="m")["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_a_clients_own_handle_is_dropped() -> None:
    assert "kv_transfer_params" not in parsed(model="m", kv_transfer_params={"remote_block_ids": [[1]]})


@given(st.dictionaries(st.text(), JSON))
def test_fields_that_the_legs_do_not_touch_reach_decode_unchanged(fields: dict[str, Any]) -> None:
    fields.pop("kv_transfer_params", None)
    leg = bodies.decode_body(parsed(**fields), msgspec.Raw(b"{}"))
    assert json.loads(bodies.encode(leg)) == fields | {"kv_transfer_params": {}}


def test_values_keep_their_spelling() -> None:
    body = bodies.parse(b'{"temperature": 1.0, "seed": 12345678901234567890123, "x": "\\u00e9"}')
    assert bodies.encode(body) == b'{"temperature":1.0,"seed":12345678901234567890123,"x":"\\u00e9"}'


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b'{"a": }', b"\xff", b"null"])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(bodies.BodyError, match="not a JSON object"):
        bodies.parse(content)


@given(st.binary(max_size=64))
def test_no_bytes_crash_the_parser(content: bytes) -> None:
    with contextlib.suppress(bodies.BodyError):
        bodies.sequences(bodies.parse(content))


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "text"}, {"prompt": [1, 2, 3]}, {"prompt": ["one"]}, {"messages": []}, {"n": 1}, {"n": None}],
)
def test_one_sequence_is_served_as_it_is(fields: dict[str, Any]) -> None:
    assert bodies.sequences(parsed(**fields)) == []


def test_several_choices_share_one_prompt() -> None:
    assert [bodies.value_of(part, "prompt") for part in bodies.sequences(parsed(prompt="p", n=3))] == ["p"]


def test_best_of_counts_as_several_choices() -> None:
    assert len(bodies.sequences(parsed(prompt="p", best_of=2))) == 1


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_a_list_of_prompts_becomes_one_part_each(prompts: list[Any]) -> None:
    assert [bodies.value_of(part, "prompt") for part in bodies.sequences(parsed(prompt=prompts))] == prompts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "empty list"),
        ({"prompt": ["a"] * 257}, "lists 257 prompts; send at most 256"),
        ({"n": "3"}, "n is '3' but should be a whole number"),
        ({"best_of": True}, "best_of is True"),
    ],
)
def test_a_malformed_count_or_prompt_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(bodies.BodyError, match=message):
        bodies.sequences(parsed(**fields))


def test_a_whole_handle_is_passed_on_byte_for_byte() -> None:
    raw = json.dumps(HANDLE).encode()
    assert bytes(bodies.handle_of(b'{"id": "x", "kv_transfer_params": ' + raw + b"}")) == raw


@pytest.mark.parametrize(
    "missing",
    ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids", "tp_size"],
)
def test_a_handle_without_a_field_that_decode_needs_is_refused(missing: str) -> None:
    handle = {key: value for key, value in HANDLE.items() if key != missing}
    with pytest.raises(bodies.HandleError, match=missing):
        bodies.handle_of(json.dumps({"kv_transfer_params": handle}).encode())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no kv_transfer_params"),
        ({"kv_transfer_params": None}, "no kv_transfer_params"),
        ({"kv_transfer_params": HANDLE | {"remote_block_ids": []}}, "names no KV blocks"),
        ({"kv_transfer_params": HANDLE | {"remote_block_ids": [[]]}}, "names no KV blocks"),
        ({"kv_transfer_params": HANDLE | {"remote_port": "5600"}}, "malformed"),
    ],
)
def test_an_answer_without_a_usable_handle_is_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(bodies.HandleError, match=message):
        bodies.handle_of(json.dumps(answer).encode())
