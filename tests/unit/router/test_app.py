from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fake_engine import FakeEngine
from kvops.router.app import listen, make_router, served
from kvops.router.endpoints import ROLES, Sources
from kvops.router.pool import Role
from kvops.router.settings import Settings

PROMPT = {"model": "kvops-tiny", "prompt": "hello", "max_tokens": 16}
CHAT = {"model": "kvops-tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}


class Fleet:
    """A router in front of fake engines, all on loopback."""

    def __init__(self, prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        self.prefill, self.decode = prefill, decode
        self.url = ""
        self.client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json()


async def _serve(app: web.Application, stack: contextlib.AsyncExitStack) -> str:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _serve_router(sources: Sources, settings: Settings, stack: contextlib.AsyncExitStack) -> str:
    (listener,) = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await stack.enter_async_context(served(make_router(sources, settings), listener))
    return url


MakeFleet = Callable[..., Awaitable[Fleet]]


@pytest.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(prefill: int = 1, decode: int = 1, api_keys: tuple[str, ...] = ()) -> Fleet:
            fleet = Fleet(
                [FakeEngine("prefill") for _ in range(prefill)], [FakeEngine("decode") for _ in range(decode)]
            )
            urls: dict[Role, list[str]] = {
                role: [await _serve(engine.app(), stack) for engine in engines]
                for role, engines in zip(ROLES, (fleet.prefill, fleet.decode), strict=True)
            }
            fleet.url = await _serve_router(Sources(urls), Settings(api_keys=api_keys), stack)
            fleet.client = await stack.enter_async_context(aiohttp.ClientSession())
            return fleet

        yield make


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never happened")


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_decode_gets_the_handle_that_prefill_gave(make_fleet: MakeFleet, path: str, body: dict[str, Any]) -> None:
    fleet = await make_fleet()
    status, _ = await fleet.post(path, body)
    handle = fleet.decode[0].requests[0]["kv_transfer_params"]
    assert status == 200
    assert handle["do_remote_prefill"]
    assert handle["remote_request_id"] == f"cmpl-{fleet.prefill[0].headers[0]['X-Request-Id']}-0-00000000"


async def test_decode_gets_the_clients_body_unchanged(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    body = PROMPT | {"min_tokens": 3, "stop": ["x"], "unknown_field": {"a": [1]}}
    await fleet.post("/v1/completions", body)
    sent = fleet.decode[0].requests[0]
    del sent["kv_transfer_params"]
    assert sent == body


async def test_both_legs_carry_one_fresh_id_that_is_not_the_clients(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    async with fleet.client.post(
        fleet.url + "/v1/completions", json=PROMPT, headers={"X-Request-Id": "mine"}
    ) as answer:
        assert answer.headers["X-Request-Id"] == "mine"
    legs = {engine.headers[0]["X-Request-Id"] for engine in (fleet.prefill[0], fleet.decode[0])}
    assert len(legs) == 1
    assert "mine" not in legs


async def test_trace_headers_go_on_and_other_headers_stay(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-data-parallel-rank": "7"}
    await fleet.post("/v1/completions", PROMPT, headers=headers)
    assert fleet.decode[0].headers[0]["traceparent"] == headers["traceparent"]
    assert "X-data-parallel-rank" not in fleet.decode[0].headers[0]


async def test_a_stream_arrives_byte_for_byte(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    async with fleet.client.post(fleet.url + "/v1/completions", json=PROMPT | {"stream": True}) as answer:
        content = await answer.read()
        assert answer.content_type == "text/event-stream"
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == fleet.decode[0]._answer(
        '"hello"'
    )


async def test_a_stream_that_breaks_off_ends_in_an_error_event(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    fleet.decode[0].break_after_chunks = 3
    async with fleet.client.post(fleet.url + "/v1/completions", json=PROMPT | {"stream": True}) as answer:
        events = (await answer.text()).split("\n\n")
    assert json.loads(events[-3][6:])["error"]["type"] == "decode_failed"
    assert events[-2] == "data: [DONE]"


async def test_several_choices_are_served_from_decodes_own_cache(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    status, _ = await fleet.post("/v1/completions", PROMPT | {"n": 3})
    prime, served = fleet.decode[0].requests
    assert status == 200
    assert (prime["max_tokens"], prime["kv_transfer_params"]["do_remote_prefill"], "n" in prime) == (1, True, False)
    assert (served["n"], "kv_transfer_params" in served) == (3, False)


async def test_each_prompt_of_a_list_gets_a_handle_of_its_own(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(decode=2)
    await fleet.post("/v1/completions", PROMPT | {"prompt": ["a", "b", "c"]})
    used = next(engine for engine in fleet.decode if engine.requests)
    *primes, served = used.requests
    assert sorted(prime["prompt"] for prime in primes) == ["a", "b", "c"]
    assert len({prime["kv_transfer_params"]["remote_request_id"] for prime in primes}) == 3
    assert served["prompt"] == ["a", "b", "c"]
    assert [len(engine.requests) for engine in fleet.decode if engine is not used] == [0]


async def test_engines_take_turns(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(prefill=2, decode=2)
    for _ in range(4):
        await fleet.post("/v1/completions", PROMPT)
    assert [len(engine.requests) for engine in (*fleet.prefill, *fleet.decode)] == [2, 2, 2, 2]


async def test_a_busy_engine_is_passed_over(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(decode=2)
    fleet.decode[0].stall.clear()
    waiting = asyncio.create_task(fleet.post("/v1/completions", PROMPT))
    await until(lambda: bool(fleet.decode[0].requests))
    for _ in range(3):
        await fleet.post("/v1/completions", PROMPT)
    assert len(fleet.decode[1].requests) == 3
    fleet.decode[0].stall.set()
    await waiting


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_client_that_leaves_aborts_the_engine_at_work(make_fleet: MakeFleet, role: str) -> None:
    fleet = await make_fleet()
    engine: FakeEngine = getattr(fleet, role)[0]
    engine.stall.clear()
    request = asyncio.create_task(fleet.post("/v1/completions", PROMPT))
    await until(lambda: bool(engine.requests))
    request.cancel()
    await until(lambda: engine.aborted == 1)


async def test_prefills_complaint_about_the_request_reaches_the_client(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    fleet.prefill[0].status = 400
    status, answer = await fleet.post("/v1/completions", PROMPT)
    assert (status, answer["error"]["message"]) == (400, "scripted failure")
    assert fleet.decode[0].requests == []


async def test_a_failing_prefill_is_reported_as_such(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    fleet.prefill[0].status = 500
    status, answer = await fleet.post("/v1/completions", PROMPT)
    assert (status, answer["error"]["type"]) == (502, "prefill_failed")
    assert fleet.decode[0].requests == []


async def test_a_refusal_of_decode_keeps_its_status_and_body(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    fleet.decode[0].status = 404
    status, answer = await fleet.post("/v1/completions", PROMPT)
    assert (status, answer["error"]["message"]) == (404, "scripted failure")


async def test_an_engine_without_room_is_a_503_that_says_when_to_come_again(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    fleet.decode[0].status = 503
    async with fleet.client.post(fleet.url + "/v1/completions", json=PROMPT) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_an_engine_that_is_not_there_is_a_502_that_names_no_address() -> None:
    async with contextlib.AsyncExitStack() as stack:
        nobody = ["http://127.0.0.1:1"]
        url = await _serve_router(Sources({"prefill": nobody, "decode": nobody}), Settings(), stack)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        async with client.post(url + "/v1/completions", json=PROMPT) as answer:
            error = (await answer.json())["error"]
    assert (answer.status, error["type"]) == (502, "prefill_failed")
    assert "127.0.0.1" not in error["message"]


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"prompt": []}', 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
    ],
)
async def test_what_cannot_be_served_gets_an_openai_error(
    make_fleet: MakeFleet, path: str, content: bytes, status: int
) -> None:
    fleet = await make_fleet()
    async with fleet.client.post(fleet.url + path, data=content) as answer:
        assert answer.status == status
        assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}


async def test_models_are_those_of_the_engines(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    async with fleet.client.get(fleet.url + "/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "kvops-tiny"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer ключ"}, 401),
        ({"Authorization": "Bearer second"}, 200),
    ],
)
async def test_only_accepted_keys_are_let_in(make_fleet: MakeFleet, headers: dict[str, str], status: int) -> None:
    fleet = await make_fleet(api_keys=("first", "second"))
    assert (await fleet.post("/v1/completions", PROMPT, headers=headers))[0] == status


async def test_health_needs_no_key(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(api_keys=("first",))
    async with fleet.client.get(fleet.url + "/healthz") as answer:
        assert answer.status == 200
