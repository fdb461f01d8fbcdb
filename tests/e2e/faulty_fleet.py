"""A fleet of three engines that serves streams whose text is known while one engine has a fault.

A row complains when a request was lost or changed, when the engine's fate was not the one that it
must be, when a healthy engine was replaced, or beyond three times a bound.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import psutil
import yaml

from tests.e2e.fault_scenarios import SLACK, Scenario, plan_of, trigger
from tests.support.stack import READY_S, Stack, StreamedAnswer
from tests.support.waiting import comes_true, must_come_true

STORY: Final = "Tell me a story about a fox named Vera."
STREAMS: Final = 6
TOKENS: Final = 120
ENGINES: Final = 3
_POLL_S: Final = 0.05

# Small, so that a run takes minutes; the rules are those of production.
QUICK: Final[dict[str, dict[str, Any]]] = {
    "engine": {"prefill_chunk_tokens": 64},
    "fleet": {"probe_period_s": 5.0, "canary_period_s": 10.0, "slow_for_s": 10.0},
    "faults": {
        "hang_floor_s": 5.0,
        "hang_grace_s": 1.0,
        "breaker_deaths": 1000,
        "back_off_s": 0.1,
        "back_off_max_s": 0.5,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a scenario came to.

    Attributes:
        good: Requests that ended whole with the right text.
        moved: Those that needed a second engine.
        pause_s: Longest pause of a client.
        detect_s: From the word to the first symptom in the incident; None without an incident.
        settled_s: From the word until the process was gone, or ready again.
        cause: The incident's.
        complaints: What was not as it must be.
    """

    scenario: Scenario
    good: int
    total: int
    moved: int
    pause_s: float
    detect_s: float | None
    settled_s: float
    cause: str
    complaints: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        detect = "-" if self.detect_s is None else f"{max(0.0, self.detect_s):.2f}"
        return (
            f"{self.scenario.name:4} {self.scenario.what:52.52} {self.good}/{self.total} "
            f"{self.moved:5} {self.pause_s:7.2f} {detect:>9} {self.settled_s:9.2f}  "
            f"{self.scenario.fate:8} {self.cause:16} "
            f"{'; '.join(self.complaints) or 'met'}"
        )


