"""One streamed completion, measured and checked."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from kvops.bench.results import RequestResult
from kvops.router.http_client import Body, BrokenOffError, ConnectError, HttpClient, LateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvops.bench.results import Cell
    from kvops.router.http_client import Response

# Longer than any lease or TTL: a request that takes so long waits for something that never comes.
_TIMEOUT_SECONDS = 600.0
_MAX_EVENT_BYTES = 4 * 2**20
_ERROR_CHARACTERS = 300


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request to make.

    Attributes:
        leg: name of the leg.
        round: from 0.
        cell: where its figures belong.
        request_id: its X-Request-Id.
        prompt: token ids.
        new_tokens: those that no earlier turn held.
        output_tokens: the answer's length, to the token.
        conversation: name of the conversation.
        send_conversation: whether the server is told it.
        turn: from 1.
        abort: whether to leave after the first token.
    """

    leg: str
    round: int
    cell: Cell
    request_id: str
    prompt: Sequence[int]
    new_tokens: int
    output_tokens: int
    conversation: str | None = None
    send_conversation: bool = False
    turn: int | None = None
    abort: bool = False


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _WrongAnswerError(Exception):
    """The answer is not what was asked for."""


class Answer:
    """What came back, as far as it came."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.token_ids: list[int] = []
        self.arrivals: list[float] = []
        """When each piece of text came, by the monotonic clock; a piece may be several tokens."""
        self.usage: _Usage | None = None
        self.done = False

    @property
    def tokens(self) -> int:
        """Return the number of tokens: the ids where the server sends them, else what its usage says."""
        return len(self.token_ids) or (self.usage.completion_tokens if self.usage else len(self.arrivals))


_decode = msgspec.json.Decoder(_Event).decode


class Client:
    """Sends requests to one server."""

    def __init__(self, base_url: str, model: str, headers: Mapping[str, str] | None = None) -> None:
        """Start without a connection.

        Args:
            base_url: of the router.
            model: the served name.
            headers: sent with every request.
        """
        self._http = HttpClient(connect_seconds=10.0)
        self._url, self._model, self._headers = base_url, model, dict(headers or {})
        # Both clocks at one moment: durations come from the steady one, times of day from the other.
        self._epoch = time.time() - time.monotonic()

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()

    def body(self, ask: Ask) -> bytes:
        """Return the body of a request: greedy, streamed, exactly as long as asked for."""
        fields = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_tokens,
            "min_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return msgspec.json.encode(fields)

    async def send(self, ask: Ask, body: bytes, due: float) -> tuple[RequestResult, list[int]]:
        """Send a request and return how it went, and the ids of the answer's tokens.

        Args:
            ask: the request.
            body: what ``body`` made of it.
            due: when it was due, by the monotonic clock; latencies count from here.
        """
        answer, error = Answer(), None
        sent = time.monotonic()
        try:
            await self._exchange(ask, body, answer)
        except LateError:
            error = f"no end within {_TIMEOUT_SECONDS:g} s"
        except (ConnectError, BrokenOffError, _WrongAnswerError, msgspec.DecodeError) as problem:
            error = f"{type(problem).__name__.strip('_')}: {problem}"[:_ERROR_CHARACTERS]
        return self._result(ask, answer, due=due, sent=sent, ended=time.monotonic(), error=error), answer.token_ids

    async def _exchange(self, ask: Ask, body: bytes, answer: Answer) -> None:
        headers = {"Content-Type": "application/json", "X-Request-Id": ask.request_id, **self._headers}
        if ask.send_conversation and ask.conversation:
            headers["X-Conversation-ID"] = ask.conversation
        response = await self._http.post(self._url, "/v1/completions", headers, Body(body), _TIMEOUT_SECONDS)
        try:
            if response.status != 200:
                text = (await response.read()).decode(errors="replace")
                raise _WrongAnswerError(f"HTTP {response.status} {text}")
            await _follow(response, answer, leave_early=ask.abort)
        finally:
            response.close()
        if ask.abort:
            return
        if not answer.done:
            raise _WrongAnswerError("the stream ended without [DONE]")
        if answer.tokens != ask.output_tokens:
            raise _WrongAnswerError(f"{answer.tokens} tokens instead of {ask.output_tokens}")
        if answer.usage and answer.usage.prompt_tokens not in (0, len(ask.prompt)):
            raise _WrongAnswerError(f"a prompt of {answer.usage.prompt_tokens} tokens instead of {len(ask.prompt)}")

    def _result(
        self, ask: Ask, answer: Answer, *, due: float, sent: float, ended: float, error: str | None
    ) -> RequestResult:
        arrivals = answer.arrivals
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(arrivals))
        result = RequestResult(
            leg=ask.leg,
            round=ask.round,
            cell=ask.cell,
            request_id=ask.request_id,
            scheduled=self._epoch + due,
            sent=self._epoch + sent,
            prompt_tokens=len(ask.prompt),
            new_tokens=ask.new_tokens,
            outcome="failed" if error else "aborted" if ask.abort else "ok",
            conversation=ask.conversation,
            turn=ask.turn,
            output_tokens=answer.tokens,
            error=error,
        )
        if arrivals:
            result.ttft_seconds = arrivals[0] - due
        if result.outcome == "ok":
            result.e2e_seconds = ended - due
            if answer.tokens > 1:
                result.tpot_seconds = (arrivals[-1] - arrivals[0]) / (answer.tokens - 1)
            if gaps:
                result.itl_p50_seconds, result.itl_p99_seconds = quantile(gaps, 0.5), quantile(gaps, 0.99)
        return result


async def _follow(response: Response, answer: Answer, *, leave_early: bool) -> None:
    """Read the stream into ``answer``, to its end or to its first token."""
    rest = b""
    while chunk := await response.read_any():
        now = time.monotonic()
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            raise _WrongAnswerError("an event of the stream is too long")
        for line in lines:
            _take(line, answer, now)
        if leave_early and answer.arrivals:
            return


def _take(line: bytes, answer: Answer, now: float) -> None:
    if not line.startswith(b"data:"):
        return
    content = line[5:].strip()
    if content == b"[DONE]":
        answer.done = True
        return
    event = _decode(content)
    if bytes(event.error):
        raise _WrongAnswerError(f"an error inside a 200: {bytes(event.error).decode(errors='replace')}")
    answer.usage = event.usage or answer.usage
    for choice in event.choices:
        if choice.token_ids or choice.text:
            answer.arrivals.append(now)
            answer.token_ids += choice.token_ids or ()


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values, the nearest one; ``ordered`` is not empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
