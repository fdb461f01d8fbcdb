"""Rows of `make faults` that are more than one fault in one engine.

A long prefill and a slow engine that must not be killed, the end of the controller, and the
published timeline of a box that was refused by Metal for hours, in a minute.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import psutil

from tests.e2e.fault_scenarios import NEIGHBOUR, Scenario
from tests.e2e.faulty_fleet import ENGINES, STREAMS, FaultyFleet, Row, first_sign_s, judged, lives
from tests.support.stack import StreamedAnswer

LONG_PREFILL: Final = Scenario(
    name="H3",
    what="a prefill that takes long and progresses",
    # A call for each chunk of the prompt, and then the engine is as fast as ever.
    faults=({"kind": "slow_device", "delay_s": 2.5, "times": 15},),
    fate="stays",
    causes=("-",),
    pause_s=60.0,
    exit_s=120.0,
    moves=False,
)
SLOW: Final = Scenario(
    name="S1",
    what="tokens at a tenth of the usual rate, no error",
    faults=({"kind": "slow_device", "delay_s": 0.15},),
    fate="stays",
    causes=("replica_slow",),
    pause_s=60.0,
    exit_s=90.0,
    detect_s=60.0,
    moves=False,
)
CONTROLLER: Final = Scenario(
    name="C1",
    what="the controller is killed",
    faults=(),
    fate="stays",
    causes=("-",),
    exit_s=10.0,
    moves=False,
)
CONTROLLER_AND_ENGINE: Final = Scenario(
    name="C2",
    what="the controller and one engine are killed at once",
    faults=(),
    fate="exits",
    causes=("replica_died", "replica_stalled", "-"),
    exit_s=10.0,
    detect_s=10.0,
)
TIMELINE: Final = Scenario(
    name="T2",
    what="six Timeouts, two tip into Ignored, a foreign process",
    faults=({"kind": "device_error", "error": "timeout", "times": 1},),
    fate="replaced",
    evidence=(NEIGHBOUR,),
    exit_s=10.0,
)
TIPPING: Final = Scenario(
    name="T2x",
    what="the same, and Ignored at once",
    faults=(
        {"kind": "device_error", "error": "timeout", "times": 1},
        {"kind": "device_error", "error": "submissions_ignored", "from_call": 2},
    ),
    fate="exits",
    causes=("metal_fault", "replica_died", "engine_fault", "replica_stalled"),
    exit_s=10.0,
)

EVENTS: Final = (LONG_PREFILL, SLOW, CONTROLLER, CONTROLLER_AND_ENGINE, TIMELINE, TIPPING)
PLAYED: Final = ("H3", "S1", "C1", "C2", "T2")
"""Those that are rows of their own."""


def play_event(fleet: FaultyFleet, name: str) -> Row:
    """Let one event happen."""
    rows: Mapping[str, Callable[[FaultyFleet], Row]] = {
        "H3": long_prefill,
        "S1": slow_engine,
        "C1": controller_killed,
        "C2": controller_and_engine_killed,
        "T2": timeline,
    }
    fleet.stack.wait_for_ready(ENGINES)
    return rows[name](fleet)


def long_prefill(fleet: FaultyFleet) -> Row:
    """A long prompt on an engine whose every chunk takes seconds; nobody loses patience."""
    victim = fleet.stack.ready()[0]
    lines = "".join(f"Item {n}: the quick brown fox number {n}. " for n in range(90))
    said = time.time()
    word = fleet.let_loose(LONG_PREFILL, victim)
    body = {**fleet.body(0), "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": f"{lines} Summarize the list."}]
    with ThreadPoolExecutor(ENGINES) as pool:
        # One for each engine: the slow one gets its share before it is known to be slow.
        answers = list(pool.map(fleet.stack.stream, [body] * ENGINES))
    word.unlink()
    good = sum(one.whole for one in answers)
    return _row(fleet, LONG_PREFILL, victim, answers, said, good=good, moved_is_bad=True)


def slow_engine(fleet: FaultyFleet) -> Row:
    """Streams go on while one engine is slow; it is routed less, and an incident says why."""
    victim = fleet.stack.ready()[0]
    with _constant_load(fleet) as answers:
        # Its own usual rate must be known.
        fleet.until(lambda: len(answers()) > 2 * STREAMS, "the load does not run")
        said = time.time()
        word = fleet.let_loose(SLOW, victim)
        fleet.until(
            lambda: any(
                one["cause"] == "replica_slow"
                for one in fleet.incidents_of(str(victim["replica_id"]), said)
            ),
            "a slow engine is no incident",
        )
        word.unlink()
    done = answers()
    good = sum(one.whole and one.text == fleet.expected[number] for number, one in done)
    return _row(fleet, SLOW, victim, [one for _, one in done], said, good=good)


def controller_killed(fleet: FaultyFleet) -> Row:
    """Serving goes on; the next controller learns the states and replaces nobody."""
    return _without_controller(fleet, CONTROLLER, engine_too=False)


def controller_and_engine_killed(fleet: FaultyFleet) -> Row:
    """The engine is replaced although nobody watched its end."""
    return _without_controller(fleet, CONTROLLER_AND_ENGINE, engine_too=True)


def _without_controller(fleet: FaultyFleet, event: Scenario, *, engine_too: bool) -> Row:
    controller = _controller_pid(fleet)
    with _streams(fleet) as pending:
        victim = fleet.busiest()
        said = time.time()
        os.kill(controller, signal.SIGKILL)
        if engine_too:
            fleet.stack.signal_replica(victim, signal.SIGKILL)
    answers = [future.result() for future in pending]
    fleet.until(lambda: _controller_pid(fleet) not in (0, controller), "no controller came back")
    good = sum(
        one.whole and one.text == right for one, right in zip(answers, fleet.expected, strict=True)
    )
    return _row(fleet, event, victim, answers, said, good=good)


def timeline(fleet: FaultyFleet) -> Row:
    """Six faults one after the other; the last that tipped decides what the row says."""
    rows = [fleet.play(TIPPING if number in (2, 5) else TIMELINE) for number in range(6)]
    first = next(row for row in rows if row.scenario is TIMELINE)
    return Row(
        scenario=TIMELINE,
        good=sum(row.good for row in rows),
        total=sum(row.total for row in rows),
        moved=sum(row.moved for row in rows),
        pause_s=max(row.pause_s for row in rows),
        detect_s=max(row.detect_s or 0.0 for row in rows),
        settled_s=max(row.settled_s for row in rows),
        cause=first.cause,
        complaints=tuple(one for row in rows for one in row.complaints),
    )


@contextmanager
def _streams(fleet: FaultyFleet) -> Iterator[list["Future[StreamedAnswer]"]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        yield [pool.submit(fleet.stack.stream, fleet.body(number)) for number in range(STREAMS)]


@contextmanager
def _constant_load(
    fleet: FaultyFleet,
) -> Iterator[Callable[[], list[tuple[int, StreamedAnswer]]]]:
    """A stream under way in each of three clients; tells what they got so far."""
    done: list[tuple[int, StreamedAnswer]] = []
    ends = threading.Event()

    def ask_on(number: int) -> None:
        while not ends.is_set():
            done.append((number, fleet.stack.stream(fleet.body(number))))

    clients = [threading.Thread(target=ask_on, args=(number,)) for number in range(ENGINES)]
    for client in clients:
        client.start()
    try:
        yield lambda: list(done)
    finally:
        ends.set()
        for client in clients:
            client.join()


def _controller_pid(fleet: FaultyFleet) -> int:
    """The process of the fleet's controller; 0 while there is none."""
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if "FleetController" in title and fleet.stack.node.owns(process.pid):
            return int(process.pid)
    return 0


