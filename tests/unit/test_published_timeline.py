"""A published outage in virtual time: timeouts over hours, a driver that tips over, a neighbour.

The box of the report had six timeouts, 36 to 85 minutes apart, two of which tipped into a driver
that ignored its process; another program used the GPU all the while. Its server then said for
hours that it was well. Here three hosts suffer it, the decisions are those of production, and only
the engines and the clock are played.
"""

from dataclasses import dataclass, field
from typing import Final

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.contract.fleet import Cause, ReplicaState
from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.faults import FaultAnswer, FaultWindow, decide
from headrace_replicas.start_gate import Ending, PastStart, Start, Wait, decide_start
from tests.support.fault_texts import FAULT_TEXTS
from tests.support.fleet import Fleet, told_to_leave

TIMEOUT: Final = FAULT_TEXTS[0][0]
IGNORED: Final = next(text for text, kind in FAULT_TEXTS if kind is FaultKind.SUBMISSIONS_IGNORED)
NEIGHBOUR: Final = "Final Cut Pro (pid 533) used 61 % of the GPU in the last 5 s"
MINUTES_BETWEEN: Final = (0, 36, 85, 41, 52, 63)
TIPS: Final = frozenset({2, 5})
LOAD_S: Final = 90.0
SETTINGS: Final = FaultSettings()


@dataclass
class Host:
    """One host's side: its faults, its starts, and how long it was without an engine.

    Attributes:
        name: Of its present engine.
    """

    name: str
    window: FaultWindow = field(default_factory=FaultWindow)
    starts: list[PastStart] = field(default_factory=list)
    outages_s: list[float] = field(default_factory=list)

    @property
    def generation(self) -> int:
        return len(self.starts)

    def started(self, at_s: float) -> None:
        self.starts.append(
            PastStart(generation=len(self.starts) + 1, at_s=at_s, pid=1, boot_id="boot")
        )

    def ended(self, kind: FaultKind | None, at_s: float) -> None:
        last = self.starts[-1]
        ending = Ending(at_s=at_s, kind=kind, worked=True, lived_s=at_s - last.at_s)
        self.starts[-1] = PastStart(
            generation=last.generation,
            at_s=last.at_s,
            pid=last.pid,
            boot_id=last.boot_id,
            ending=ending,
        )

    def earliest_start_s(self, now_s: float) -> float:
        """When the gate lets the next engine in, asked again after each wait."""
        while True:
            decision = decide_start(
                self.starts, now_s=now_s, boot_id="boot", settings=SETTINGS, draw=0.5
            )
            if isinstance(decision, Start):
                return now_s
            assert isinstance(decision, Wait), decision
            now_s = decision.until_s


def test_six_timeouts_two_of_which_tip_over_cost_bounded_outages_and_name_the_neighbour() -> None:
    fleet_ = Fleet()
    hosts = [Host(name) for name in ("a1", "b1", "c1")]
    for host in hosts:
        host.started(fleet_.now_s)
    fleet_.members(*(host.name for host in hosts))
    for host in hosts:
        fleet_.says(host.name, **place(host))
        fleet_.answer(host.name)
    calls_after_terminal = 0
    for number, minutes in enumerate(MINUTES_BETWEEN):
        fleet_.now_s += 60.0 * minutes
        for one in hosts:
            fleet_.says(one.name, **place(one))
        host = hosts[number % len(hosts)]
        calls_after_terminal += suffer(fleet_, hosts, host, tips=number in TIPS)
    assert calls_after_terminal == 0
    outages = [outage_s for host in hosts for outage_s in host.outages_s]
    assert len(outages) == len(MINUTES_BETWEEN)
    # An orderly replacement costs its load; after a death comes the shortest pause as well.
    assert max(outages) <= LOAD_S + SETTINGS.back_off_s
    assert len(fleet_.incidents) == len(MINUTES_BETWEEN)
    for incident in fleet_.incidents.values():
        assert incident.cause is Cause.METAL_FAULT
        assert NEIGHBOUR in " ".join(incident.evidence)
        assert incident.closed_s is not None


def suffer(fleet_: Fleet, hosts: list[Host], host: Host, *, tips: bool) -> int:
    """One fault, to the end of its incident; calls to the device after a terminal one."""
    began_s, old = fleet_.now_s, host.name
    host.window = host.window.with_fault(FaultKind.TIMEOUT, began_s)
    answer = decide(FaultKind.TIMEOUT, host.window, at_s=began_s, timeouts_replace=True)
    assert answer is FaultAnswer.REPLACE
    told = told_to_leave(fleet_.says(old, **fault(host, TIMEOUT, answer)))
    told += told_to_leave(fleet_.tick(0.2))
    assert told == [old]
    assert serving(fleet_) == {one.name for one in hosts} - {old}
    after_terminal = 0
    if tips:
        host.window = host.window.with_fault(FaultKind.SUBMISSIONS_IGNORED, fleet_.now_s)
        ending = decide(
            FaultKind.SUBMISSIONS_IGNORED, host.window, at_s=fleet_.now_s, timeouts_replace=True
        )
        after_terminal += ending is not FaultAnswer.EXIT
        fleet_.lose_attempt(old, "died")
    host.ended(FaultKind.SUBMISSIONS_IGNORED if tips else None, fleet_.now_s)
    others = [one.name for one in hosts if one is not host]
    fleet_.members(*others)
    fleet_.now_s = host.earliest_start_s(fleet_.now_s)
    host.started(fleet_.now_s)
    host.name = f"{old[0]}{host.generation}"
    fleet_.now_s += LOAD_S
    words = f"submissions_ignored: RuntimeError: {IGNORED} (exit status 70)" if tips else ""
    fleet_.members(*others, host.name)
    fleet_.says(
        host.name,
        **place(host),
        predecessor=words,
        predecessor_generation=host.generation - 1,
    )
    fleet_.answer(host.name, generation=host.generation)
    assert fleet_.state_of(host.name) is ReplicaState.READY
    host.outages_s.append(fleet_.now_s - began_s)
    return after_terminal


def place(host: Host) -> dict[str, object]:
    """Where an engine runs, as its snapshots say."""
    return {"generation": host.generation, "host": f"host-{host.name[0]}"}


def fault(host: Host, text: str, answer: FaultAnswer) -> dict[str, object]:
    """What an engine's snapshot says of its first fault."""
    return {
        **place(host),
        "faults": 1,
        "fault_kind": "timeout",
        "fault_text": text,
        "fault_answer": answer,
        "neighbours": NEIGHBOUR,
    }


def serving(fleet_: Fleet) -> set[str]:
    """Who gets work."""
    return {
        name
        for name, replica in fleet_.state.replicas.items()
        if replica.state is ReplicaState.READY
    }
