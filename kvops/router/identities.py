"""What push must know of P before P has answered: told by whoever started P, or learned from an earlier answer."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.router import bodies, handles, http_client
from kvops.router.errors import EngineFailure
from kvops.router.exchange import Attempt

if TYPE_CHECKING:
    from kvops.router.engines import Engines
    from kvops.router.handles import Handle, Identity
    from kvops.router.pool import Endpoint
    from kvops.router.releases import Releases

log = logging.getLogger(__name__)

_WARM_UP_SECONDS = 60.0


class Identities:
    """Knows each P's identity and connector, until P restarts; what it was not told it learns by one small request."""

    def __init__(self, engines: Engines, releases: Releases) -> None:
        """Keep the client to the engines."""
        self._engines = engines
        self._releases = releases
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, prefill: Endpoint, attempt: Attempt) -> Identity:
        """Return the identity of ``prefill``, asking it if it is not known.

        Raises:
            EngineFailure: P does not answer, or does not run the push connector.
        """
        if prefill.identity is None and prefill.generation == 0:
            prefill.identity = self._engines.settings.identities.get(prefill.name)
        if prefill.identity is None:
            await self.warm_up(prefill, attempt)
        # None as long as an engine of which the identity was told has not answered.
        if prefill.identity is None or prefill.transfer_mode not in (None, "push"):
            detail = f"it runs the {prefill.transfer_mode} connector; start the router with --mode pull"
            raise EngineFailure(prefill, "no_handle", detail)
        return prefill.identity

    async def warm_up(self, prefill: Endpoint, attempt: Attempt) -> None:
        """Have ``prefill`` compute a prompt of one token and learn from its answer; one at a time for each engine.

        Raises:
            EngineFailure: it does not answer, or without a usable handle.
        """
        async with self._locks.setdefault(prefill.name, asyncio.Lock()):
            if prefill.transfer_mode is not None:
                return
            # An id of its own: a D that registers under the attempt's must not be paired with this prompt's blocks.
            handle = await self._ask(prefill, Attempt(attempt.exchange, attempt.number))
            self._take(prefill, handle)
            if prefill.transfer_mode == "pull":
                self._releases.release(handle, prefill, "warm_up", authorization=attempt.authorization)

    def learn(self, prefill: Endpoint, answer: bytes) -> Identity:
        """Return the identity in an answer of ``prefill``, which from now on is the known one.

        Raises:
            EngineFailure: the answer carries no usable handle.
        """
        self._take(prefill, _handle(prefill, answer))
        if prefill.identity is None:
            raise EngineFailure(prefill, "no_handle", "it has no identity")
        return prefill.identity

    def _take(self, prefill: Endpoint, handle: Handle) -> None:
        if prefill.identity not in (None, handle.identity):
            log.warning("prefill engine %s has restarted", prefill.name)
            prefill.restarted()
        prefill.identity = handle.identity
        # vLLM before 0.32 does not say: then the router's own mode is all there is to go by, and pull vLLM's default.
        assumed = "push" if self._engines.settings.mode == "push" else "pull"
        prefill.transfer_mode = handle.fields.transfer_mode or assumed

    async def _ask(self, prefill: Endpoint, attempt: Attempt) -> Handle:
        body: dict[str, Any] = {"model": await self._model(prefill, attempt), "prompt": [1]}
        raw = bodies.parse(msgspec.json.encode(body))
        content = http_client.Body(bodies.encode(bodies.prefill_body(raw, handles.for_prefill(attempt.context))))
        answer = await self._engines.ask(attempt, prefill, content, _WARM_UP_SECONDS, path="/v1/completions")
        return _handle(prefill, answer)

    async def _model(self, prefill: Endpoint, attempt: Attempt) -> str:
        answer = await self._engines.get(attempt, prefill, "/v1/models", _WARM_UP_SECONDS)
        try:
            return msgspec.json.decode(answer, type=_Models).data[0].id
        except (msgspec.DecodeError, IndexError):
            raise EngineFailure(prefill, "http_error", "it lists no model") from None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _handle(prefill: Endpoint, answer: bytes) -> Handle:
    try:
        return handles.read(bodies.members(answer).get(bodies.KV_TRANSFER_PARAMS), prefill.host)
    except (handles.HandleError, bodies.BodyError) as error:
        raise EngineFailure(prefill, "no_handle", str(error)) from None
