"""Runs checks over a host's facts and orders what they found: causes first, consequences under them."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvops.doctor import conditions
from kvops.doctor.check import Check, Finding, State, skipped, unknown
from kvops.doctor.checks import CHECKS
from kvops.doctor.facts import Facts, UnavailableError
from kvops.doctor.host import LiveHost
from kvops.doctor.manifest import COMMANDS
from kvops.doctor.parsers import ParseError
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvops.doctor.engines import Engine

# Published retry of EFA's late enumeration (awsome-distributed-training's health check), while a boot is recent.
LATE_LOOKS, LATE_LOOK_SECONDS, BOOT_SECONDS = 3, 5.0, 300.0
TROUBLE = (State.FAIL, State.WARN)
PAIR_CHECKS = tuple(
    check
    for check in CHECKS
    if conditions.pair in check.applies or conditions.two_hosts in check.applies or check.id == "VL-01"
)


@dataclass(slots=True)
class Result:
    """A check, what it found, and how it hangs together with the others."""

    check: Check
    finding: Finding
    explained_by: str = ""
    explains: list[str] = field(default_factory=list)

    @property
    def state(self) -> State:
        """Return the finding's state."""
        return self.finding.state

    @property
    def fix(self) -> str:
        """Return what to do: the finding's own words, else the check's."""
        return self.finding.fix or self.check.fix


@dataclass(slots=True)
class Report:
    """All results of one run, in the order of the stack."""

    host: str
    instance_type: str
    results: list[Result]
    problems: list[str] = field(default_factory=list)

    def count(self, state: State) -> int:
        """Return how many checks ended so."""
        return sum(result.state is state for result in self.results)

    @property
    def causes(self) -> list[Result]:
        """Return the failures and warnings that nothing else explains, failures first."""
        found = [result for result in self.results if result.state in TROUBLE and not result.explained_by]
        return sorted(found, key=lambda result: TROUBLE.index(result.state))

    def consequences(self, cause: Result) -> list[Result]:
        """Return the results that a cause explains."""
        return [result for result in self.results if result.explained_by == cause.check.id]

    @property
    def exit_status(self) -> int:
        """Return 1 if a check failed, 2 if none could be evaluated, else 0."""
        if self.count(State.FAIL):
            return 1
        return 0 if any(result.state is not State.UNKNOWN for result in self.results) else 2


def evaluate(check: Check, facts: Facts) -> Finding:
    """Return what a check finds; a check that crashes has found nothing and never ends the run."""
    try:
        for condition in check.applies:
            reason = condition(facts)
            if reason:
                return skipped(reason)
        return check.find(facts)
    except UnavailableError as gap:
        return unknown(str(gap))
    except ParseError as error:
        return unknown(f"cannot read the evidence: {error}")
    except Exception as error:
        return unknown(f"{check.id} has a defect: {type(error).__name__}: {error}", "please report it")


def run(facts: Facts, checks: Sequence[Check] = CHECKS) -> Report:
    """Return the report of some checks over one host."""
    results = [Result(check, evaluate(check, facts)) for check in checks]
    explain(results)
    try:
        instance_type = facts.instance_type
    except UnavailableError:
        instance_type = ""
    hosts = [side.host for side in (facts, facts.peer) if side is not None]
    problems = [f"{host.name}: {problem}" for host in hosts for problem in host.problems]
    return Report(" and ".join(host.name for host in hosts), instance_type, results, problems)


def explain(results: Sequence[Result]) -> None:
    """Hang each failure and warning under the one that is its root cause; a warning explains no failure."""
    by_id = {result.check.id: result for result in results}
    for result in results:
        cause = _root_cause(result, by_id)
        if cause is not None:
            result.explained_by = cause.check.id
            cause.explains.append(result.check.id)


def _root_cause(result: Result, by_id: dict[str, Result]) -> Result | None:
    cause, seen = None, {result.check.id}
    current = result
    while current.state in TROUBLE:
        direct = next(
            (
                by_id[name]
                for name in current.check.explained_by
                if name in by_id and name not in seen and _can_explain(by_id[name], current)
            ),
            None,
        )
        if direct is None:
            break
        seen.add(direct.check.id)
        cause = current = direct
    return cause


def _can_explain(cause: Result, consequence: Result) -> bool:
    return cause.state is State.FAIL or (cause.state is State.WARN and consequence.state is State.WARN)


def changes(before: Report, after: Report) -> list[tuple[Result, State]]:
    """Return the results whose state or message changed between two looks, with the state before."""
    pairs = zip(before.results, after.results, strict=True)
    return [
        (new, old.state) for old, new in pairs if (old.state, old.finding.message) != (new.state, new.finding.message)
    ]


def select(only: Iterable[str] = (), skip: Iterable[str] = (), among: Sequence[Check] = ()) -> list[Check]:
    """Return the checks that ids, group names and ``quick`` choose; all (of ``among``) without a choice.

    Raises:
        KvopsError: a name is neither an id nor a group, or nothing is left.
    """
    only, skip = [word.lower() for word in only], [word.lower() for word in skip]
    known = {check.id.lower() for check in CHECKS} | {check.group for check in CHECKS} | {"quick"}
    for word in (*only, *skip):
        if word not in known:
            near = difflib.get_close_matches(word, sorted(known), n=1)
            raise KvopsError(
                f"no check or group is called {word!r}",
                f"did you mean {near[0]!r}?" if near else "kvops doctor --list shows them",
            )
    names = [(c, {c.id.lower(), c.group, "quick" if c.quick else ""}) for c in among or CHECKS]
    chosen = [c for c, own in names if (not only or own & set(only)) and not own & set(skip)]
    if not chosen:
        raise KvopsError("no check is left to run", "--only and --skip exclude each other here")
    return chosen


def find_check(name: str) -> Check:
    """Return the check with an id.

    Raises:
        KvopsError: there is none.
    """
    chosen = select([name])
    if len(chosen) != 1:
        raise KvopsError(f"{name!r} is a group, not a check", f"its checks are {', '.join(c.id for c in chosen)}")
    return chosen[0]


def live_host() -> LiveHost:
    """Return this machine, with the answers of all commands on their way."""
    host = LiveHost()
    host.prefetch(COMMANDS)
    return host


def wait_for_efas(first: Facts, look_again: Callable[[], Facts], sleep: Callable[[float], None] = time.sleep) -> Facts:
    """Return a look at a machine whose EFAs have all appeared: they may come some seconds after boot.

    Args:
        first: the look that may be too early; the one that is returned compares with it.
        look_again: takes another look.
        sleep: waits for some seconds.
    """
    facts = first
    for _ in range(LATE_LOOKS):
        if not _more_may_appear(facts):
            break
        sleep(LATE_LOOK_SECONDS)
        facts = look_again()
        facts.previous = first
    return facts


def _more_may_appear(facts: Facts) -> bool:
    try:
        expected, found, age = facts.profile, len(facts.efa_pci), facts.seconds_since_boot
    except UnavailableError:
        return False
    return expected is not None and found < expected.efas and age < BOOT_SECONDS


def run_quick(planned: Sequence[Engine] = ()) -> Report:
    """Return the report of the quick checks on this machine, as the launcher wants it before it starts engines.

    Args:
        planned: the engines about to be started; their options and environment are looked at.
    """

    def look() -> Facts:
        return Facts(live_host(), planned=planned)

    return run(wait_for_efas(look(), look), [check for check in CHECKS if check.quick])
