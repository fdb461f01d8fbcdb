"""What the controller knows of each replica, and the one table of how a replica's state changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal

from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.fleet import (
    Incident,
    Notice,
    PoisonFound,
    ProbeResult,
    ReplicaSnapshot,
    ReplicaState,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve.fleet_records import Host, Pace, Place, is_open


class Trigger(StrEnum):
    """What can change a replica's state.

    proved: an exact canary. worked: real tokens, which prove life but not right answers.
    doubted: silence. distrusted: a fault or a wrong answer. ordered_out: a drain or a replacement
    that the budget allows. called_back: an operator ends a drain. leaving: the replica says that
    it stops. gone: it died or is no longer listed. listed_again: it was lost by mistake.
    restarted: another engine answers under its id.
    """

    PROVED = "proved"
    WORKED = "worked"
    DOUBTED = "doubted"
    DISTRUSTED = "distrusted"
    ORDERED_OUT = "ordered_out"
    CALLED_BACK = "called_back"
    LEAVING = "leaving"
    GONE = "gone"
    LISTED_AGAIN = "listed_again"
    RESTARTED = "restarted"


# A row for each trigger, a column for each state: the next state, `=` where the trigger changes
# nothing, `!` where it cannot happen.
_TABLE: Final = """
             starting  ready     suspect   suspended draining  stopping  lost
proved       ready     =         ready     ready     =         =         =
worked       ready     =         ready     =         =         =         =
doubted      =         suspect   =         =         =         =         =
distrusted   suspended suspended suspended =         =         =         =
ordered_out  draining  draining  draining  draining  !         !         !
called_back  !         !         !         !         suspended !         !
leaving      stopping  stopping  stopping  stopping  stopping  =         =
gone         lost      lost      lost      lost      lost      lost      =
listed_again !         !         !         !         !         !         starting
restarted    =         starting  starting  starting  starting  starting  starting
"""


def _transitions(table: str) -> dict[tuple[Trigger, ReplicaState], ReplicaState]:
    head, *rows = table.strip().splitlines()
    states = [ReplicaState(name) for name in head.split()]
    found: dict[tuple[Trigger, ReplicaState], ReplicaState] = {}
    for row in rows:
        trigger, *cells = row.split()
        for state, cell in zip(states, cells, strict=True):
            if cell != "!":
                found[Trigger(trigger), state] = state if cell == "=" else ReplicaState(cell)
    return found


TRANSITIONS: Final[Mapping[tuple[Trigger, ReplicaState], ReplicaState]] = _transitions(_TABLE)

# Probes run here and decide here; elsewhere the replica is on its way out.
WATCHED: Final = frozenset(
    {ReplicaState.STARTING, ReplicaState.READY, ReplicaState.SUSPECT, ReplicaState.SUSPENDED}
)
OUT_OF_ROTATION: Final = frozenset(ReplicaState) - {ReplicaState.READY, ReplicaState.SUSPECT}


class ImpossibleTransitionError(HeadraceError):
    """The controller's own code asked for a state change that cannot happen."""

    code = "impossible_transition"


class BrokenFleetStateError(HeadraceError):
    """The controller's state contradicts itself; only `check` raises it."""

    code = "broken_fleet_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentProbe:
    """A probe without a verdict yet.

    Attributes:
        engine_steps: As the snapshot said when it was sent, 0 without one.
        last_progress_s: As the snapshot said when it was sent, None without one.
        exact: Whether it asks for the known answer however busy the replica is.
    """

    sent_s: float
    deadline_s: float
    engine_steps: int
    last_progress_s: float | None
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A wish to take a replica out; the budget grants it.

    Attributes:
        granted_s: When the replica went out, None while the order waits.
        sent_s: When a replacement was last told to the replica.
        lasting: Whether it stands however many canaries pass: the engine had a fault whose next
            one may be its last.
    """

    kind: Literal["drain", "replace"]
    reason: str
    asked_s: float
    lasting: bool = False
    granted_s: float | None = None
    sent_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """All that the controller knows of one replica.

    Attributes:
        reason: Why it is in its state, for a person.
        since_s: When it came into its state.
        listed: Whether Ray Serve's last list named it.
        proved: Whether it was ever ready, and so took a lost one's place.
        heard_s: When its newest snapshot arrived, on the controller's clock.
        probe: The probe that is out, if any.
        next_probe_s: When the next one is due.
        next_exact_s: When the next known answer is due, whatever work proves meanwhile.
        backoff_s: Pause before the next one while it is not ready.
        failures: Failed canaries in a row.
        replaced: Whether a newcomer has taken its place.
        incident: The newest incident of which it is the culprit.
        storage_s: When it last said anything new of trouble with its files.
        pace: How fast it is used to be.
    """

    replica_id: str
    state: ReplicaState
    reason: str
    since_s: float
    next_probe_s: float
    next_exact_s: float
    backoff_s: float
    listed: bool = False
    proved: bool = False
    snapshot: ReplicaSnapshot | None = None
    heard_s: float | None = None
    probe: SentProbe | None = None
    failures: int = 0
    last_probe: ProbeResult | None = None
    order: Order | None = None
    replaced: bool = False
    incident: Incident | None = None
    storage_s: float | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def generation(self) -> int:
        """Its engine's generation, 0 until its first snapshot."""
        return 0 if self.snapshot is None else self.snapshot.generation

    @property
    def place(self) -> Place | None:
        """Host and device, None until its first snapshot."""
        return None if self.snapshot is None else (self.snapshot.host, self.snapshot.device)

    @property
    def out_by_choice(self) -> bool:
        """Whether an order keeps it out; a loss is no choice."""
        granted = self.order is not None and self.order.granted_s is not None
        return granted and self.state in (ReplicaState.DRAINING, ReplicaState.STOPPING)

    @property
    def leaves_as_ordered(self) -> bool:
        """Whether its end is the plan, so that it is no symptom."""
        return self.out_by_choice and self.order is not None and self.order.kind == "replace"

    @property
    def replacement_owed(self) -> bool:
        """Whether it must be replaced, however many canaries it passes meanwhile."""
        return self.order is not None and self.order.kind == "replace" and self.order.lasting

    @property
    def can_serve(self) -> bool:
        """Whether it may still answer rightly, as far as its canaries and its files tell."""
        return self.state in WATCHED and self.failures == 0 and not self.lost_its_files

    @property
    def lost_its_files(self) -> bool:
        """Whether its reads of experts fail, and will: it computes rightly, but not everything."""
        return self.snapshot is not None and self.snapshot.storage_lost

    def stale(self, at_s: float, settings: FleetSettings) -> bool:
        """Whether its snapshots stopped; one that never sent any is not judged by them."""
        return self.heard_s is not None and at_s - self.heard_s > settings.snapshot_stale_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The fleet as the controller knows it; `version` rises with each change.

    Attributes:
        hosts: Places where no engine is ready, as far as they told.
        inherited: By id, incidents that were open when this controller began, and whose replica it
            has not met.
        poison: By fingerprint, requests that are refused now.
        poison_incidents: The record of each of them.
        began_s: When this controller first learned anything; None before that.
        met_s: When it met its first replica; None before that.
    """

    version: int = 0
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    hosts: Mapping[Place, Host] = field(default_factory=dict)
    inherited: Mapping[str, Incident] = field(default_factory=dict)
    poison: Mapping[str, PoisonFound] = field(default_factory=dict)
    poison_incidents: Mapping[str, Incident] = field(default_factory=dict)
    began_s: float | None = None
    met_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a decision is made of, beside the state: the notice, its time and the settings."""

    notice: Notice
    settings: FleetSettings

    @property
    def at_s(self) -> float:
        """Wall-clock second of the notice."""
        return self.notice.at_s


