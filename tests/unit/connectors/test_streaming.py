"""The handle in streamed answers."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops_connectors import streaming
from kvops_connectors.streaming import Splice, StreamedHandles

HANDLE = {"do_remote_decode": True, "remote_block_ids": [[7, 9]], "remote_num_tokens": 55}
EVENTS = [
    b'data: {"id":"cmpl-1","object":"text_completion","created":3,"model":"m","choices":[{"text":"data: [DONE]"}]}\n\n',
    b'data: {"id":"cmpl-1","object":"text_completion","created":3,"model":"m","choices":[{"text":"\\n"}]}\n\n',
    b"data: [DONE]\n\n",
]
STREAM = b"".join(EVENTS)
EVENT = b"data: {}\n\n"


def chunks_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, len(STREAM))))
def test_the_event_comes_right_before_done_in_any_chunking(cuts):
    splice = Splice(lambda first: EVENT)
    chunks = chunks_of(STREAM, cuts)
    out = b"".join(splice.feed(chunk, number == len(chunks) - 1) for number, chunk in enumerate(chunks))
    assert out == EVENTS[0] + EVENTS[1] + EVENT + EVENTS[2]


@given(st.binary().filter(lambda stream: b"[DONE]" not in stream), st.lists(st.integers(0, 500)))
def test_a_stream_without_done_passes_unchanged(stream, cuts):
    splice = Splice(lambda first: EVENT)
    chunks = chunks_of(stream, [min(cut, len(stream)) for cut in cuts])
    out = b"".join(splice.feed(chunk, number == len(chunks) - 1) for number, chunk in enumerate(chunks))
    assert out == stream


@given(st.integers(0, len(EVENTS[0])))
def test_no_token_is_held_back(cut):
    splice = Splice(lambda first: EVENT)
    sent = splice.feed(EVENTS[0][:cut], False) + splice.feed(EVENTS[0][cut:], False)
    assert sent.rstrip(b"\n") == EVENTS[0].rstrip(b"\n")


def test_a_stream_that_is_only_done_gets_the_event_too():
    assert Splice(lambda first: EVENT).feed(b"data: [DONE]\n\n", True) == EVENT + b"data: [DONE]\n\n"


@pytest.fixture
def middleware(monkeypatch):
    monkeypatch.setattr(streaming, "_listen_to_answers", lambda: None)
    counted = []
    monkeypatch.setattr(streaming, "_counter", lambda: counted.append)

    def make(handles, chunks, content_type=b"text/event-stream; charset=utf-8"):
        async def app(scope, receive, send):
            found = streaming._FOUND.get()
            if found is not None:
                found.handles.update(handles)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
            for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        made = StreamedHandles(app)
        made.counted = counted
        return made

    return make


async def ask(app, headers=((b"x-kvops-handle", b"1"),)):
    body = b""

    async def send(message):
        nonlocal body
        body += message.get("body", b"")

    await app({"type": "http", "headers": list(headers)}, None, send)
    return body


async def test_a_router_that_asks_gets_the_handle_in_an_event_without_choices(middleware):
    body = await ask(middleware({"cmpl-1": HANDLE}, EVENTS))
    events = body.split(b"\n\n")
    assert events[-2] == b"data: [DONE]"
    assert json.loads(events[-3].removeprefix(b"data: ")) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 3,
        "model": "m",
        "choices": [],
        "kv_transfer_params": HANDLE,
    }


async def test_nobody_else_gets_it(middleware):
    assert await ask(middleware({"cmpl-1": HANDLE}, EVENTS), headers=()) == STREAM
    assert await ask(middleware({"cmpl-1": HANDLE}, EVENTS), headers=[(b"x-kvops-handle", b"0")]) == STREAM


async def test_an_answer_without_a_handle_is_counted_as_missing(middleware):
    app = middleware({}, EVENTS)
    assert await ask(app) == STREAM
    assert app.counted == ["missing"]


async def test_the_handles_of_several_answers_are_not_guessed_at(middleware):
    assert await ask(middleware({"cmpl-1": HANDLE, "cmpl-2": HANDLE}, EVENTS)) == STREAM


async def test_an_answer_that_is_no_event_stream_passes_unchanged(middleware):
    assert await ask(middleware({"a": HANDLE}, [b"\ndata: [DONE]"], b"application/json")) == b"\ndata: [DONE]"
