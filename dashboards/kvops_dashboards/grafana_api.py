"""Putting the dashboards into a running Grafana through its HTTP API."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from kvops.errors import KvopsError

# What Grafana itself changes in a dashboard that it stores.
_OWNED_BY_GRAFANA = ("id", "version")


@dataclass(frozen=True)
class Change:
    """What happened, or would happen, to one dashboard."""

    uid: str
    action: Literal["create", "update", "unchanged"]
    diff: str = ""


class Grafana:
    """A Grafana and the folder in it; use as ``async with Grafana(...) as grafana``."""

    def __init__(self, url: str, token: str, folder: str) -> None:
        """Prepare; nothing is sent.

        Args:
            url: base URL, such as ``https://grafana.example.com``.
            token: token of a service account that may write dashboards.
            folder: title of the folder.
        """
        self._url, self._folder = url.rstrip("/"), folder
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"}, timeout=aiohttp.ClientTimeout(total=30)
        )

    async def __aenter__(self) -> Grafana:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._session.close()

    async def push(self, boards: dict[str, dict[str, Any]], *, dry_run: bool) -> list[Change]:
        """Create or update ``boards`` (by uid) and return what changed; with ``dry_run``, what would.

        Raises:
            KvopsError: Grafana does not answer, or refuses.
        """
        changes = [await self._compare(uid, board) for uid, board in boards.items()]
        wanted = [change for change in changes if change.action != "unchanged"]
        if wanted and not dry_run:
            folder_uid = await self._folder_uid()
            for change in wanted:
                body = {"dashboard": boards[change.uid], "folderUid": folder_uid, "overwrite": True}
                await self._call("POST", "/api/dashboards/db", body | {"message": "kvops dashboards push"})
        return changes

    async def _compare(self, uid: str, board: dict[str, Any]) -> Change:
        there = await self._call("GET", f"/api/dashboards/uid/{uid}", missing_is_none=True)
        if there is None:
            return Change(uid, "create")
        old, new = _lines(there["dashboard"]), _lines(board)
        title = there.get("meta", {}).get("folderTitle", self._folder)
        if old == new and title == self._folder:
            return Change(uid, "unchanged")
        diff = list(difflib.unified_diff(old, new, f"grafana/{uid}", f"kvops/{uid}", lineterm="", n=2))
        if title != self._folder:
            diff.append(f"folder: {title} -> {self._folder}")
        return Change(uid, "update", "\n".join(diff))

    async def _folder_uid(self) -> str:
        folders: list[dict[str, Any]] = await self._call("GET", "/api/folders?limit=1000")
        for folder in folders:
            if folder["title"] == self._folder:
                return str(folder["uid"])
        made = await self._call("POST", "/api/folders", {"title": self._folder})
        return str(made["uid"])

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, missing_is_none: bool = False
    ) -> Any:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                if response.status == 404 and missing_is_none:
                    return None
                if response.status in (401, 403):
                    raise KvopsError(
                        f"Grafana refuses the token ({response.status} for {method} {path})",
                        "use the token of a service account with the role Editor",
                    )
                if response.status >= 400:
                    reason = (await response.text())[:200]
                    raise KvopsError(f"Grafana answered {response.status} to {method} {path}: {reason}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise KvopsError(f"no Grafana answers at {self._url}: {error}", "check --url") from None


def _lines(board: dict[str, Any]) -> list[str]:
    ours = {key: value for key, value in board.items() if key not in _OWNED_BY_GRAFANA}
    return json.dumps(ours, indent=2, sort_keys=True).splitlines()
