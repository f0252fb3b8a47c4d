"""One client request on its way through the router, and one attempt at serving it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import TYPE_CHECKING

from kvops.router import bodies
from kvops.router.handles import Context
from kvops.router.journal import LegRecord, Record

if TYPE_CHECKING:
    from kvops.router.bodies import Body
    from kvops.router.http_server import Request
    from kvops.router.pool import Endpoint

# The client's own credential and its trace go on to the engines; everything else stays here.
_FORWARDED_HEADERS = ("authorization", "traceparent", "tracestate")
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Exchange:
    """One client request.

    Attributes:
        request: as it came.
        body: the client's, undecoded.
        streams: whether the client wants an event stream.
        client_id: the client's ``X-Request-Id``, or one made here; goes back to the client.
        credential: digest of what the client authenticates with; empty if with nothing.
        record: what the journal will say.
    """

    def __init__(self, request: Request, body: Body, mode: str) -> None:
        """Take in the request."""
        self.request = request
        self.path = request.path
        self.body = body
        self.streams = bodies.value_of(body, "stream") is True
        sent = request.header("x-request-id") or ""
        self.client_id = sent if _CLIENT_ID.fullmatch(sent) else os.urandom(16).hex()
        authorization = request.header("authorization")
        self.credential = _digest(authorization) if authorization else ""
        found = ((name, request.header(name)) for name in _FORWARDED_HEADERS)
        self.forwarded = {name: value for name, value in found if value is not None}
        self.record = Record(ts=time.time(), client_id=self.client_id, path=self.path, mode=mode, streams=self.streams)

    @property
    def response_headers(self) -> dict[str, str]:
        """Return the headers that every answer to the client carries."""
        return {"X-Request-Id": self.client_id}


def _digest(authorization: str) -> str:
    return hashlib.blake2b(authorization.encode(errors="surrogateescape"), digest_size=16).hexdigest()


class Attempt:
    """One attempt at serving an exchange, with an id that has never been used.

    Push pairs the legs by this id and a registration may outlive its request, so neither the client's id nor that of
    an earlier attempt is ever used.

    Attributes:
        exchange: the client's request.
        number: 1 for the first.
        id: the ``X-Request-Id`` of all its legs, and its ``transfer_id``.
        avoid: the engine that failed the attempt before.
        conversation: hash of the conversation, None for a request of none.
        turn: number of the turn in its conversation.
    """

    def __init__(self, exchange: Exchange, number: int = 1, avoid: Endpoint | None = None) -> None:
        """Mint the id."""
        self.exchange = exchange
        self.number = number
        self.avoid = avoid
        self.id = os.urandom(16).hex()
        self.conversation: str | None = None
        self.turn: int | None = None

    @property
    def context(self) -> Context:
        """Return what the engines' journals should know."""
        return Context(self.id, self.number, self.conversation, self.turn)

    @property
    def authorization(self) -> str | None:
        """Return what the client authenticates with, which the engines may want too."""
        return self.exchange.forwarded.get("authorization")

    def headers(self, endpoint: Endpoint) -> dict[str, str]:
        """Return the headers of a leg."""
        headers = self.exchange.forwarded | {"Content-Type": "application/json", "X-Request-Id": self.id}
        if endpoint.rank is not None:
            headers["X-data-parallel-rank"] = str(endpoint.rank)
        return headers

    def leg(self, endpoint: Endpoint) -> LegRecord:
        """Return the record of a leg that begins now."""
        leg = LegRecord(
            role=endpoint.role, engine=endpoint.name, attempt=self.number, id=self.id, started_at=time.time()
        )
        self.exchange.record.legs.append(leg)
        return leg
