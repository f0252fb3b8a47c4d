"""A request's arrival: what it asks for, and the mends that change its params before vLLM sees them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvops_connectors import handle, prefix

if TYPE_CHECKING:
    from kvops_connectors.requests import OpenRequest
    from kvops_connectors.samples import Samples
    from kvops_connectors.settings import Settings


class Arrivals:
    """Reads the params of new requests.

    Attributes:
        reads_back: whether vLLM starts the reads of a handle that prefill is given.
    """

    def __init__(self, scheduler: Any, mode: str, role: str, settings: Settings, samples: Samples) -> None:
        self._scheduler = scheduler
        self._push = mode == "push"
        self._role = role
        self._settings = settings
        self._samples = samples
        # With a host buffer vLLM offers the remote tokens and starts no read, as without the option.
        self.reads_back = mode == "bidirectional" and not getattr(scheduler, "use_host_buffer", False)

    def read(self, followed: OpenRequest, request: Any) -> None:
        """Fill in what the params say, and mend them in place."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params:
            followed.expects_handle = self._role == "decode"
            return
        followed.context = handle.context(params)
        if params.get("do_remote_decode"):
            followed.acts_as = "prefill"
            self._readback_arrived(followed, request, params)
        else:
            followed.acts_as = "decode"
            self._load_arrived(followed, params)

    def _load_arrived(self, followed: OpenRequest, params: dict[str, Any]) -> None:
        followed.expects_handle = True
        offer = handle.read(params, push=self._push) if params.get("do_remote_prefill") else None
        if offer is not None and self._covers(offer, followed.prompt):
            followed.handle, followed.direction = offer, "p_to_d"
            followed.offered = followed.usable = followed.prompt
        elif self._settings.valid_handle:
            if params.get("do_remote_prefill"):
                self.mended(followed, "valid_handle")
            handle.drop_load(params)

    def _covers(self, offer: handle.Handle, prompt: int) -> bool:
        """Return whether prefill computed as many tokens as decode is going to load; vLLM asserts it in the worker."""
        needed = getattr(self._scheduler, "_get_remote_prefill_token_count", lambda tokens: tokens)(prompt)
        return self._push or not offer.tokens or offer.tokens >= needed

    def _readback_arrived(self, followed: OpenRequest, request: Any, params: dict[str, Any]) -> None:
        followed.expects_handle = self.reads_back and (followed.context.turn or 1) > 1
        if not params.get("remote_block_ids"):
            return
        offer = followed.handle = handle.read(params, push=False)
        if offer is None:
            if self._settings.valid_handle:
                handle.drop_readback(params)
                self.mended(followed, "valid_handle")
            return
        followed.direction = "d_to_p"
        followed.offered = followed.usable = offer.tokens
        if offer.expires_at is not None and offer.ttl_seconds is not None:
            age = time.time() - (offer.expires_at - offer.ttl_seconds)
            self._samples.observe("kvops_readback_age_seconds", age, request_id=followed.id)
        if not self.reads_back:
            self._decline(followed, params, "no_handle", "single_load", on=self._settings.single_load)
        elif offer.expired:
            self._decline(followed, params, "ttl_expired", "expired_readback", on=self._settings.expired_readback)
        elif offer.prefix is not None and self._settings.token_truth:
            self._compare(followed, request, params, offer)

    def _decline(self, followed: OpenRequest, params: dict[str, Any], reason: str, mend: str, on: bool) -> None:
        if on:
            followed.declined = reason
            handle.drop_readback(params)
            self.mended(followed, mend)

    def _compare(self, followed: OpenRequest, request: Any, params: dict[str, Any], offer: handle.Handle) -> None:
        assert offer.prefix is not None  # noqa: S101
        tokens = request.prompt_token_ids
        same_length = offer.prefix.tokens == offer.tokens
        matched = prefix.matched_tokens(offer.prefix, tokens, *conditions(request)) if tokens and same_length else 0
        followed.matched = matched
        if matched < offer.tokens:
            followed.usable = handle.cut(params, offer, matched)
            self.mended(followed, "token_truth")

    def mended(self, followed: OpenRequest, mend: str) -> None:
        """Note that a mend has stepped in."""
        followed.mended.append(mend)
        self._samples.count("kvops_mends_total", 1, mend)


def conditions(request: Any) -> tuple[str, list[prefix.Extra]]:
    """Return what the KV of a request depends on besides its tokens: adapter, cache salt, spans of images."""
    adapter = getattr(request, "lora_request", None)
    salt = f"{getattr(adapter, 'lora_name', '')}/{getattr(request, 'cache_salt', None) or ''}"
    extras = []
    for feature in getattr(request, "mm_features", None) or ():
        start = feature.mm_position.offset
        extras.append(prefix.Extra(start, start + feature.mm_position.length, str(feature.identifier)))
    return salt, extras
