from __future__ import annotations

import asyncio

import pytest

from kvops.router import pool as pool_module
from kvops.router.errors import RouterError
from kvops.router.pool import Endpoint, Pool


def make_pool(count: int, **limits: int) -> Pool:
    return Pool("decode", [Endpoint("decode", f"http://10.0.0.{index}:8000") for index in range(count)], **limits)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now[0])
    return now


def test_equals_take_turns() -> None:
    pool = make_pool(3)
    assert [pool.choose().host for _ in range(4)] == ["10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.0"]


def test_the_engines_own_queue_counts() -> None:
    pool = make_pool(2)
    pool.endpoints[0].waiting = 3
    assert {pool.choose().host for _ in range(3)} == {"10.0.0.1"}


def test_an_engine_with_a_full_cache_is_chosen_last() -> None:
    pool = make_pool(2)
    pool.endpoints[0].kv_usage = 0.97
    pool.endpoints[1].waiting = 9
    assert pool.choose().host == "10.0.0.1"


def test_the_preferred_engine_is_taken_unless_another_has_clearly_less_to_do() -> None:
    pool = make_pool(2)
    preferred = pool.endpoints[0]
    preferred.waiting = 2
    assert pool.choose(prefer=preferred) is preferred
    preferred.waiting = 3
    assert pool.choose(prefer=preferred) is not preferred


def test_the_engine_that_failed_is_avoided_where_there_is_another() -> None:
    pool = make_pool(2)
    assert {pool.choose(avoid=pool.endpoints[0]).host for _ in range(3)} == {"10.0.0.1"}
    alone = make_pool(1)
    assert alone.choose(avoid=alone.endpoints[0]) is alone.endpoints[0]


def test_three_failures_in_a_row_rest_an_engine_for_longer_and_longer(clock: list[float]) -> None:
    endpoint = Endpoint("decode", "http://10.0.0.1:8000")
    for _ in range(2):
        endpoint.failed()
    endpoint.succeeded()
    for _ in range(2):
        endpoint.failed()
    assert endpoint.state == "up"
    rests = []
    for _ in range(7):
        endpoint.failed()
        assert endpoint.state == "down"
        start = clock[0]
        while endpoint.state == "down":
            clock[0] += 0.5
        rests.append(clock[0] - start)
    assert rests == [1, 2, 4, 8, 16, 30, 30]


def test_one_request_tries_whether_an_engine_is_back(clock: list[float]) -> None:
    endpoint = Endpoint("decode", "http://10.0.0.1:8000")
    for _ in range(3):
        endpoint.failed()
    assert not endpoint.takes_requests()
    clock[0] += 1
    assert (endpoint.state, endpoint.takes_requests()) == ("half_open", True)
    endpoint.begin()
    assert not endpoint.takes_requests()
    endpoint.end()
    assert endpoint.takes_requests()
    endpoint.succeeded()
    assert (endpoint.state, endpoint.takes_requests()) == ("up", True)


def test_two_missed_probes_are_enough_and_a_good_one_lets_a_request_try() -> None:
    endpoint = Endpoint("decode", "http://10.0.0.1:8000")
    endpoint.probed("dead")
    assert endpoint.state == "up"
    endpoint.probed("dead")
    assert endpoint.state == "down"
    endpoint.probed("alive")
    assert endpoint.state == "half_open"


def test_an_engine_that_is_slow_to_answer_probes_is_given_more_time() -> None:
    endpoint = Endpoint("decode", "http://10.0.0.1:8000")
    for _ in range(5):
        endpoint.probed("slow")
    assert endpoint.state == "up"
    endpoint.probed("slow")
    assert endpoint.state == "down"


def test_missed_probes_do_not_count_while_requests_are_answered() -> None:
    endpoint = Endpoint("decode", "http://10.0.0.1:8000")
    for _ in range(3):
        endpoint.probed("dead")
        endpoint.succeeded()
    assert endpoint.state == "up"


def test_no_engine_at_all_is_a_503() -> None:
    pool = make_pool(1)
    pool.endpoints[0].draining = True
    with pytest.raises(RouterError, match="no decode engine takes requests") as error:
        pool.choose()
    assert (error.value.status, error.value.retry_after_seconds) == (503, 2)


async def test_who_finds_no_room_waits_for_the_end_of_a_request() -> None:
    pool = make_pool(1, in_flight=1)
    pool.begin(pool.endpoints[0])
    waiting = asyncio.create_task(pool.take(wait_seconds=30))
    await asyncio.sleep(0)
    assert pool.waiters == 1
    pool.end(pool.endpoints[0])
    assert await waiting is pool.endpoints[0]
    assert pool.waiters == 0


async def test_a_full_queue_is_a_429() -> None:
    pool = make_pool(1, in_flight=1, queued=1)
    pool.begin(pool.endpoints[0])
    waiting = asyncio.create_task(pool.take(wait_seconds=30))
    await asyncio.sleep(0)
    with pytest.raises(RouterError, match="as many requests as it takes") as error:
        await pool.take(wait_seconds=30)
    waiting.cancel()
    assert error.value.status == 429


async def test_who_waits_too_long_gets_a_429() -> None:
    pool = make_pool(1, in_flight=1)
    pool.begin(pool.endpoints[0])
    with pytest.raises(RouterError) as error:
        await pool.take(wait_seconds=0.01)
    assert error.value.status == 429


def test_an_engine_that_stays_keeps_its_state_and_one_that_goes_loses_its_handles() -> None:
    pool = make_pool(2)
    stays, goes = pool.endpoints
    stays.draining = True
    gone = pool.set_endpoints([Endpoint("decode", stays.url), Endpoint("decode", "http://10.0.0.9:8000")])
    assert pool.endpoints[0] is stays
    assert gone == [goes]
    assert goes.generation == 1
