"""The canary: greedy requests whose answers must be right and whose KV must be seen to move.

Health checks cannot see the expensive failures of a disaggregated fleet: a request answers 200 when KV went nowhere and
decode computed the prompt itself, and when the KV that arrived belonged to something else. So the canary compares the
answer through the router with the answer of one engine alone, and reads the counters of the initiating side.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kvops.launch.advice import explain_log
from kvops.launch.rundir import CanaryReport
from kvops.metrics_text import Samples

if TYPE_CHECKING:
    from kvops.launch.plan import Plan, Process

_ANSWER_TOKENS = 16
# The first transfer pays the handshake and, on GPUs, the registration of the whole KV pool; compiling backends add
# minutes. A canary that takes longer waits for KV that never comes.
_REQUEST_TIMEOUT_SECONDS = 300
_COUNTERS_SETTLE_SECONDS = 5.0
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_REQUESTS = "vllm:request_success_total"
_KV_BYTES = "vllm:nixl_bytes_transferred_sum"


class CanaryError(Exception):
    """The canary could not be carried through; the text is the verdict."""


class Counters(msgspec.Struct, frozen=True):
    """What one engine has counted since it started."""

    transferred_tokens: float
    """Prompt tokens whose KV came from another engine."""
    cached_tokens: float
    """Prompt tokens whose KV was in the engine's own prefix cache."""
    computed_tokens: float
    """Prompt tokens whose KV the engine computed."""
    kv_bytes: float
    """Bytes that this engine read or wrote; the other side counts nothing."""
    requests: float
    """Requests that ended well."""
    known: bool = True
    """Whether the engine exports the counter of prompt tokens at all."""

    @property
    def prompt_tokens(self) -> float:
        """All prompt tokens, wherever their KV came from."""
        return self.transferred_tokens + self.cached_tokens + self.computed_tokens

    def __sub__(self, earlier: Counters) -> Counters:
        """Return what was added since ``earlier``."""
        return Counters(
            self.transferred_tokens - earlier.transferred_tokens,
            self.cached_tokens - earlier.cached_tokens,
            self.computed_tokens - earlier.computed_tokens,
            self.kv_bytes - earlier.kv_bytes,
            self.requests - earlier.requests,
            self.known,
        )


async def run_canary(session: aiohttp.ClientSession, plan: Plan) -> CanaryReport:
    """Send enough canaries to reach every engine and return what they proved; never raises for a broken fleet."""
    started = time.monotonic()
    try:
        report = await _run(session, plan)
    except CanaryError as error:
        report = CanaryReport(passed=False, verdict=str(error), cause=_cause_in_logs(plan))
    except (aiohttp.ClientError, TimeoutError) as error:
        what = f"the canary got no answer: {type(error).__name__} {error}".strip()
        report = CanaryReport(passed=False, verdict=what, cause=_cause_in_logs(plan))
    report.seconds = time.monotonic() - started
    return report


async def _run(session: aiohttp.ClientSession, plan: Plan) -> CanaryReport:
    prefills, decodes = plan.role("prefill"), plan.role("decode")
    before = await read_counters(session, plan)
    prompt_tokens = 0
    # The router takes turns among idle engines, so this many requests reach each of them.
    for index in range(max(len(prefills), len(decodes))):
        prompt = make_prompt()
        alone = await _complete(session, prefills[index % len(prefills)], plan, prompt)
        routed = await _complete(session, plan.router, plan, prompt)
        prompt_tokens += routed["usage"]["prompt_tokens"]
        if routed["choices"][0]["text"] != alone["choices"][0]["text"]:
            raise CanaryError(
                f"the canary's answer through the router is {routed['choices'][0]['text']!r}, but one engine alone "
                f"answers {alone['choices'][0]['text']!r}: decode worked on wrong KV"
            )
    added = await settled_counters(session, plan, before, prompt_tokens)
    return judge(plan, added, prompt_tokens)


