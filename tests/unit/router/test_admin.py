from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvops.router.admin import OPENAPI


async def call(setup: Any, method: str, path: str, **options: Any) -> tuple[int, Any]:
    async with setup.client.request(method, setup.admin_url + path, **options) as answer:
        return answer.status, await answer.json()


async def test_the_engines_are_listed(start):
    setup = await start("push", decode=2)
    async with setup.ask() as answer:
        assert answer.status == 200
    status, engines = await call(setup, "GET", "/endpoints")
    assert status == 200
    assert [engine["role"] for engine in engines] == ["prefill", "decode", "decode"]
    assert (engines[0]["engine_id"], engines[0]["transfer_mode"]) == ("engine-prefill-0", "push")


async def test_a_drained_engine_gets_nothing_until_it_is_undrained(start):
    setup = await start("pull", decode=2)
    name = setup.decode[0].url
    assert (await call(setup, "POST", f"/endpoints/drain?role=decode&name={name}"))[1]["state"] == "draining"
    for _ in range(2):
        async with setup.ask() as answer:
            assert answer.status == 200
    assert setup.decode[0].calls == []
    assert (await call(setup, "POST", f"/endpoints/undrain?role=decode&name={name}"))[1]["state"] == "up"
    for _ in range(2):
        async with setup.ask() as answer:
            assert answer.status == 200
    assert len(setup.decode[0].calls) == 1


async def test_an_engine_is_added_and_removed_while_the_router_runs(start):
    setup = await start("pull", decode=2)
    second = setup.decode[1].url
    status, engines = await call(setup, "DELETE", f"/endpoints?role=decode&url={second}")
    assert (status, len(engines)) == (200, 2)
    status, engines = await call(setup, "POST", "/endpoints", json={"role": "decode", "url": second})
    assert (status, len(engines)) == (201, 3)


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/endpoints", b"{", 400),
        ("POST", "/endpoints", b'{"role": "decode", "url": "x"}', 400),
        ("POST", "/endpoints", b'{"role": "both", "url": "http://x:1"}', 400),
        ("POST", "/endpoints", b'{"role": "decode", "url": "http://x:1", "more": 1}', 400),
        ("DELETE", "/endpoints?role=decode", b"", 400),
        ("DELETE", "/endpoints?role=decode&url=http://nobody:1", b"", 404),
        ("POST", "/endpoints/drain?role=decode&name=nobody", b"", 404),
        ("POST", "/endpoints/drain?role=x&name=nobody", b"", 400),
        ("POST", "/reload", b"", 409),
        ("PUT", "/endpoints", b"", 405),
        ("GET", "/nothing", b"", 404),
    ],
)
async def test_what_cannot_be_done_is_an_error_body_and_changes_nothing(start, method, path, content, status):
    setup = await start("pull")
    code, answer = await call(setup, method, path, data=content)
    assert (code, set(answer["error"])) == (status, {"message", "type", "param", "code"})
    assert len((await call(setup, "GET", "/endpoints"))[1]) == 2


async def test_a_page_of_another_host_is_not_answered(start):
    setup = await start("pull")
    assert (await call(setup, "GET", "/endpoints", headers={"Host": "evil.example:80"}))[0] == 403


async def test_the_document_describes_every_path(start):
    setup = await start("pull")
    assert (await call(setup, "GET", "/openapi.json"))[1] == OPENAPI
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in setup.admin_routes()
        if route.method != "HEAD" and route.resource.canonical not in ("/healthz", "/metrics", "/openapi.json")
    }
    described = {(method, path) for path, item in OPENAPI["paths"].items() for method in item}
    assert served == described


QUERY = st.dictionaries(st.sampled_from(["role", "name", "url"]), st.text(max_size=20), max_size=3)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    path=st.sampled_from(sorted(OPENAPI["paths"])),
    method=st.sampled_from(["GET", "POST", "DELETE"]),
    query=QUERY,
    content=st.binary(max_size=60),
)
def test_no_request_gets_anything_that_the_document_does_not_promise(event_loop_setup, path, method, query, content):
    loop, setup = event_loop_setup
    status, answer = loop.run_until_complete(call(setup, method, path, params=query, data=content))
    operation = OPENAPI["paths"][path].get(method.lower())
    assert status == 405 if operation is None else str(status) in operation["responses"], (status, answer)
    assert not re.search("Traceback|Internal Server Error", str(answer))
