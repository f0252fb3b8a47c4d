from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.router import sse

HANDLE = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.2"}
TEXT = st.text(st.sampled_from('a\n\r é"\\:{}') | st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)


def event(value: object, end: str = "\n\n") -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + end.encode()


def chunk(text: str) -> dict[str, object]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": text}}]}


def feed(content: bytes, cuts: list[int]) -> tuple[bytes, sse.Events]:
    events = sse.Events()
    edges = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    out = b"".join(events.feed(content[start:end]) for start, end in pairwise(edges))
    return out + events.end(), events


HANDLE_EVENT = event({"id": "chatcmpl-1", "choices": [], "kv_transfer_params": HANDLE})
PLAIN = st.one_of(
    TEXT.map(lambda text: event(chunk(text))),
    TEXT.map(lambda text: event(chunk(text), "\r\n\r\n")),
    st.just(event(chunk('"kv_transfer_params": {"remote_block_ids": [[1]]}'))),
    st.just(event({"choices": [], "usage": {"total_tokens": 3}})),
    st.just(b": keep-alive\n\n"),
    st.just(b"event: x\ndata: not json\n\n"),
)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(st.lists(PLAIN, max_size=8), CUTS, st.sampled_from([b"", b"data: [DONE]\n\n", b"data: {broken off"]))
def test_a_stream_without_a_handle_is_the_same_however_it_is_cut(
    events: list[bytes], cuts: list[int], end: bytes
) -> None:
    content = b"".join(events) + end
    out, seen = feed(content, cuts)
    assert out == content
    assert seen.handle is None


@given(st.lists(PLAIN, max_size=6), st.lists(PLAIN, max_size=3), CUTS)
def test_only_the_handles_event_is_taken_out_however_it_is_cut(
    before: list[bytes], after: list[bytes], cuts: list[int]
) -> None:
    rest = [*after, b"data: [DONE]\n\n"]
    out, seen = feed(b"".join([*before, HANDLE_EVENT, *rest]), cuts)
    assert out == b"".join([*before, *rest])
    assert seen.handle is not None
    assert msgspec.json.decode(seen.handle) == HANDLE
    assert seen.done


@given(TEXT, CUTS)
def test_a_handle_beside_a_last_token_is_cut_out_of_its_event(text: str, cuts: list[int]) -> None:
    whole = event(chunk(text) | {"kv_transfer_params": HANDLE} | {"model": "m"})
    out, seen = feed(whole, cuts)
    assert out == event(chunk(text) | {"model": "m"}).replace(b'], "model"', b'], "model"')
    assert seen.handle is not None


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_come_out_the_same_however_they_are_cut(content: bytes, cuts: list[int]) -> None:
    assert feed(content, cuts)[0] == content


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"error": {"message": "x", "code": 500}}, True),
        ({"error": None, "choices": []}, False),
        (chunk('"error"'), False),
        ([], False),
    ],
)
def test_an_error_event_is_told_from_a_text_about_errors(value: object, expected: bool) -> None:
    assert sse.is_error(event(value)) is expected


@pytest.mark.parametrize(
    ("error", "status"),
    [({"code": 400}, 400), ({"code": 500}, 500), ({"code": "x"}, 500), ({"code": 200}, 500), ({}, 500), ("text", 500)],
)
def test_the_status_inside_an_error_event_is_read(error: object, status: int) -> None:
    assert sse.error_status(event({"error": error})) == status


def test_a_failed_stream_is_known_as_such() -> None:
    _, seen = feed(event(chunk("a")) + event({"error": {"message": "x", "code": 500}}) + b"data: [DONE]\n\n", [])
    assert seen.failed


def test_a_stream_without_an_end_of_an_event_is_given_up() -> None:
    with pytest.raises(sse.EventTooLargeError):
        sse.Events().feed(b"x" * (sse.MAX_EVENT_BYTES + 1))


def test_a_handle_in_a_broken_off_event_does_not_get_out() -> None:
    assert feed(event(chunk("a")) + HANDLE_EVENT[:-5], [])[0] == event(chunk("a"))
