"""The files of a run: what was measured, request by request, and under which conditions.

A run is a folder::

    run.json                    the ``Run``: workload, legs, counters, verdict, environment
    requests.jsonl              one ``RequestResult`` a line, in the order in which requests ended
    journal/<leg>/<file>.jsonl  what the leg's engines and router wrote to their journals while its cells ran

``requests.jsonl`` and the journals may be compressed (``.gz`` behind the name). Times of day are unix seconds.
"""

from __future__ import annotations

import gzip
from typing import IO, TYPE_CHECKING, Any, Literal, Self

import msgspec

from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = 1
RUN, REQUESTS, JOURNAL = "run.json", "requests.jsonl", "journal"
Kind = Literal["turns", "sweep", "imported"]


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One point of the workload; for turns the length and the rate are those of the turn's prompt and of conversations.

    Attributes:
        input_tokens: tokens of a prompt.
        rate_per_second: arrivals; 0 for one request at a time.
    """

    input_tokens: int
    rate_per_second: float = 0.0


class RequestResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request as the client saw it.

    Latencies count from ``scheduled``, when the request was due, so that a client or server that falls behind cannot
    hide it (coordinated omission); ``sent`` is when its first byte left.
    """

    leg: str
    round: int
    cell: Cell
    request_id: str
    """The client's X-Request-Id, ``client_id`` in the router's journal."""
    scheduled: float
    sent: float
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens that no earlier turn of the conversation held; all of them in a sweep."""
    outcome: str
    """ok, aborted (by the client, as the workload wants), or failed."""
    conversation: str | None = None
    turn: int | None = None
    """From 1."""
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    """Mean time of a token after the first one."""
    itl_p50_seconds: float | None = None
    itl_p99_seconds: float | None = None
    e2e_seconds: float | None = None
    output_tokens: int = 0
    error: str | None = None


class Leg(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way of serving the same workload.

    Attributes:
        name: what ``RequestResult.leg`` says.
        mode: pull, push or bidirectional.
        model: the name under which its router serves it.
        connectors: instrumented or stock.
        dispatch: whether prefill's and decode's request are sent one after the other or at once.
        prefill_cache: whether prefill could find prompts, or their beginnings, in its own prefix cache.
        conversation_ids: whether requests named their conversation; without it no KV is read back from decode.
        router: base URL.
        prefill: base URLs of the engines.
        decode: likewise.
    """

    name: str
    mode: str
    model: str = ""
    connectors: Literal["instrumented", "stock", "unknown"] = "unknown"
    dispatch: Literal["serial", "concurrent", "unknown"] = "unknown"
    prefill_cache: Literal["cold", "warm", "unknown"] = "unknown"
    conversation_ids: bool = False
    router: str = ""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