def judge(plan: Plan, added: dict[str, Counters], prompt_tokens: int) -> CanaryReport:
    """Return the report for answers that were right, from what each engine's counters added.

    Args:
        plan: the fleet.
        added: per engine name, what its counters added while the canaries ran.
        prompt_tokens: prompt tokens of all canaries.
    """
    decodes = [process.name for process in plan.role("decode")]
    initiators = [process.name for process in plan.role("prefill" if plan.mode == "push" else "decode")]
    report = CanaryReport(
        passed=False,
        verdict="",
        prompt_tokens=prompt_tokens,
        kv_tokens=round(sum(added[name].transferred_tokens for name in decodes)),
        kv_bytes=round(sum(added[name].kv_bytes for name in initiators)),
    )
    computed = round(sum(added[name].computed_tokens for name in decodes))
    idle = [name for name in decodes if not added[name].transferred_tokens]
    if not all(added[name].known for name in decodes):
        report.verdict = f"answers match, but decode exports no {_PROMPT_TOKENS}, so nothing shows that KV moved"
        report.cause = "remove --disable-log-stats from decode.args"
    elif not report.kv_tokens:
        report.verdict = f"answers match, but decode computed all {computed} prompt tokens itself: no KV moved"
        report.cause = _cause_in_logs(plan) or _cause_of_no_transfer(plan, added)
    elif not report.kv_bytes:
        report.verdict = f"decode counted {report.kv_tokens} tokens as transferred, but no engine moved a byte"
        report.cause = _cause_in_logs(plan)
    elif idle:
        report.verdict = f"KV moved, but {', '.join(idle)} took part in no transfer"
        report.cause = _cause_in_logs(plan) or "the router did not choose it; see kvops logs router"
    else:
        report.passed = True
        report.verdict = (
            f"answers match, {report.kv_bytes} bytes of KV moved, decode took {report.kv_tokens} of {prompt_tokens} "
            f"prompt tokens from prefill and computed {computed} itself"
        )
    return report


def make_prompt() -> str:
    """Return a prompt that no cache can hold and that fills several KV blocks of any tokenizer."""
    return "Repeat these words. " + " ".join(secrets.token_hex(4) for _ in range(32))


async def read_counters(session: aiohttp.ClientSession, plan: Plan) -> dict[str, Counters]:
    """Return each engine's counters by name.

    Raises:
        aiohttp.ClientError: an engine does not answer.
        CanaryError: an engine's /metrics cannot be parsed.
    """
    scrapes = await asyncio.gather(*(_scrape(session, engine) for engine in plan.engines))
    return {engine.name: counters for engine, counters in zip(plan.engines, scrapes, strict=True)}


async def _scrape(session: aiohttp.ClientSession, engine: Process) -> Counters:
    async with session.get(f"{engine.url}/metrics", timeout=aiohttp.ClientTimeout(total=30)) as answer:
        text = await answer.text()
    try:
        samples = Samples(text)
    except ValueError as error:
        raise CanaryError(f"{engine.url}/metrics is not Prometheus text: {error}") from None
    return Counters(
        transferred_tokens=samples.total(_PROMPT_TOKENS, source="external_kv_transfer"),
        cached_tokens=samples.total(_PROMPT_TOKENS, source="local_cache_hit"),
        computed_tokens=samples.total(_PROMPT_TOKENS, source="local_compute"),
        kv_bytes=samples.total(_KV_BYTES),
        requests=samples.total(_REQUESTS),
        known=samples.has(_PROMPT_TOKENS),
    )


async def settled_counters(
    session: aiohttp.ClientSession, plan: Plan, before: dict[str, Counters], prompt_tokens: int
) -> dict[str, Counters]:
    """Return what each engine counted since ``before``, by name, once decode has accounted for ``prompt_tokens``.

    Counters reach /metrics a scheduler step after the answer does; after a few seconds what there is is returned.

    Raises:
        aiohttp.ClientError: an engine does not answer.
        CanaryError: an engine's /metrics cannot be parsed.
    """
    deadline = time.monotonic() + _COUNTERS_SETTLE_SECONDS
    while True:
        after = await read_counters(session, plan)
        added = {name: after[name] - before[name] for name in after}
        accounted = sum(added[process.name].prompt_tokens for process in plan.role("decode"))
        has_bytes = any(counters.kv_bytes for counters in added.values())
        if (accounted >= prompt_tokens and has_bytes) or time.monotonic() > deadline:
            return added
        await asyncio.sleep(0.1)


async def _complete(session: aiohttp.ClientSession, server: Process, plan: Plan, prompt: str) -> dict[str, Any]:
    body = {
        "model": plan.served_model_name,
        "prompt": prompt,
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "seed": 0,
    }
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_SECONDS)
    async with session.post(f"{server.url}/v1/completions", json=body, timeout=timeout) as answer:
        if answer.status != 200:
            raise CanaryError(f"{server.name} answered the canary with HTTP {answer.status}: {await answer.text()}")
        result: dict[str, Any] = await answer.json()
    return result


def _cause_in_logs(plan: Plan) -> str:
    for process in (*plan.role("decode"), *plan.role("prefill"), plan.router):
        if advice := explain_log(process.log_file):
            return f"{process.name}: {advice}"
    return ""


def _cause_of_no_transfer(plan: Plan, added: dict[str, Counters]) -> str:
    decode_requests = sum(added[process.name].requests for process in plan.role("decode"))
    prefill_requests = sum(added[process.name].requests for process in plan.role("prefill"))
    # The canary asks prefill alone as often as it asks the router.
    if prefill_requests <= decode_requests:
        return "the router sent nothing to prefill; see kvops logs router"
    return "prefill did its part but decode got no handle, or could not use it; see kvops logs router and decode-0"
