from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.router import bodies

DEEP = b'{"a": ' + b"[" * 100_000
KEEP = msgspec.Raw(b'{"do_remote_decode":true}')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def parsed(**fields: Any) -> bodies.Body:
    return bodies.parse(json.dumps(fields).encode())


def prefill_leg(**fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(bodies.encode(bodies.prefill_body(parsed(**fields), KEEP)))
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


def test_the_prefill_leg_carries_its_own_params() -> None:
    assert prefill_leg(model="m")["kv_transfer_params"] == {"do_remote_decode": True}


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


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b'{"a": }', b"\xff", b"null", DEEP])
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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"echo": True}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "logprobs": 3}, True),
        ({"logprobs": 3}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
        ({"use_beam_search": True}, True),
        ({"use_beam_search": False}, False),
    ],
)
def test_what_needs_the_forward_pass_of_the_whole_prompt_is_told(fields: dict[str, Any], expected: bool) -> None:
    assert bodies.needs_whole_prompt(parsed(**fields)) is expected


SPACE = st.sampled_from(["", " ", "\n", " \t"])
VALUE = st.sampled_from(["null", "1", '"cut"', '"\\\\"', '"a\\"b"', "[1, 2]", '{"cut": {"x": []}}', "{}"])
MEMBER = st.builds(
    lambda key, *parts: json.dumps(key) + "".join((parts[0], ":", *parts[1:])),
    st.text(max_size=4).filter(lambda key: key != "cut"), SPACE, SPACE, VALUE, SPACE,
)  # fmt: skip


@given(st.lists(MEMBER, max_size=4, unique_by=lambda member: member.partition(":")[0].strip()), st.integers(0, 4))
def test_a_cut_member_leaves_every_other_byte_as_it_was(members: list[str], at: int) -> None:
    content = "{" + ",".join([*members[:at], '"cut": [{"cut": 1}]', *members[at:]]) + "}"
    rest, value = bodies.cut_member(content.encode(), "cut")
    assert rest.decode() == "{" + ",".join(members) + "}"
    assert value is not None
    assert msgspec.json.decode(value) == [{"cut": 1}]


@pytest.mark.parametrize("content", [b'{"a": "\\"cut\\": 1"}', b'{"a": {"cut": 1}}', b"{}", b'{ "a" : 1 }'])
def test_what_has_no_such_member_at_its_top_level_stays(content: bytes) -> None:
    assert bodies.cut_member(content, "cut") == (content, None)


def test_a_member_that_is_there_twice_is_cut_twice() -> None:
    rest, _ = bodies.cut_member(b'{"cut": 1, "a": 2, "cut": 3}', "cut")
    assert json.loads(rest) == {"a": 2}