class RoleCounters(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the engines of one role counted during a cell.

    Attributes:
        computed_tokens: prompt tokens computed.
        cached_tokens: prompt tokens found in the engines' own prefix caches.
        transferred_tokens: prompt tokens whose KV came from another engine.
        recomputed_tokens: by reason; from instrumented connectors only.
        kv_bytes: moved by transfers that this role started.
        transfers: how many.
        transfer_seconds: sum of their times on the wire.
        post_seconds: sum of their times of posting.
        descriptors: sum over transfers.
        reads_after_expiry: KV blocks read when their lease or TTL had ended.
        expired: holds that ended unread.
    """

    computed_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: dict[str, int] = {}
    kv_bytes: int = 0
    transfers: int = 0
    transfer_seconds: float = 0.0
    post_seconds: float = 0.0
    descriptors: int = 0
    reads_after_expiry: int = 0
    expired: int = 0

    def add(self, part: RoleCounters, *, sign: Literal[1, -1] = 1) -> None:
        """Add what another one counted, or take it away."""
        for name in self.__struct_fields__:
            mine, value = getattr(self, name), getattr(part, name)
            if isinstance(value, dict):
                setattr(self, name, {key: mine.get(key, 0) + sign * value.get(key, 0) for key in mine | value})
            else:
                setattr(self, name, mine + sign * value)


class CellCounters(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was counted while one leg ran one cell in one round; in a run of turns the cell is the last turn's."""

    leg: str
    round: int
    cell: Cell
    started: float
    """Unix seconds."""
    seconds: float
    """From the first arrival to the last answer."""
    prefill: RoleCounters
    decode: RoleCounters
    client_cpu_share: float = 0.0
    """CPU seconds of the client a second: near 1 the client was the limit."""


class Environment(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where the client ran; the engines too, unless they were given by URL."""

    host: str
    """Hash of the host name: enough to tell hosts apart."""
    cpu: str
    cpus: int
    memory_bytes: int
    gpus: list[str] = []
    versions: dict[str, str] = {}
    """Of kvops, vllm, nixl, torch and python."""


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Whether the figures may be believed."""

    ok: bool
    problems: list[str] = []


class Run(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``run.json``."""

    kind: Kind
    started: float
    command: list[str]
    """argv, without secrets."""
    seed: int
    environment: Environment
    workload: dict[str, Any]
    """The parameters, by the names of the command's options."""
    legs: list[Leg]
    counters: list[CellCounters]
    verdict: Verdict
    ended: float = 0.0
    v: int = VERSION


class RunWriter:
    """Writes a run's folder; requests reach the file as they end, ``run.json`` comes last."""

    def __init__(self, folder: Path) -> None:
        """Create the folder.

        Raises:
            KvopsError: it cannot be created, or holds a run already.
        """
        if (folder / REQUESTS).exists() or (folder / RUN).exists():
            raise KvopsError(f"{folder} holds a run already", "give another folder with --out")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = (folder / REQUESTS).open("wb")
        except OSError as error:
            raise KvopsError(f"cannot write to {folder}: {error.strerror}", "give another folder with --out") from None
        self.folder = folder
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file of requests."""
        self._file.close()

    def add(self, result: RequestResult) -> None:
        """Append one request."""
        self._file.write(self._encoder.encode(result) + b"\n")

    def journal_folder(self, leg: str) -> Path:
        """Return the folder for the journals of a leg, which exists then."""
        folder = self.folder / JOURNAL / leg
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, run: Run) -> None:
        """Write ``run.json``."""
        self._file.flush()
        (self.folder / RUN).write_bytes(msgspec.json.format(self._encoder.encode(run), indent=1) + b"\n")


def read_run(folder: Path) -> Run:
    """Return the ``Run`` of a folder.

    Raises:
        KvopsError: there is none, or it is not of a version that is known.
    """
    path = folder / RUN
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise KvopsError(f"cannot read {path}: {error.strerror}", "give the folder that kvops bench wrote") from None
    except msgspec.DecodeError as error:
        raise KvopsError(f"{path} is no run: {error}", "give the folder that kvops bench wrote") from None


def requests_file(folder: Path) -> Path:
    """Return the file of requests, plain or compressed.

    Raises:
        KvopsError: there is none.
    """
    for path in (folder / REQUESTS, folder / f"{REQUESTS}.gz"):
        if path.is_file():
            return path
    raise KvopsError(f"{folder} has no {REQUESTS}", "give the folder that kvops bench wrote")


def read_requests(folder: Path) -> Iterator[RequestResult]:
    """Yield the requests of a run.

    Raises:
        KvopsError: there is no file of them, or a line of it is no request.
    """
    path = requests_file(folder)
    decode = msgspec.json.Decoder(RequestResult).decode
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise KvopsError(f"{path.name}:{number} is no request: {error}", "give a whole run") from None


def journal_files(folder: Path, leg: str) -> list[Path]:
    """Return the journals that were written during a leg, plain or compressed."""
    return sorted(path for path in (folder / JOURNAL / leg).glob("*.jsonl*") if path.is_file())
