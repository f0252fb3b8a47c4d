from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvops.router.endpoints import Sources
from kvops.router.journal import Record
from kvops.router.pool import Endpoint
from kvops.router.settings import Deadlines, Limits
from kvops_connectors.catalogue import CATALOGUE
from scripted_engines import wait_until


def lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


async def records(file: Path, count: int) -> list[Record]:
    await wait_until(lambda: len(lines(file)) >= count)
    return [msgspec.json.decode(line, type=Record) for line in lines(file)]


async def test_the_journal_has_a_line_for_every_request_with_its_legs(start, tmp_path):
    file = tmp_path / "journal" / "router.jsonl"
    setup = await start("bidirectional", journal=file)
    async with setup.ask(headers={"X-Request-Id": "mine"}, conversation_id="c", stream=True) as answer:
        await answer.read()
    setup.prefill[0].script.extend(["status:500", "status:400"])
    async with setup.ask(conversation_id="c") as answer:
        assert answer.status == 400
    first, second = await records(file, 2)
    assert (first.client_id, first.outcome, first.status, first.attempts) == ("mine", "ok", 200, 1)
    assert [(leg.role, leg.outcome, leg.status) for leg in first.legs] == [
        ("prefill", "ok", 200),
        ("decode", "ok", 200),
    ]
    assert first.legs[0].id == first.router_id == setup.decode[0].calls[0].id
    assert (first.handle, first.handle_kept, first.turn) == ("first_turn", True, 1)
    assert first.ts <= first.legs[0].started_at <= first.legs[1].started_at <= first.first_byte_at <= first.ended_at
    assert (second.outcome, second.status, second.attempts, second.handle) == ("refused", 400, 2, "declined")
    assert [leg.outcome for leg in second.legs] == ["http_error", "refused"]


async def test_a_client_that_left_has_a_line_too(start, tmp_path):
    file = tmp_path / "router.jsonl"
    setup = await start("pull", journal=file)
    setup.prefill[0].script.append("hang")
    request = asyncio.ensure_future(setup.ask().__aenter__())
    await wait_until(lambda: setup.prefill[0].calls)
    request.cancel()
    (record,) = await records(file, 1)
    assert (record.outcome, [leg.outcome for leg in record.legs]) == ("client_gone", ["cancelled"])


@pytest.mark.parametrize("port", ["url", "admin_url"])
async def test_metrics_are_those_of_the_catalogue(start, port):
    setup = await start("bidirectional")
    async with setup.ask(conversation_id="c") as answer:
        assert answer.status == 200
    async with setup.client.get(getattr(setup, port) + "/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    declared = {name for name, metric in CATALOGUE.items() if metric.source == "router"}
    assert names == declared


async def readiness(setup):
    async with setup.client.get(setup.url + "/readyz") as answer:
        return answer.status, (await answer.json())["engines"]


async def test_ready_means_that_both_roles_have_an_engine(start):
    setup = await start("pull")
    decode = setup.router.decode.endpoints[0]
    await wait_until(lambda: decode.has_answered and setup.router.prefill.endpoints[0].has_answered)
    assert await readiness(setup) == (200, {"prefill": 1, "decode": 1})
    setup.decode[0].healthy = False
    await wait_until(lambda: decode.state == "down")
    assert await readiness(setup) == (503, {"prefill": 1, "decode": 0})
    async with setup.client.get(setup.url + "/healthz") as answer:
        assert answer.status == 200


async def test_nobody_is_told_that_the_router_is_ready_before_the_engines_have_answered(start):
    setup = await start("pull", probe_seconds=3600.0)
    for pool in (setup.router.prefill, setup.router.decode):
        pool.endpoints[0].has_answered = False
    assert await readiness(setup) == (503, {"prefill": 0, "decode": 0})
    # A request is tried all the same, and its answers are as good as a probe's.
    async with setup.ask() as answer:
        assert answer.status == 200
    assert await readiness(setup) == (200, {"prefill": 1, "decode": 1})


async def test_an_engine_that_is_back_serves_again(start):
    setup = await start("pull")
    setup.decode[0].healthy = False
    await wait_until(lambda: setup.router.decode.endpoints[0].state == "down")
    async with setup.ask() as answer:
        assert answer.status == 503
    setup.decode[0].healthy = True
    await wait_until(setup.router.decode.endpoints[0].takes_requests)
    async with setup.ask() as answer:
        assert answer.status == 200
    assert setup.router.decode.endpoints[0].state == "up"


async def test_the_router_waits_for_names_that_do_not_exist_yet(start, monkeypatch):
    async def nobody(self: Sources, role: str) -> list[Endpoint]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(Sources, "resolve", nobody)
    setup = await start("pull")
    async with setup.ask() as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    monkeypatch.undo()
    await setup.router.refresh()
    async with setup.ask() as answer:
        assert answer.status == 200


async def test_one_client_cannot_take_more_than_its_rate(start):
    setup = await start("pull", limits=Limits(requests_per_second=0.5))
    statuses = {}
    for key in ("a", "b"):
        for attempt in range(2):
            async with setup.ask(headers={"Authorization": f"Bearer {key}"}) as answer:
                statuses[key, attempt] = answer.status
    assert statuses == {("a", 0): 200, ("a", 1): 429, ("b", 0): 200, ("b", 1): 429}


async def test_a_body_that_does_not_come_is_not_waited_for(start):
    setup = await start("pull", deadlines=Deadlines(body=0.1))
    host, _, port = setup.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b"408" in await reader.readline()
    writer.close()


async def test_a_body_that_is_too_large_is_a_413(start):
    setup = await start("pull", limits=Limits(body_bytes=1000))
    async with setup.ask(prompt="x" * 2000) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize("identifier", ["x" * 129, "a b"])
async def test_an_id_that_no_client_should_send_is_replaced(start, identifier):
    setup = await start("pull")
    async with setup.ask(headers={"X-Request-Id": identifier}) as answer:
        assert answer.headers["X-Request-Id"] not in ("", identifier)


async def test_auto_follows_what_the_engines_say(start):
    for mode, expected in (("push", True), ("bidirectional", False)):
        setup = await start("auto")
        setup.fleet.mode = mode
        setup.prefill[0].transfer_mode = "push" if mode == "push" else "pull"
        await wait_until(lambda setup=setup: setup.router.prefill.endpoints[0].bidirectional is not None)
        setup.router.prefill.endpoints[0].bidirectional = mode == "bidirectional"
        for _ in range(2):
            async with setup.ask(conversation_id="c") as answer:
                assert answer.status == 200
        assert ("transfer_id" in setup.decode[0].served()[0].params) is expected
        if mode == "bidirectional":
            assert setup.metric("kvops_router_handles_total", outcome="hit") == 1
