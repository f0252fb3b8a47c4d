"""Results of other load generators, read as a run: ``vllm bench serve`` and AIPerf."""

from __future__ import annotations

import statistics
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.bench.client import quantile
from kvops.bench.results import Cell, Leg, RequestResult
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PER_REQUEST = ("ttfts", "itls", "input_lens", "output_lens")


def read(path: Path, leg: Leg) -> list[RequestResult]:
    """Return the requests in a file that another tool wrote.

    Args:
        path: what ``vllm bench serve --save-result --save-detailed`` wrote, or AIPerf's ``profile_export.jsonl``.
        leg: the leg that they belong to.

    Raises:
        KvopsError: the file cannot be read, or has no single requests.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise KvopsError(f"cannot read {path}: {error.strerror}", "give the file that the tool wrote") from None
    try:
        whole = msgspec.json.decode(content)
    except msgspec.DecodeError:
        whole = None
    try:
        found = list(
            _of_vllm(whole, leg) if isinstance(whole, dict) and "metrics" not in whole else _of_aiperf(content, leg)
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise KvopsError(
            f"{path} is neither of vllm bench serve nor of AIPerf: {error}",
            "give a file of vllm bench serve --save-result --save-detailed, or AIPerf's profile_export.jsonl",
        ) from None
    if not found:
        raise KvopsError(f"{path} holds no request", "give the file of a whole run")
    # Prompts that are meant to be of one length differ by a few tokens; a cell for each would tell nothing.
    length = round(statistics.median(request.prompt_tokens for request in found))
    rate = found[0].cell.rate_per_second
    return [msgspec.structs.replace(request, cell=Cell(input_tokens=length, rate_per_second=rate)) for request in found]


def _of_vllm(result: dict[str, Any], leg: Leg) -> Iterator[RequestResult]:
    if missing := [key for key in _PER_REQUEST if key not in result]:
        raise ValueError(f"it has no {', '.join(missing)}")
    # "inf" where the requests were sent all at once.
    rate = float(result.get("request_rate") or 0)
    rate = 0.0 if rate == float("inf") else rate
    errors = result.get("errors") or [""] * len(result["ttfts"])
    starts = _unix_times(result) or [0.0] * len(result["ttfts"])
    rows = zip(*(result[key] for key in _PER_REQUEST), errors, starts, strict=True)
    for number, (ttft, itls, prompt_tokens, output_tokens, error, start) in enumerate(rows):
        gaps = sorted(itls)
        problem = error or ("" if output_tokens else "no output")
        failed = bool(problem)
        yield RequestResult(
            leg=leg.name,
            round=0,
            cell=Cell(input_tokens=prompt_tokens, rate_per_second=rate),
            request_id=str(number),
            # The tool keeps when it sent a request, not when it was due.
            scheduled=start,
            sent=start,
            prompt_tokens=prompt_tokens,
            new_tokens=prompt_tokens,
            outcome="failed" if failed else "ok",
            ttft_seconds=None if failed else ttft,
            tpot_seconds=sum(gaps) / (output_tokens - 1) if not failed and output_tokens > 1 else None,
            itl_p50_seconds=quantile(gaps, 0.5) if gaps else None,
            itl_p99_seconds=quantile(gaps, 0.99) if gaps else None,
            e2e_seconds=None if failed else ttft + sum(gaps),
            output_tokens=output_tokens,
            error=problem or None,
        )


def _unix_times(result: dict[str, Any]) -> list[float]:
    """Return when requests were sent: the tool keeps its own clock's times, and the hour at which it was done."""
    starts: list[float] = result.get("start_times") or []
    if not starts or "date" not in result:
        return starts
    ended = datetime.strptime(result["date"], "%Y%m%d-%H%M%S").astimezone().timestamp()
    began = ended - float(result.get("duration", 0.0))
    return [began + start - min(starts) for start in starts]


def _of_aiperf(content: bytes, leg: Leg) -> Iterator[RequestResult]:
    for line in content.splitlines():
        if not line.strip():
            continue
        record = msgspec.json.decode(line)
        about, metrics = record["metadata"], record.get("metrics") or {}
        if about.get("benchmark_phase") == "warmup":
            continue
        error = record.get("error")
        prompt_tokens = int(_metric(metrics, "input_sequence_length") or 0)
        start = about["request_start_ns"] / 1e9
        failed = bool(error) or "time_to_first_token" not in metrics
        gaps = sorted(_times(metrics, "inter_chunk_latency"))
        yield RequestResult(
            leg=leg.name,
            round=0,
            cell=Cell(input_tokens=prompt_tokens),
            request_id=str(about.get("x_request_id") or about.get("session_num")),
            scheduled=start,
            sent=start,
            prompt_tokens=prompt_tokens,
            new_tokens=prompt_tokens,
            outcome="aborted" if about.get("was_cancelled") else "failed" if failed else "ok",
            conversation=about.get("x_correlation_id"),
            turn=about["turn_index"] + 1 if about.get("turn_index") is not None else None,
            ttft_seconds=_metric(metrics, "time_to_first_token"),
            tpot_seconds=_metric(metrics, "inter_token_latency"),
            itl_p50_seconds=quantile(gaps, 0.5) if gaps else None,
            itl_p99_seconds=quantile(gaps, 0.99) if gaps else None,
            e2e_seconds=_metric(metrics, "request_latency"),
            output_tokens=int(_metric(metrics, "output_sequence_length") or 0),
            error=str(error)[:300] if error else None,
        )


_UNITS = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _metric(metrics: dict[str, Any], name: str) -> float | None:
    """Return a metric, times in seconds."""
    if name not in metrics:
        return None
    return float(metrics[name]["value"]) * _UNITS.get(metrics[name].get("unit", ""), 1.0)


def _times(metrics: dict[str, Any], name: str) -> list[float]:
    """Return a metric that is a list of times, in seconds."""
    found = metrics.get(name, {"value": []})
    return [float(value) * _UNITS.get(found.get("unit", ""), 1.0) for value in found["value"]]