def _row(
    fleet: FaultyFleet,
    event: Scenario,
    victim: Mapping[str, Any],
    answers: Sequence[StreamedAnswer],
    said: float,
    *,
    good: int,
    moved_is_bad: bool = False,
) -> Row:
    name, pid = str(victim["replica_id"]), int(victim["snapshot"]["pid"])
    if event.fate == "stays":
        fleet.stack.wait_for_ready(ENGINES)
    else:
        fleet.stack.wait_for_ready(ENGINES, without=frozenset({name}))
    settled_s = time.time() - said
    incident = next(iter(fleet.incidents_of(name, said)), None)
    moved = sum(one.attempts > 1 for one in answers)
    complaints: list[str] = []
    if event.fate == "stays" and not lives(pid):
        complaints.append("it was killed")
    if moved_is_bad and moved:
        complaints.append("a request gave up on it")
    row = Row(
        scenario=event,
        good=good,
        total=len(answers),
        moved=moved,
        pause_s=max((one.worst_gap_s for one in answers), default=0.0),
        detect_s=None if incident is None else (first_sign_s(incident, said) or said) - said,
        settled_s=settled_s,
        cause="-" if incident is None else incident["cause"],
        complaints=tuple(complaints),
    )
    return judged(row, incident, lost_healthy=0)
