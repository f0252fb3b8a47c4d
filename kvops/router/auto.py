"""Auto: each request by what the engines can do, as they say themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.router.errors import EngineFailure

if TYPE_CHECKING:
    from kvops.router.bidirectional import BidirectionalMode
    from kvops.router.bodies import Body
    from kvops.router.engines import Engines
    from kvops.router.exchange import Attempt
    from kvops.router.identities import Identities
    from kvops.router.pool import Endpoint
    from kvops.router.pull import PullMode
    from kvops.router.push import PushMode
    from kvops.router.response import Response


class AutoMode:
    """Serves each request in push mode where P runs the push connector, else bidirectional where P reads back."""

    def __init__(
        self,
        engines: Engines,
        identities: Identities,
        pull: PullMode,
        push: PushMode,
        bidirectional: BidirectionalMode,
    ) -> None:
        """Keep the modes to choose from."""
        self._engines = engines
        self._identities = identities
        self._pull = pull
        self._push = push
        self._bidirectional = bidirectional

    async def serve(self, attempt: Attempt) -> Response:
        """Serve in the mode that fits.

        Raises:
            EngineFailure: an engine failed before the first byte of the answer, or the pool is mixed.
            Refusal: an engine finds fault with the request.
        """
        return await (await self._mode(attempt)).serve(attempt)

    async def prime(self, attempt: Attempt, body: Body, decode: Endpoint) -> None:
        """Bring the KV of one prompt into D's prefix cache."""
        await (await self._mode(attempt)).prime(attempt, body, decode)

    async def _mode(self, attempt: Attempt) -> PullMode | PushMode | BidirectionalMode:
        pool = self._engines.prefill
        able = [endpoint for endpoint in pool.endpoints if endpoint.takes_requests()] or [pool.choose()]
        for endpoint in able:
            if endpoint.transfer_mode is None:
                await self._identities.warm_up(endpoint, attempt)
        modes = {endpoint.transfer_mode for endpoint in able}
        if len(modes) > 1:
            raise EngineFailure(able[0], "no_handle", "some prefill engines run the push connector and some do not")
        if modes == {"push"}:
            return self._push
        # Stock vLLM waits for ever when it is given decode's handle and has bidirectional_kv_xfer off, and does not
        # say whether it has; the instrumented connectors do.
        return self._bidirectional if all(endpoint.bidirectional for endpoint in able) else self._pull
