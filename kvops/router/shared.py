"""What all workers of a router must see: the conversations, so that any of them finds a handle, and the rate limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvops.router.conversations import Conversations, Held, Turn, Unused
from kvops.router.limits import RateLimit

if TYPE_CHECKING:
    from kvops.router.peer import Peer
    from kvops.router.settings import Settings


class Shared(Protocol):
    """The state, wherever it lives."""

    async def begin(self, key: str) -> Turn:
        """Return what is known of a conversation and take its handle out."""

    async def keep(self, key: str, turn: int, held: Held) -> list[Unused]:
        """Remember a turn and return what is to be given back."""

    async def admit(self, client: str) -> None:
        """Count a request of ``client``; RouterError (429) if it has sent too many."""

    def size(self) -> tuple[int, int]:
        """Return the conversations that this process keeps, and their bytes."""


class Own:
    """State in this process."""

    def __init__(self, settings: Settings) -> None:
        """Start empty."""
        self.conversations = Conversations(settings)
        self.rate = RateLimit(settings.limits.requests_per_second)

    async def begin(self, key: str) -> Turn:
        """Return what is known of a conversation and take its handle out."""
        return self.conversations.begin(key)

    async def keep(self, key: str, turn: int, held: Held) -> list[Unused]:
        """Remember a turn and return what is to be given back."""
        return self.conversations.keep(key, turn, held)

    async def admit(self, client: str) -> None:
        """Count a request of ``client``.

        Raises:
            RouterError: it has sent too many (429).
        """
        self.rate.admit(client)

    def size(self) -> tuple[int, int]:
        """Return the conversations that this process keeps, and their bytes."""
        return len(self.conversations), self.conversations.bytes


class Remote:
    """State in the process that started this worker."""

    def __init__(self, peer: Peer, settings: Settings) -> None:
        """Keep the connection to it."""
        self._peer = peer
        self._limited = bool(settings.limits.requests_per_second)

    async def begin(self, key: str) -> Turn:
        """Return what is known of a conversation and take its handle out."""
        turn: Turn = await self._peer.call("begin", key, returns=Turn)
        return turn

    async def keep(self, key: str, turn: int, held: Held) -> list[Unused]:
        """Remember a turn and return what is to be given back."""
        unused: list[Unused] = await self._peer.call("keep", (key, turn, held), returns=list[Unused])
        return unused

    async def admit(self, client: str) -> None:
        """Count a request of ``client``.

        Raises:
            RouterError: it has sent too many (429).
        """
        if self._limited:
            await self._peer.call("admit", client, returns=None)

    def size(self) -> tuple[int, int]:
        """Return nothing, for the other process counts them."""
        return 0, 0
