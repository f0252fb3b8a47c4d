"""What a check is: a function over the facts that returns one finding, with its metadata beside it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvops.doctor.facts import Facts

    Rule = Callable[[Facts], "Finding"]
    Condition = Callable[[Facts], str]


class State(StrEnum):
    """The five outcomes, from harmless to harmful."""

    PASS = "pass"  # noqa: S105
    """Looked, and it is good (or harmless and worth knowing)."""
    SKIP = "skip"
    """Does not apply to this machine or role."""
    UNKNOWN = "unknown"
    """Could not look: the evidence is missing or unreadable. Never counts as good or bad."""
    WARN = "warn"
    """Works, but slower or less safely than it should, or only by luck."""
    FAIL = "fail"
    """KV will not move, or not by RDMA."""


SEVERITY = {state: rank for rank, state in enumerate(State)}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check: a sentence, the literal evidence, and a fix when the check's own is too general."""

    state: State
    message: str
    evidence: str = ""
    fix: str = ""


def passed(message: str, evidence: str = "") -> Finding:
    """Return a good finding."""
    return Finding(State.PASS, message, evidence)


def skipped(message: str) -> Finding:
    """Return a finding for something that does not apply."""
    return Finding(State.SKIP, message)


def unknown(message: str, evidence: str = "") -> Finding:
    """Return a finding for something that could not be looked at."""
    return Finding(State.UNKNOWN, message, evidence)


def warned(message: str, evidence: str = "", fix: str = "") -> Finding:
    """Return a finding for something that works badly."""
    return Finding(State.WARN, message, evidence, fix)


def failed(message: str, evidence: str = "", fix: str = "") -> Finding:
    """Return a finding for something that does not work."""
    return Finding(State.FAIL, message, evidence, fix)


def worst(findings: Iterable[Finding], otherwise: Finding) -> Finding:
    """Return the gravest of some findings, the first of equals, or the given one when there is none."""
    return max(findings, key=lambda finding: SEVERITY[finding.state], default=otherwise)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: permanent id, what to tell the user about it, and its rule."""

    id: str
    group: str
    title: str
    why: str
    evidence: str
    rule: str
    fix: str
    sources: tuple[str, ...]
    applies: tuple[Condition, ...]
    explained_by: tuple[str, ...]
    quick: bool
    find: Rule


def in_group(group: str) -> Callable[..., Callable[[Rule], Check]]:
    """Return the decorator that a module of checks uses; it attaches metadata and registers nothing."""

    def check(
        id: str,  # noqa: A002
        title: str,
        *,
        evidence: str,
        rule: str,
        fix: str = "",
        sources: tuple[str, ...] = (),
        applies: tuple[Condition, ...] = (),
        explained_by: tuple[str, ...] = (),
        quick: bool = False,
    ) -> Callable[[Rule], Check]:
        def attach(find: Rule) -> Check:
            why = inspect.getdoc(find) or ""
            return Check(id, group, title, why, evidence, rule, fix, sources, applies, explained_by, quick, find)

        return attach

    return check
