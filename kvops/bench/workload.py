"""What is sent and when: arrivals, prompts, and how a conversation grows. Everything follows from one seed."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Literal

import msgspec

from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.bench.results import Cell

# Printable ASCII in byte-level BPE vocabularies (in GPT-2's order) and in those with byte fallback (from 3 on) alike.
# Bytes that are no UTF-8 would cost vLLM's streaming detokenizer time that grows with the square of the prompt.
_FIRST_TOKEN, _TOKENS = 36, 58
Arrivals = Literal["poisson", "constant"]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Single requests: every length at every rate.

    Attributes:
        cells: lengths and rates; rate 0 sends one request at a time.
        seconds: how long requests arrive in a cell and round.
        output_tokens: tokens of each answer.
        arrivals: poisson, or constant gaps.
        rounds: how often everything is repeated, the legs in turns.
        warm_up: requests before each cell that are in no figure.
        prefill_cache: warm sends every prompt once before it is measured.
        unique_prompts: whether no prompt is sent twice; else all of a cell are the same one.
        seed: of prompts and arrivals.
    """

    cells: tuple[Cell, ...]
    seconds: float
    output_tokens: int
    arrivals: Arrivals
    rounds: int
    warm_up: int
    prefill_cache: Literal["cold", "warm"]
    unique_prompts: bool
    seed: int

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(cell.input_tokens for cell in self.cells) + self.output_tokens


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations that grow from turn to turn.

    Attributes:
        conversations: how many in a round.
        turns: of each conversation.
        start_tokens: prompt of the first turn.
        end_tokens: prompt of the last turn, history included.
        output_tokens: tokens of each answer.
        think_seconds: mean gap between an answer and the next turn.
        rate_per_second: arrivals of conversations; 0 for one after the other.
        abort_rate: share of turns that the client leaves after the first token.
        rounds: how often everything is repeated, the legs in turns.
        prefill_cache: whether prefill keeps prompts in a prefix cache of its own.
        seed: of prompts, arrivals and gaps.
    """

    conversations: int
    turns: int
    start_tokens: int
    end_tokens: int
    output_tokens: int
    think_seconds: float
    rate_per_second: float
    abort_rate: float
    arrivals: Arrivals
    rounds: int
    prefill_cache: Literal["cold", "warm"]
    seed: int

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.prompt_tokens(self.turns) + self.output_tokens

    def prompt_tokens(self, turn: int) -> int:
        """Return the length of the prompt of a turn, from 1."""
        if self.turns == 1:
            return self.start_tokens
        return self.start_tokens + (self.end_tokens - self.start_tokens) * (turn - 1) // (self.turns - 1)

    def check(self) -> None:
        """Make sure that every turn can add something.

        Raises:
            KvopsError: a turn adds no more than the answer of the turn before.
        """
        if self.turns == 1:
            return
        step = (self.end_tokens - self.start_tokens) // (self.turns - 1)
        if step <= self.output_tokens:
            raise KvopsError(
                f"a turn adds {step} tokens, which the answer of {self.output_tokens} tokens fills alone",
                "raise --end-tokens, or lower --turns or --output-tokens",
            )


def _generator(names: tuple[object, ...]) -> random.Random:
    return random.Random(repr(names))  # noqa: S311 - nothing secret hangs on it, and it must be repeatable


def prompt(tokens: int, *names: object) -> list[int]:
    """Return ``tokens`` random token ids that depend on ``names`` alone."""
    content = _generator(names).randbytes(tokens)
    return [_FIRST_TOKEN + byte % _TOKENS for byte in content]


def arrival_times(rate_per_second: float, arrivals: Arrivals, *names: object) -> Iterator[float]:
    """Yield seconds after the start at which something is due, without end; they depend on ``names``.

    Args:
        rate_per_second: mean rate, above 0.
        arrivals: poisson for independent arrivals, constant for equal gaps.
        names: what tells this series from others.
    """
    if arrivals == "constant":
        # Not summed up: rounding would shift the last ones.
        yield from (index / rate_per_second for index in itertools.count())
    generator = _generator(names)
    due = 0.0
    while True:
        yield due
        due += generator.expovariate(rate_per_second)


def gap_seconds(mean: float, *names: object) -> float:
    """Return a think time: exponential around ``mean``, cut at five times the mean."""
    return min(_generator(names).expovariate(1 / mean), 5 * mean) if mean else 0.0


def happens(probability: float, *names: object) -> bool:
    """Return whether something of this probability happens."""
    return _generator(names).random() < probability
