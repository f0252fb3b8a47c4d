"""A new handshake with a peer whose connection has ended.

After NIXL has reported a disconnect it refuses every transfer to that peer until the peer's metadata is removed and
added again. vLLM 0.32 does so for a pull peer only where ``check_remote_metadata`` finds the metadata gone; NIXL 1.5
keeps it: one broken link, and decode fails every request from that prefill until it is restarted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_DISCONNECT = "nixlRemoteDisconnectError"


class Reconnect:
    """Lets vLLM find the metadata of failed peers gone once NIXL has spoken of a disconnect."""

    def __init__(self, worker: Any) -> None:
        """Shadow three methods of the worker's agent and one of the worker, where both have them."""
        self._lost = self._told = False
        agent = worker.nixl_wrapper
        if not (hasattr(worker, "_cleanup_remote_engines") and hasattr(agent, "check_remote_metadata")):
            return
        agent.transfer = self._noticing(agent.transfer)
        agent.send_notif = self._noticing(agent.send_notif)
        agent.check_remote_metadata = self._check_remote_metadata(agent.check_remote_metadata)
        worker._cleanup_remote_engines = self._cleanup(worker._cleanup_remote_engines)

    def _noticing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception as error:
                self._lost |= type(error).__name__ == _DISCONNECT
                raise

        return call

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