HEAD: Final = (
    f"{'':4} {'injected':52} good moved pause s  detect s settled s  fate     {'cause':16} bound"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyFleet:
    """A running fleet whose faults wait for a word.

    Attributes:
        stack: The fleet.
        folder: Where the files are made that let the faults loose.
        expected: The undisturbed text of each stream.
    """

    stack: Stack
    folder: Path
    expected: tuple[str, ...]

    @classmethod
    @contextmanager
    def running(
        cls, folder: Path, scenarios: Sequence[Scenario], *, engines: int = ENGINES
    ) -> Iterator[Self]:
        """A fleet on the demo model that is armed with these scenarios."""
        plan = folder / "faults.yaml"
        plan.write_text(yaml.safe_dump(plan_of(tuple(scenarios), str(folder))))
        sections: dict[str, dict[str, Any]] = {
            **QUICK,
            "replica": {"count": engines},
            "injection": {"armed": True, "plan": plan},
        }
        with Stack.running(folder / "state", **sections) as stack:
            with ThreadPoolExecutor(STREAMS) as pool:
                answers = list(pool.map(lambda n: stack.stream(_body(stack, n)), range(STREAMS)))
            assert all(one.whole for one in answers), answers
            yield cls(stack=stack, folder=folder, expected=tuple(one.text for one in answers))

    def play(self, scenario: Scenario) -> Row:
        """Let one scenario happen to one engine, and wait until the fleet is whole again."""
        self.stack.wait_for_ready(ENGINES)
        before = self.stack.ready()
        with ThreadPoolExecutor(STREAMS) as pool:
            pending = [
                pool.submit(self.stack.stream, _body(self.stack, number))
                for number in range(0 if scenario.idle else STREAMS)
            ]
            victim = before[0] if scenario.idle else self.busiest()
            said = time.time()
            word = self.let_loose(scenario, victim)
            settled_s = self._settled(scenario, victim, said)
            answers: list[StreamedAnswer] = [future.result() for future in pending]
        row = self._row(scenario, victim, answers, said, settled_s, before)
        word.unlink()
        return row

    def let_loose(self, scenario: Scenario, victim: dict[str, Any]) -> Path:
        """Let a scenario begin in one engine; it is struck by each once in its life."""
        snapshot = victim["snapshot"]
        device, generation = snapshot["device"], snapshot["generation"]
        word = Path(trigger(str(self.folder), scenario.name, device, generation))
        word.touch()
        return word

    def body(self, number: int) -> dict[str, Any]:
        """The request of a stream."""
        return _body(self.stack, number)

    def busiest(self) -> dict[str, Any]:
        """The engine with the most requests, once one has any."""
        found: list[dict[str, Any]] = []

        def busy() -> bool:
            found[:] = sorted(self.stack.ready(), key=lambda one: -int(one["in_flight"]))
            return bool(found) and found[0]["in_flight"] > 0

        self.until(busy, "no engine got work")
        return found[0]

    def _settled(self, scenario: Scenario, victim: dict[str, Any], said: float) -> float:
        """Seconds until the engine met its fate."""
        pid, name = int(victim["snapshot"]["pid"]), victim["replica_id"]
        if scenario.fate == "stays":
            self.until(lambda: self._has_proved_itself(name, said), f"{name} is not ready again")
        elif scenario.fate == "exits":
            self.until(lambda: not lives(pid), f"process {pid} lives")
        else:
            self.until(
                lambda: name not in [one["replica_id"] for one in self.stack.ready()],
                f"{name} is still in rotation",
            )
        return time.time() - said

    def _has_proved_itself(self, name: str, said: float) -> bool:
        incidents = self.incidents_of(name, said)
        states = {one["replica_id"]: one["state"] for one in self.stack.replicas()}
        return bool(incidents) and states.get(name) == "ready"

    def incidents_of(self, name: str, said: float) -> list[dict[str, Any]]:
        """A replica's incidents since the word was said."""
        found = self.stack.get("/fleet/v1/incidents")["incidents"]
        return [
            one for one in found if one["replica"] == name and first_sign_s(one, said) is not None
        ]

    def _row(
        self,
        scenario: Scenario,
        victim: dict[str, Any],
        answers: Sequence[StreamedAnswer],
        said: float,
        settled_s: float,
        before: Sequence[dict[str, Any]],
    ) -> Row:
        name = victim["replica_id"]
        others = {one["replica_id"] for one in before} - {name}
        if scenario.fate != "stays":
            self.stack.wait_for_ready(ENGINES, without=frozenset({name}))
        good = sum(
            one.whole and one.text == right
            for one, right in zip(answers, self.expected, strict=False)
        )
        incident = self._told(scenario, name, said)
        row = Row(
            scenario=scenario,
            good=good,
            total=len(answers),
            moved=sum(one.attempts > 1 for one in answers),
            pause_s=max((one.worst_gap_s for one in answers), default=0.0),
            detect_s=None if incident is None else (first_sign_s(incident, said) or said) - said,
            settled_s=settled_s,
            cause="-" if incident is None else incident["cause"],
        )
        still = {one["replica_id"] for one in self.stack.ready()}
        return judged(row, incident, lost_healthy=len(others - still))

    def _told(self, scenario: Scenario, name: str, said: float) -> dict[str, Any] | None:
        """The incident, once it holds what it must hold."""

        def tells() -> bool:
            found = self.incidents_of(name, said)
            return bool(found) and _lacks(found[0], scenario) == []

        comes_true(tells, patience_s=15, every_s=_POLL_S)
        return next(iter(self.incidents_of(name, said)), None)

    @staticmethod
    def until(condition: Any, complaint: str) -> None:
        """Wait until something holds.

        Raises:
            AssertionError: It does not.
        """
        must_come_true(condition, complaint, patience_s=READY_S, every_s=_POLL_S)


def _body(stack: Stack, number: int) -> dict[str, Any]:
    return stack.body(STORY, seed=number, max_tokens=TOKENS)


def first_sign_s(incident: Mapping[str, Any], said: float) -> float | None:
    """When an incident first told of what began at `said`; None when it did not.

    One that was closed a little before is open again: what happened before counts for nothing.
    """
    # The controller's clock and ours are one machine's, but its stamps come first.
    signs = [at_s for at_s, what in incident["timeline"] if at_s >= said - 0.5 and _is_sign(what)]
    return min(signs, default=None)


def _is_sign(what: str) -> bool:
    return not what.startswith(("mitigated", "closed"))


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _lacks(incident: dict[str, Any], scenario: Scenario) -> list[str]:
    """What an incident must hold and does not."""
    text = " ".join(incident["evidence"])
    lacks = [f"no word of {one!r}" for one in scenario.evidence if one not in text]
    if incident["cause"] not in scenario.causes:
        lacks.append(f"called {incident['cause']} ({incident['evidence'][0][:200]})")
    return lacks


def judged(row: Row, incident: dict[str, Any] | None, *, lost_healthy: int) -> Row:
    """The row with all that is not as its scenario says.

    Args:
        row: With what was complained of before.
        incident: Of the engine that had the fault.
        lost_healthy: Other engines that are gone.
    """
    scenario = row.scenario
    complaints = list(row.complaints)
    if row.good != row.total:
        complaints.append(f"{row.total - row.good} requests lost or changed")
    if lost_healthy:
        complaints.append(f"{lost_healthy} healthy engines gone")
    if scenario.moves and not row.moved:
        complaints.append("nothing moved")
    if incident is not None:
        complaints += _lacks(incident, scenario)
    elif "-" not in scenario.causes:
        complaints.append("no incident")
    for what, took_s, bound_s in (
        ("pause", row.pause_s, scenario.pause_s),
        ("detection", row.detect_s or 0.0, scenario.detect_s),
        ("settling", row.settled_s, scenario.exit_s),
    ):
        if took_s > SLACK * bound_s:
            complaints.append(f"{what} {took_s:.1f} s, bound {bound_s:.1f} s")
    return Row(
        **{name: getattr(row, name) for name in row.__slots__ if name != "complaints"},
        complaints=tuple(complaints),
    )
