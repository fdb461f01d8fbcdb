"""Rows of `make faults` about engines that must not be started again, or not yet.

Two engines on one host; the second serves while the first one's device is in trouble. What counts
is the number of starts: a keep-alive loop that restarts a server 233 times is what must not happen.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import yaml

from tests.e2e.faulty_fleet import lives
from tests.support.stack import READY_S, Stack
from tests.support.waiting import must_come_true

STORY: Final = "Tell me a story about a fox named Vera."
VICTIM: Final = 0
_BREAKER_DEATHS: Final = 3
# A hold of less than a minute is an ordinary back-off and no incident.
_HOLD_S: Final = 75.0
_TEARDOWN_S: Final = 12.0
# Long enough for a start that must not come: back-offs are below a second.
_LOOKED_AT_S: Final = 12.0

_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fleet": {"probe_period_s": 2.0},
    "replica": {"graceful_shutdown_timeout_s": 60.0},
    "faults": {
        "back_off_s": 0.2,
        "back_off_max_s": 0.5,
        "breaker_deaths": _BREAKER_DEATHS,
        "breaker_hold_s": _HOLD_S,
        "memory_wait_s": 3.0,
    },
}
_FAULTS: Final[tuple[Mapping[str, Any], ...]] = (
    {"name": "E5", "kind": "device_error", "error": "submissions_ignored"},
    {"name": "M1", "kind": "stranded_memory", "stranded_bytes": 10**15},
    {"name": "M2", "kind": "exit", "status": 1, "from_call": 120},
    {"name": "M3", "kind": "slow_teardown", "takes_s": _TEARDOWN_S},
    {"name": "leave", "kind": "device_error", "error": "timeout", "times": 1},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """One line.

    Attributes:
        name: As in docs/faults.md.
        what: What is injected, for a person.
        starts: Engines that were started after the first end.
        most_starts: How many there may be.
        good: Requests that ended whole with the right text meanwhile.
        said: What the incident says of the host.
        complaints: What was not as it must be.
    """

    name: str
    what: str
    starts: int
    most_starts: int
    good: int
    total: int
    said: str
    complaints: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name:4} {self.what:52.52} {self.good}/{self.total} {self.starts:3} of at most "
            f"{self.most_starts} starts  {'; '.join(self.complaints) or 'met'}\n     {self.said}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledHost:
    """A fleet of two engines whose first device's faults wait for a word.

    Attributes:
        stack: The fleet.
        folder: Where the words are, and the state.
        expected: The undisturbed answer.
    """

    stack: Stack
    folder: Path
    expected: str

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        """The fleet, armed."""
        with tempfile.TemporaryDirectory(prefix="headrace-held-") as name:
            folder = Path(name)
            plan = folder / "faults.yaml"
            faults = [
                {
                    **{key: value for key, value in one.items() if key != "name"},
                    "device": VICTIM,
                    "once_exists": str(folder / str(one["name"])),
                }
                for one in _FAULTS
            ]
            plan.write_text(yaml.safe_dump({"faults": faults}))
            sections = {**_SETTINGS, "injection": {"armed": True, "plan": plan}}
            with Stack.running(folder / "state", **sections) as stack:
                answer = stack.stream(stack.body(STORY))
                assert answer.whole, answer
                yield cls(stack=stack, folder=folder, expected=answer.text)

    @property
    def device(self) -> Path:
        """The state of the troubled device."""
        return self.folder / "state" / "hosts" / self.stack.node.host / "devices" / str(VICTIM)

    @property
    def generation(self) -> int:
        """How many engines were started on it."""
        return int((self.device / "generation").read_text())

    def poisoned_from_birth(self) -> HeldRow:
        """Every engine is ignored from its first call on: three births, and the host is out."""
        return self._held("E5", "ignored at the first call of each new process", ("E5",), 3)

    def memory_stranded(self) -> HeldRow:
        """The memory of the engine that left does not come back: nothing is started."""
        return self._held("M1", "memory does not come back", ("M1", "leave"), 0)

    def crash_loop(self) -> HeldRow:
        """An engine that dies soon after each start."""
        what = "dies soon after each start"
        # The first of the deaths is that of the engine that was there.
        return self._held("M2", what, ("M2",), _BREAKER_DEATHS - 1)

    def slow_teardown(self) -> HeldRow:
        """An engine that leaves in order takes its time; nobody kills it."""
        self.stack.wait_for_ready(2)
        victim = self._victim()
        pid, before = int(victim["snapshot"]["pid"]), self.generation
        self._say("M3", "leave")
        began_s = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(self._ask)
            self._until(lambda: not lives(pid), "the engine does not leave")
            took_s = time.monotonic() - began_s
            good, total = asking.result()
        self._unsay("M3", "leave")
        self.stack.wait_for_ready(2, without=frozenset({victim["replica_id"]}))
        left = self._victim()["snapshot"]["predecessor"]
        complaints = [f"it was gone after {took_s:.1f} s"] if took_s < _TEARDOWN_S else []
        complaints += [f"it did not leave in order: {left}"] if left else []
        return HeldRow(
            name="M3",
            what=f"leaving takes {_TEARDOWN_S:.0f} s",
            starts=self.generation - before,
            most_starts=1,
            good=good,
            total=total,
            said=f"gone by itself after {took_s:.1f} s",
            complaints=tuple(complaints + self._lost(good, total)),
        )

    def _held(self, name: str, what: str, words: tuple[str, ...], most_starts: int) -> HeldRow:
        self.stack.wait_for_ready(2)
        before, said_s = self.generation, time.time()
        self._say(*words)
        incident: dict[str, Any] = {}
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(self._ask)
            self._until(lambda: self._hold_since(said_s, incident), f"{name}: the host is not held")
            held_at = self.generation
            # A trial start would be right only after the hold, which is longer.
            time.sleep(_LOOKED_AT_S)
            starts = self.generation - before
            good, total = asking.result()
        self._unsay(*words)
        self._release()
        self.stack.wait_for_ready(2)
        complaints = self._lost(good, total)
        if starts > most_starts:
            complaints.append(f"{starts} starts")
        if self.generation == held_at:
            complaints.append("it was not started after the release")
        return HeldRow(
            name=name,
            what=what,
            starts=starts,
            most_starts=most_starts,
            good=good,
            total=total,
            said=incident["evidence"][0].splitlines()[0][:150],
            complaints=tuple(complaints),
        )

    def _hold_since(self, said_s: float, found: dict[str, Any]) -> bool:
        for one in self.stack.get("/fleet/v1/incidents")["incidents"]:
            if one["cause"] == "host_held" and one["opened_s"] >= said_s:
                found.update(one)
        return bool(found)

    def _release(self) -> None:
        environ = {**os.environ, "HEADRACE_STATE_DIR": str(self.folder / "state")}
        command = [sys.executable, "-m", "headrace_deploy", "hosts", "release"]
        subprocess.run(
            [*command, self.stack.node.host], env=environ, check=True, capture_output=True
        )

    def _ask(self) -> tuple[int, int]:
        answers = [self.stack.stream(self.stack.body(STORY)) for _ in range(4)]
        return sum(one.whole and one.text == self.expected for one in answers), len(answers)

    def _victim(self) -> dict[str, Any]:
        [found] = [one for one in self.stack.ready() if one["snapshot"]["device"] == VICTIM]
        return found

    def _say(self, *words: str) -> None:
        for word in words:
            (self.folder / word).touch()

    def _unsay(self, *words: str) -> None:
        for word in words:
            (self.folder / word).unlink()

    @staticmethod
    def _lost(good: int, total: int) -> list[str]:
        return [] if good == total else [f"{total - good} requests lost or changed"]

    @staticmethod
    def _until(condition: Callable[[], bool], complaint: str) -> None:
        must_come_true(condition, complaint, patience_s=READY_S, every_s=0.2)


ROWS: Final[Mapping[str, Callable[[TroubledHost], HeldRow]]] = {
    "M3": TroubledHost.slow_teardown,
    "M1": TroubledHost.memory_stranded,
    "E5": TroubledHost.poisoned_from_birth,
    "M2": TroubledHost.crash_loop,
}
