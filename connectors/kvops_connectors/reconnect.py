"""A new handshake with a peer whose connection has ended.

After NIXL has reported a disconnect it refuses every transfer to that peer until the peer's metadata is removed and
added again. vLLM 0.32 does so for a pull peer only where ``check_remote_metadata`` finds the metadata gone; NIXL 1.5
keeps it: one broken link, and decode fails every request from that prefill until it is restarted. For a push peer it
never does (``_cleanup_remote_engines``), though there both sides shake hands.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from kvops_connectors.push import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops_connectors.settings import Settings

logger = logging.getLogger(__name__)

_DISCONNECT = "nixlRemoteDisconnectError"


class PullReconnect:
    """Lets vLLM find the metadata of failed peers gone once NIXL has spoken of a disconnect."""

    def __init__(self, worker: Any) -> None:
        """Shadow three methods of the worker's agent and one of the worker, where both have them."""
        self._lost = self._told = False
        agent = worker.nixl_wrapper
        if not (hasattr(worker, "_cleanup_remote_engines") and hasattr(agent, "check_remote_metadata")):
            return
        agent.transfer = _noticing(agent.transfer, self._note)
        agent.send_notif = _noticing(agent.send_notif, self._note)
        agent.check_remote_metadata = self._check_remote_metadata(agent.check_remote_metadata)
        worker._cleanup_remote_engines = self._cleanup(worker._cleanup_remote_engines)

    def _note(self, *_: Any, **__: Any) -> None:
        self._lost = True

    def _check_remote_metadata(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def check_remote_metadata(*args: Any, **kwargs: Any) -> bool:
            if not self._lost:
                return original(*args, **kwargs)
            # vLLM asks only about peers that a transfer has failed with.
            self._told = True
            return False

        return check_remote_metadata

    def _cleanup(self, original: Callable[[], None]) -> Callable[[], None]:
        def cleanup_remote_engines() -> None:
            original()
            if self._told:
                self._lost = self._told = False

        return cleanup_remote_engines


class PushReconnect:
    """Lets go of a push peer once NIXL has spoken of a disconnect and nothing is being written to it any more.

    The next write or registration then shakes hands again, as with a peer never met before. A write that failed is not
    repeated: some of decode's ranks may have it, and they count notices. A registration that reached no rank is.

    Attributes:
        lock: held while a peer is written to, registered with or let go of: the first two are the writer thread's, the
            last is the main thread's.
    """

    def __init__(
        self,
        worker: Any,
        settings: Settings,
        decode_of: Callable[[str], str | None],
        is_awaited: Callable[[str], bool],
    ) -> None:
        """Shadow the agent's ``send_notif``, where vLLM can let go of single peers (from 0.32 on).

        Args:
            worker: vLLM's worker; nothing is done for one that does not push.
            settings: whether to do it at all.
            decode_of: the engine that a request's KV is being written to, None if that is not known.
            is_awaited: whether decode still waits for the KV of a request that it has registered.
        """
        self.lock = threading.Lock()
        self._worker = worker
        self._decode_of = decode_of
        self._is_awaited = is_awaited
        self._gone: set[str] = set()
        self._unsent: dict[str, dict[str, Any]] = {}
        self._refused = threading.local()
        needed = ("_push_finished_blocks", "_cleanup_remote_engines")
        self._on = settings.reconnect and all(hasattr(worker, name) for name in needed)
        if self._on:
            agent = worker.nixl_wrapper
            agent.send_notif = _noticing(agent.send_notif, self._refuse)

    def failed(self, request_id: str, error: BaseException | None, engine: str | None) -> None:
        """Take note of a failure that vLLM reports for a request."""
        if self._on and _is_disconnect(error) and (engine := engine or self._decode_of(request_id)) is not None:
            self._gone.add(engine)

    def register(self, send: Callable[..., Any], request_id: str, registration: dict[str, Any]) -> Any:
        """Send a registration; one that reached no rank is kept until prefill has been let go of."""
        if not self._on:
            return send(request_id, registration)
        with self.lock:
            self._unsent.pop(request_id, None)
            self._refused.agents = set()
            try:
                return send(request_id, registration)
            finally:
                agents = self._worker._remote_agents.get(registration["remote_engine_id"]) or {}
                if agents and self._refused.agents >= set(agents.values()):
                    self._unsent[request_id] = registration

    def let_go(self) -> None:
        """Remove what is known of peers that disconnected; called on the main thread, once a step."""
        if not self._gone:
            return
        with self.lock:
            with self._worker._sending_transfers_lock:
                writing_to = {self._decode_of(request_id) for request_id in self._worker._sending_transfers}
            if None not in writing_to:
                for engine in self._gone - writing_to:
                    self._remove(engine)

    def _remove(self, engine: str) -> None:
        self._gone.discard(engine)
        if engine in self._worker._remote_agents:
            self._worker._cleanup_remote_engine(engine, log_eviction=False)
            logger.warning("kvops: the connection to %s has ended; the next request shakes hands again", engine)
        for request_id, registration in list(self._unsent.items()):
            if registration["remote_engine_id"] == engine:
                del self._unsent[request_id]
                if registration.get(CANCELLED) or self._is_awaited(request_id):
                    self._worker._reg_send_inbox.put((request_id, registration))
                    self._worker._push_writer_wake.set()

    def _refuse(self, agent_name: str, *_: Any, **__: Any) -> None:
        # Heartbeats leave from the main thread, registrations from the writer thread.
        if hasattr(self._refused, "agents"):
            self._refused.agents.add(agent_name)
        # A copy: the handshake thread adds to it.
        for engine, agents in list(self._worker._remote_agents.items()):
            if agent_name in agents.values():
                self._gone.add(engine)


def _noticing(original: Callable[..., Any], notice: Callable[..., None]) -> Callable[..., Any]:
    """Return ``original`` so wrapped that ``notice`` gets its arguments when it ends in a disconnect."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if _is_disconnect(error):
                notice(*args, **kwargs)
            raise

    return call


def _is_disconnect(error: BaseException | None) -> bool:
    return type(error).__name__ == _DISCONNECT
