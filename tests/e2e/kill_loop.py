"""`make kill-loop`: mixed faults, one after the other, under constant load on three engines.

Every few seconds another engine gets another fault, drawn from a seed; a request is always under
way in each of several clients, and its text is known. Ends with how many faults and requests there
were, how many of these were lost (none may be), the law that every admitted request has exactly one
end, how long the fleet needed to be whole again, and what its memory did.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import httpx
import psutil

from tests.e2e.fault_scenarios import SCENARIOS, Scenario
from tests.e2e.faulty_fleet import ENGINES, STREAMS, FaultyFleet

_PAUSE_S: Final = 1.0
_CLIENTS: Final = 4
# A loop finds what happens again and again: more than a tenth is growth, not noise.
_GROWTH: Final = 1.10


@dataclass(slots=True)
class Tally:
    """What became of the requests.

    Attributes:
        admitted: Requests that were sent and not refused.
        completed: Those that ended whole with the right text.
        failed: Those that ended with an error.
        changed: Those that ended whole with another text, or were cut: a lie to the client.
        refused: Requests that were told to come again (503).
        moved: Completed ones that needed more than one engine.
        worst_pause_s: Longest pause of a client.
        complaints: The first few of those that were not completed.
    """

    admitted: int = 0
    completed: int = 0
    failed: int = 0
    changed: int = 0
    refused: int = 0
    moved: int = 0
    worst_pause_s: float = 0.0
    complaints: list[str] = field(default_factory=list)


class Load:
    """Clients that always have a request under way.

    Args:
        fleet: Whom they ask.
    """

    def __init__(self, fleet: FaultyFleet) -> None:
        self._fleet = fleet
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self.tally = Tally()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The clients ask until the end of the block, and end what they have begun."""
        clients = [
            threading.Thread(target=self._ask_on, args=(number,)) for number in range(_CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._ends.set()
            for client in clients:
                client.join()

    def _ask_on(self, number: int) -> None:
        while not self._ends.is_set():
            self._ask(number % STREAMS)
            number += 1

    def _ask(self, number: int) -> None:
        try:
            answer = self._fleet.stack.stream(self._fleet.body(number))
        except httpx.HTTPStatusError as error:
            with self._lock:
                if error.response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    self.tally.refused += 1
                    return
                self._count_failure(f"{error.response.status_code}: {error.response.text}")
            return
        except httpx.HTTPError as error:
            with self._lock:
                self._count_failure(repr(error))
            return
        with self._lock:
            tally = self.tally
            if answer.error is not None:
                self._count_failure(str(dict(answer.error)))
                return
            tally.admitted += 1
            tally.worst_pause_s = max(tally.worst_pause_s, answer.worst_gap_s)
            if answer.whole and answer.text == self._fleet.expected[number]:
                tally.completed += 1
                tally.moved += answer.attempts > 1
            else:
                tally.changed += 1
                tally.complaints.append(f"stream {number}: {answer.text[-80:]!r}")

    def _count_failure(self, what: str) -> None:
        self.tally.admitted += 1
        self.tally.failed += 1
        self.tally.complaints.append(what[:300])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and how long the fleet was not whole.

    Attributes:
        name: The scenario.
        seconds: From the fault until all engines were ready again.
    """

    name: str
    seconds: float


def strike_on(fleet: FaultyFleet, minutes: float, seed: int) -> Iterator[Recovery]:
    """Faults one after the other until the time is over."""
    draws = random.Random(seed)  # noqa: S311  which fault comes next is no secret
    chosen = [one for one in SCENARIOS if not one.idle]
    give_up_s = time.monotonic() + 60 * minutes
    while time.monotonic() < give_up_s:
        scenario = draws.choice(chosen)
        victim = draws.choice(fleet.stack.ready())
        began_s = time.monotonic()
        fleet.let_loose(scenario, victim)
        _until_it_struck(fleet, scenario, victim)
        fleet.stack.wait_for_ready(
            ENGINES,
            without=frozenset() if scenario.fate == "stays" else frozenset({victim["replica_id"]}),
        )
        yield Recovery(name=scenario.name, seconds=time.monotonic() - began_s)
        time.sleep(_PAUSE_S)  # the load goes on meanwhile


def _until_it_struck(fleet: FaultyFleet, scenario: Scenario, victim: dict[str, Any]) -> None:
    """Wait until the fleet knows; an engine without work meets its fault in the next probe."""
    name, said = str(victim["replica_id"]), time.time()
    fleet.until(lambda: bool(fleet.incidents_of(name, said)), f"{scenario.name} never struck")


def memory_bytes(fleet: FaultyFleet) -> int:
    """Resident memory of the fleet's processes that stay: gateway, controller, Ray."""
    engines = {int(one["snapshot"]["pid"]) for one in fleet.stack.ready()}
    total = 0
    for process in psutil.process_iter(["memory_info"]):
        if process.pid not in engines and fleet.stack.node.owns(process.pid):
            total += process.info["memory_info"].rss
    return total


def main() -> int:
    """Run the loop; 0 when nothing was lost, nothing was changed and memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    minutes = float(os.environ.get("KILL_LOOP_MINUTES", "30"))
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    recoveries: list[Recovery] = []
    with (
        tempfile.TemporaryDirectory(prefix="headrace-kill-loop-") as folder,
        FaultyFleet.running(Path(folder), SCENARIOS) as fleet,
    ):
        load = Load(fleet)
        before = 0
        with load.running():
            for recovery in strike_on(fleet, options.minutes, options.seed):
                recoveries.append(recovery)
                # The first fault loads code that stays.
                before = before or memory_bytes(fleet)
                print(f"{recovery.name:4} whole again after {recovery.seconds:6.2f} s", flush=True)
            fleet.stack.wait_for_ready(ENGINES)
        after = memory_bytes(fleet)
    return report(recoveries, load.tally, before=before, after=after)


def report(recoveries: list[Recovery], tally: Tally, *, before: int, after: int) -> int:
    """Print what it came to; the exit status."""
    seconds = [one.seconds for one in recoveries]
    cuts = quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
    holds = tally.admitted == tally.completed + tally.failed + tally.changed
    growth = after / before
    for complaint in tally.complaints[:5]:
        print(f"not completed: {complaint}")
    print(
        f"{len(recoveries)} faults, {tally.admitted} requests admitted = {tally.completed} "
        f"completed + {tally.failed} failed + {tally.changed} changed or cut; {tally.refused} told "
        f"to come again, {tally.moved} moved, longest pause {tally.worst_pause_s:.2f} s"
    )
    print(f"whole again after {cuts[49]:.1f} s (p50), {cuts[98]:.1f} s (p99)")
    print(f"memory of what stays: {after / 2**20:.0f} MiB, {growth:.2f} of that after one fault")
    return 0 if holds and not (tally.failed or tally.changed) and growth < _GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
