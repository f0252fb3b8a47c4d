"""Pushing to Grafana, against a small stand-in that keeps what it is given, as Grafana does."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvops.errors import KvopsError
from kvops_dashboards.grafana_api import Grafana

TOKEN = "glsa_token"


class FakeGrafana:
    def __init__(self) -> None:
        self.folders: list[dict[str, Any]] = []
        self.boards: dict[str, dict[str, Any]] = {}
        self.writes = 0
        app = web.Application(middlewares=[self._authorise])
        app.router.add_get("/api/folders", self._list_folders)
        app.router.add_post("/api/folders", self._make_folder)
        app.router.add_get("/api/dashboards/uid/{uid}", self._read)
        app.router.add_post("/api/dashboards/db", self._write)
        self.server = TestServer(app)

    @web.middleware
    async def _authorise(self, request, handler):
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"message": "Invalid API key"}, status=401)
        return await handler(request)

    async def _list_folders(self, request):
        return web.json_response(self.folders)

    async def _make_folder(self, request):
        self.folders.append({"uid": f"f{len(self.folders)}", "title": (await request.json())["title"]})
        return web.json_response(self.folders[-1])

    async def _read(self, request):
        stored = self.boards.get(request.match_info["uid"])
        if stored is None:
            return web.json_response({"message": "Dashboard not found"}, status=404)
        return web.json_response(stored)

    async def _write(self, request):
        body = await request.json()
        self.writes += 1
        title = next(each["title"] for each in self.folders if each["uid"] == body["folderUid"])
        board = body["dashboard"] | {"id": self.writes, "version": self.writes}
        self.boards[board["uid"]] = {"dashboard": board, "meta": {"folderTitle": title}}
        return web.json_response({"status": "success"})


@pytest.fixture
async def fake():
    fake = FakeGrafana()
    await fake.server.start_server()
    yield fake
    await fake.server.close()


async def push(fake: FakeGrafana, boards: dict, *, dry_run: bool = False, token: str = TOKEN, folder: str = "kvops"):
    async with Grafana(str(fake.server.make_url("/")), token, folder) as grafana:
        return [change.action for change in await grafana.push(boards, dry_run=dry_run)]


BOARDS = {"kvops-a": {"uid": "kvops-a", "title": "A"}, "kvops-b": {"uid": "kvops-b", "title": "B"}}


async def test_a_first_push_makes_the_folder_and_the_dashboards(fake):
    assert await push(fake, BOARDS) == ["create", "create"]
    assert [folder["title"] for folder in fake.folders] == ["kvops"]
    assert set(fake.boards) == set(BOARDS)


async def test_a_second_push_writes_nothing(fake):
    await push(fake, BOARDS)
    assert await push(fake, BOARDS) == ["unchanged", "unchanged"]
    assert fake.writes == 2


async def test_only_what_differs_is_written(fake):
    await push(fake, BOARDS)
    assert await push(fake, BOARDS | {"kvops-b": {"uid": "kvops-b", "title": "New"}}) == ["unchanged", "update"]
    assert fake.boards["kvops-b"]["dashboard"]["title"] == "New"
    assert len(fake.folders) == 1


async def test_another_folder_moves_the_dashboards(fake):
    await push(fake, BOARDS)
    assert await push(fake, BOARDS, folder="other") == ["update", "update"]
    assert fake.boards["kvops-a"]["meta"]["folderTitle"] == "other"


async def test_a_dry_run_shows_the_difference_and_writes_nothing(fake):
    await push(fake, BOARDS)
    changed = {"kvops-a": {"uid": "kvops-a", "title": "New"}}
    async with Grafana(str(fake.server.make_url("/")), TOKEN, "kvops") as grafana:
        change = (await grafana.push(changed, dry_run=True))[0]
    assert '-  "title": "A"' in change.diff
    assert '+  "title": "New"' in change.diff
    assert fake.writes == 2


async def test_a_refused_token_is_said_without_showing_it(fake):
    with pytest.raises(KvopsError, match="refuses the token") as caught:
        await push(fake, BOARDS, token="wrong-secret")
    assert "wrong-secret" not in str(caught.value)


async def test_no_grafana_is_one_sentence():
    async with Grafana("http://127.0.0.1:9", TOKEN, "kvops") as grafana:
        with pytest.raises(KvopsError, match="no Grafana answers"):
            await grafana.push(BOARDS, dry_run=False)