def with_replica(state: FleetState, replica: Replica) -> FleetState:
    """The state with this replica's record in it; the same object when nothing differs."""
    if state.replicas.get(replica.replica_id) == replica:
        return state
    return replace(state, replicas={**state.replicas, replica.replica_id: replica})


def with_host(state: FleetState, host: Host) -> FleetState:
    """The state with this place's record in it; the same object when nothing differs."""
    place = (host.report.host, host.report.device)
    if state.hosts.get(place) == host:
        return state
    return replace(state, hosts={**state.hosts, place: host})


def moved(replica: Replica, trigger: Trigger, reason: str, moment: Moment) -> Replica:
    """The replica after a trigger: the only way in which a state changes.

    Raises:
        ImpossibleTransitionError: The table has no such transition.
    """
    to = TRANSITIONS.get((trigger, replica.state))
    if to is None:
        targets = sorted({TRANSITIONS[key] for key in TRANSITIONS if key[0] is trigger})
        raise ImpossibleTransitionError(
            f"replica {replica.replica_id} cannot go from {replica.state} to "
            f"{' or '.join(targets)} ({trigger}); it is {replica.state} since {replica.since_s} "
            f"because {replica.reason!r}, and this came: {moment.notice}"
        )
    if to is replica.state:
        return replica
    return replace(
        replica,
        state=to,
        reason=reason,
        since_s=moment.at_s,
        # A replica that lost its standing is asked at once, and then less and less often.
        next_probe_s=moment.at_s,
        backoff_s=first_backoff_s(moment.settings),
        probe=None if to is ReplicaState.LOST else replica.probe,
        order=_order_kept(replica.order, to),
        replaced=replica.replaced and to not in WATCHED,
    )


def _order_kept(order: Order | None, to: ReplicaState) -> Order | None:
    """Orders wait while a replica is watched, and stand once it is out."""
    if order is None or (order.granted_s is None) != (to in WATCHED):
        return None
    return order


def first_backoff_s(settings: FleetSettings) -> float:
    """Seconds between the first two probes of a replica that is not ready."""
    return min(0.5, settings.probe_period_s)


def check(state: FleetState) -> None:
    """Look for contradictions.

    Raises:
        BrokenFleetStateError: Names the replica and the law that it breaks.
    """
    for name, replica in state.replicas.items():
        laws = {
            "is filed under its own id": name == replica.replica_id,
            "took its place when ready": replica.state is not ReplicaState.READY or replica.proved,
            "has no open incident when ready, unless it is to be replaced": not (
                replica.state is ReplicaState.READY and is_open(replica.incident)
            )
            or replica.replacement_owed,
            "is slow only while watched": not is_open(replica.pace.incident)
            or replica.state in WATCHED,
            "is not probed when lost": replica.state is not ReplicaState.LOST
            or replica.probe is None,
            "drains by an order only": replica.state is not ReplicaState.DRAINING
            or replica.out_by_choice,
            "has no granted order while watched": replica.state not in WATCHED
            or replica.order is None
            or replica.order.granted_s is None,
            "waits for an order only while watched": replica.state in WATCHED
            or replica.order is None
            or replica.order.granted_s is not None,
            "is replaced only on its way out": replica.state not in WATCHED or not replica.replaced,
            "counts failures from 0": replica.failures >= 0,
        }
        for law, holds in laws.items():
            if not holds:
                raise BrokenFleetStateError(f"replica {name} breaks the law: it {law}; {replica}")
    for place, host in state.hosts.items():
        if place != (host.report.host, host.report.device):
            raise BrokenFleetStateError(f"host {place} is filed under another's name: {host}")
    if state.poison.keys() != state.poison_incidents.keys():
        raise BrokenFleetStateError(f"requests are refused without a record: {state.poison}")
