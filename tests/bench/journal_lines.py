"""Write a journal as a fleet of two prefill and two decode engines and a router would, to measure its readers with.

    python tests/bench/journal_lines.py --lines 1000000 /var/tmp/journal
    /usr/bin/time -v kvops report /var/tmp/journal

Every line is encoded by the structs that the connectors and the router write, with ids as long as real ones, so sizes are
real: about 650 bytes a line. A bidirectional request gives five lines: the router's, prefill's and its hold's end, decode's and
its hold's end.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvops.router.journal import LegRecord
from kvops.router.journal import Record as RouterRecord
from kvops_connectors.journal import Engine, Hold, HoldEnd, Record, RequestIds, Times, Tokens, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator

T0 = 1796003386.0
BLOCK = 16
PREFILLS = [Engine(f"10.0.0.{n}:5600", "prefill", 0, f"prefill-{n}-5f1f2a6e") for n in (1, 2)]
DECODES = [Engine(f"10.0.1.{n}:5600", "decode", 0, f"decode-{n}-9b0c41d7") for n in (1, 2)]
TTL_SECONDS = 480.0


def transfer(rng: random.Random, tokens: int, peer: Engine, queue: float, wait: float, handshake: float) -> Transfer:
    wire = max(wait - handshake, 1e-4) * rng.uniform(0.7, 0.95)
    return Transfer(
        peer=peer.name, peer_engine=peer.engine_id, bytes=tokens * 262144, descriptors=max(1, tokens // BLOCK), transfers=8,
        ranks=8, queue_seconds=queue, handshake_seconds=handshake, post_seconds=wire * rng.uniform(0.02, 0.3),
        wire_seconds=wire, wait_seconds=wait, backend="LIBFABRIC",
    )  # fmt: skip


def turn_lines(
    rng: random.Random, conversation: str, turn: int, at: float, prompt: int, history: int, router_id: str
) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield (file, line) of one turn; ``history`` tokens are on decode, 0 for none."""
    prefill, decode = rng.choice(PREFILLS), rng.choice(DECODES)
    leg, output = f"{rng.getrandbits(128):032x}", rng.randint(50, 400)
    base = f"chatcmpl-{leg}"
    handshake = 0.4 if rng.random() < 0.001 else 0.0
    queue, new = rng.expovariate(200), prompt - history
    read = 0.004 + 1.6e-6 * history + rng.expovariate(500) if history else 0.0
    work = 0.02 + 3e-5 * new + 1.2e-9 * (prompt**2 - history**2) + rng.expovariate(300)
    loaded = at + queue + read if history else None
    done = at + queue + read + work
    wait = 0.003 + 1.6e-6 * prompt + rng.expovariate(400) + handshake
    arrived = done + 0.002
    end = arrived + queue + wait + output * rng.uniform(0.006, 0.011)
    ids = {"conversation": conversation, "turn": turn, "router_id": router_id, "attempt": 1}
    failed = rng.random() < 0.002
    yield (
        prefill.name,
        Record(
            ts=done, engine=prefill, mode="bidirectional", outcome="ok", status="FINISHED_LENGTH_CAPPED",
            request=RequestIds(f"{base}-{rng.getrandbits(32):08x}", base, None, **ids),
            tokens=Tokens(prompt, 0, history, {"new_tokens": new} if history else {"no_handle": new}, history, None, 1),
            times=Times(at, at + queue, loaded, done), direction="d_to_p" if history else None,
            transfer=transfer(rng, history, decode, queue, read, 0.0) if history else None,
            hold=Hold("prefill", -(-prompt // BLOCK), 30.0),
        ),
    )  # fmt: skip
    yield (
        decode.name,
        Record(
            ts=end, engine=decode, mode="bidirectional", outcome="failed" if failed else "ok", direction="p_to_d",
            request=RequestIds(f"{base}-{rng.getrandbits(32):08x}", base, f"{base}-{rng.getrandbits(32):08x}", **ids),
            tokens=Tokens(prompt, 0, prompt - 1, {"last_token": 1}, prompt, None, output),
            times=Times(arrived, arrived + queue, arrived + queue + wait, end),
            transfer=transfer(rng, prompt, prefill, queue, wait, handshake),
            hold=Hold("decode", -(-(prompt + output) // BLOCK), TTL_SECONDS), status="FINISHED_STOPPED",
            error="transfer_failed" if failed else None,
        ),
    )  # fmt: skip
    held = arrived + queue + wait - done
    yield (
        prefill.name,
        HoldEnd(
            ts=done + held, engine=prefill, mode="bidirectional", request=RequestIds(base + "-1", base, **ids),
            hold=Hold("prefill", -(-prompt // BLOCK), 30.0, 30.0 - held, held, "read"),
        ),
    )  # fmt: skip
    gap = rng.expovariate(1 / 60)
    yield (
        decode.name,
        HoldEnd(
            ts=end + min(gap, TTL_SECONDS), engine=decode, mode="bidirectional",
            request=RequestIds(base + "-2", base, **ids),
            hold=Hold("decode", -(-(prompt + output) // BLOCK), TTL_SECONDS, max(0.0, TTL_SECONDS - gap),
                      min(gap, TTL_SECONDS), "read" if gap < TTL_SECONDS else "expired"),
        ),
    )  # fmt: skip
    yield (
        "router",
        RouterRecord(
            ts=end, client_id=f"{rng.getrandbits(128):032x}", router_id=router_id, path="/v1/chat/completions",
            mode="bidirectional", streams=True, attempts=1, conversation=conversation, turn=turn,
            handle="hit" if history else "first_turn", handle_kept=True, first_byte_at=arrived + queue + wait + 0.01,
            ended_at=end, status=200, outcome="engine_failed" if failed else "ok",
            legs=[
                LegRecord(role="prefill", engine=prefill.name, attempt=1, id=leg, started_at=at - 0.001, ended_at=done,
                          status=200, outcome="ok"),
                LegRecord(role="decode", engine=decode.name, attempt=1, id=leg, started_at=arrived - 0.001,
                          first_byte_at=arrived + queue + wait + 0.01, ended_at=end, status=200, outcome="ok"),
            ],
        ),
    )  # fmt: skip


def lines(count: int, seed: int) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield ``count`` (file, line) pairs of conversations of six turns."""
    rng = random.Random(seed)
    left, number = count, 0
    while left > 0:
        conversation, at, prompt, history = f"{rng.getrandbits(64):016x}", T0 + number * 0.5, rng.randint(500, 4000), 0
        for turn in range(1, 7):
            for pair in turn_lines(rng, conversation, turn, at, prompt, history, f"{rng.getrandbits(128):032x}"):
                if left > 0:
                    yield pair
                    left -= 1
            history, at, prompt = prompt, at + 15 + rng.expovariate(1 / 60), prompt + rng.randint(300, 3000)
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    encode = msgspec.json.Encoder().encode
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((given.folder / f"{name}.dp0.jsonl").open("wb"))
            for name in ["router", *(engine.name for engine in PREFILLS + DECODES)]
        }
        for name, line in lines(given.lines, given.seed):
            files[name].write(encode(line) + b"\n")


if __name__ == "__main__":
    main()
