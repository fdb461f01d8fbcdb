"""The controller's decisions: notices in, the next state and the effects out.

How a replica's state may change is one table, at the head of `fleet_state`. Here each notice is
taken to the replica that it speaks of; then the whole fleet is settled (probes that are due,
orders that the budget allows, places that were taken), and the effects are what differs between
the records before and after.

Laws: `step` never raises, whatever comes and in whatever order; the version rises by one with
each change, and no change gives the same object back; a replica and generation has at most one
open incident, and one of slowness beside it; an incident is closed once its place was taken, or its
culprit passed a probe, can read its files, and need not be replaced.
"""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import (
    AttemptFailed,
    Cause,
    DrainOrdered,
    Effect,
    FleetView,
    HostReported,
    Incident,
    MembersSeen,
    Notice,
    PoisonFound,
    ProbeFinished,
    ProbeUnanswered,
    ReplaceReplica,
    ReplicaState,
    ReplicaStatus,
    RequestMoved,
    SendProbe,
    SnapshotSeen,
    Tick,
    WriteIncident,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve import fleet_faults as faults
from headrace_serve import fleet_hosts as hosts
from headrace_serve import fleet_inherited as inherited
from headrace_serve import fleet_orders as orders
from headrace_serve import fleet_pace as pace
from headrace_serve import fleet_poison as poison
from headrace_serve import fleet_probes as probes
from headrace_serve import fleet_storage as storage
from headrace_serve import fleet_symptoms as symptoms
from headrace_serve.fleet_inherited import begin
from headrace_serve.fleet_state import (
    OUT_OF_ROTATION,
    WATCHED,
    FleetState,
    Moment,
    Replica,
    Trigger,
    check,
    moved,
    with_replica,
)

__all__ = ["FleetState", "begin", "check", "step", "view"]

# Who is met so soon after the first was there before this controller was: of the faults that it
# tells at first, another controller has heard.
_FOUND_S: Final = 10.0

# What a lost attempt says of its replica: the incident's cause, what the state does, and why.
_LOST_ATTEMPTS: Final = {
    "died": (Cause.REPLICA_DIED, Trigger.GONE, "it died under an attempt"),
    "stalled": (Cause.REPLICA_STALLED, Trigger.DOUBTED, "an attempt on it stalled"),
    "ended_early": (Cause.STREAM_ENDED_EARLY, Trigger.DISTRUSTED, "an attempt ended early"),
    "faulted": (Cause.ENGINE_FAULT, Trigger.DISTRUSTED, "its engine failed under an attempt"),
    "unreadable": (Cause.STORAGE_FAULT, Trigger.DOUBTED, "it could not read an expert"),
    "mismatch": (Cause.WEIGHTS_MISMATCH, Trigger.DISTRUSTED, "its model differs"),
}


def step(
    state: FleetState, notice: Notice, settings: FleetSettings
) -> tuple[FleetState, tuple[Effect, ...]]:
    """Take one notice.

    Notices are stamped on arrival at the controller or close to it; a stamp that goes back a
    little changes nothing but the length of the pauses counted from it.
    """
    moment = Moment(notice=notice, settings=settings)
    after = _heard(state, moment)
    if not _only_figures(state, after, notice):
        after = _settled(after, moment)
    if after is state:
        return state, ()
    began_s = moment.at_s if after.began_s is None else after.began_s
    after = replace(after, version=state.version + 1, began_s=began_s)
    return after, _effects_between(state, after)


def view(state: FleetState, at_s: float) -> FleetView:
    """The board for gateways and people, replicas sorted by id."""
    statuses = tuple(
        ReplicaStatus(
            replica_id=replica.replica_id,
            generation=replica.generation,
            state=replica.state,
            reason=replica.reason + orders.owed_note(replica),
            since_s=replica.since_s,
            last_probe=replica.last_probe,
            snapshot=replica.snapshot,
        )
        for _, replica in sorted(state.replicas.items())
    )
    return FleetView(
        version=state.version,
        at_s=at_s,
        replicas=statuses,
        hosts=hosts.shown(state),
        poison=tuple(found for _, found in sorted(state.poison.items())),
        ready_in_s=hosts.ready_in_s(state, at_s),
    )


def _heard(state: FleetState, moment: Moment) -> FleetState:
    match moment.notice:
        case MembersSeen() as notice:
            return _members(state, notice, moment)
        case SnapshotSeen() as notice:
            return _snapshot(state, notice, moment)
        case HostReported() as notice:
            return hosts.reported(faults.last_words(state, notice, moment), notice, moment)
        case PoisonFound() as notice:
            return poison.found(state, notice)
        case Tick():
            return _ticked(state, moment)
        case _ as notice:
            return _told(state, notice, moment)


_OfOneReplica = ProbeFinished | ProbeUnanswered | AttemptFailed | DrainOrdered | RequestMoved


def _whose(notice: _OfOneReplica) -> str:
    match notice:
        case ProbeFinished(result=result):
            return result.replica_id
        case RequestMoved(from_replica=name):
            return name
        case ProbeUnanswered() | AttemptFailed() | DrainOrdered():
            return notice.replica_id


def _told(state: FleetState, notice: _OfOneReplica, moment: Moment) -> FleetState:
    name = _whose(notice)
    replica = state.replicas.get(name)
    if replica is None:
        if not (isinstance(notice, AttemptFailed) and notice.failure == "died"):
            return state
        # A controller that has just started may hear of a death before it has seen the fleet. All
        # other troubles will show again when it has.
        state, replica = _met(state, name, moment)
    match notice:
        case ProbeFinished(result=result):
            changed = probes.judge(replica, result, moment)
        case ProbeUnanswered():
            changed = probes.unanswered(replica, notice, moment)
        case AttemptFailed():
            changed = _attempt_failed(replica, notice, moment)
        case DrainOrdered(drain=True):
            changed = orders.order_drain(replica, moment)
        case DrainOrdered():
            changed = orders.end_drain(replica, moment)
        case RequestMoved():
            changed = symptoms.request_moved(replica, notice)
    return with_replica(state, changed)


def _met(state: FleetState, name: str, moment: Moment) -> tuple[FleetState, Replica]:
    """The state and a replica that is heard of for the first time."""
    if state.met_s is None:
        state = replace(state, met_s=moment.at_s)
    return inherited.take_up(state, probes.newborn(name, moment))


def _attempt_failed(replica: Replica, notice: AttemptFailed, moment: Moment) -> Replica:
    cause, trigger, why = _LOST_ATTEMPTS[notice.failure]
    text = (
        f"request {notice.request_id}, attempt {notice.attempt}, {notice.failure} after "
        f"{notice.delivered_tokens} tokens and {notice.silence_s:.2f} s of silence: "
        f"{notice.raw_text}"
    )
    replica = symptoms.symptom(replica, cause, text, moment)
    return moved(replica, trigger, why, moment)


def _members(state: FleetState, notice: MembersSeen, moment: Moment) -> FleetState:
    for name in sorted(notice.replica_ids):
        replica = state.replicas.get(name)
        if replica is None:
            state, replica = _met(state, name, moment)
            listed = replace(replica, listed=True)
        else:
            listed = _listed(replica, moment)
        state = with_replica(state, listed)
    for name in sorted(state.replicas.keys() - notice.replica_ids):
        state = with_replica(state, _unlisted(state.replicas[name], moment))
    return state


def _listed(replica: Replica, moment: Moment) -> Replica:
    if replica.state is not ReplicaState.LOST:
        return replace(replica, listed=True)
    # Its last words may arrive a little after its death; later snapshots come from the living.
    heard_s = replica.since_s if replica.heard_s is None else replica.heard_s
    speaks = heard_s - replica.since_s > moment.settings.snapshot_stale_s
    if replica.listed and not speaks:
        return replica
    return probes.came_back(replica, moment)


def _unlisted(replica: Replica, moment: Moment) -> Replica:
    if not replica.listed and not replica.stale(moment.at_s, moment.settings):
        # Its snapshot came before Ray Serve's list did.
        return replica
    if replica.listed and replica.state is not ReplicaState.DRAINING:
        text = f"Ray Serve lists it no more; it was {replica.state}: {replica.reason}"
        replica = symptoms.symptom(replica, Cause.REPLICA_DIED, text, moment)
    gone = moved(replica, Trigger.GONE, "Ray Serve lists it no more", moment)
    return replace(gone, listed=False)


def _snapshot(state: FleetState, notice: SnapshotSeen, moment: Moment) -> FleetState:
    snapshot = notice.snapshot
    replica = state.replicas.get(snapshot.replica_id)
    if replica is None:
        state, replica = _met(state, snapshot.replica_id, moment)
    before = replica.snapshot
    if before is not None:
        if (snapshot.generation, snapshot.sequence) <= (before.generation, before.sequence):
            return state
        if snapshot.generation > before.generation:
            replica = probes.restarted(replica, moment)
        elif replica.stale(moment.at_s, moment.settings) and replica.state in WATCHED:
            replica = replace(replica, next_probe_s=moment.at_s)
    replica = replace(replica, snapshot=snapshot, heard_s=moment.at_s)
    replica = storage.heard(replica, before, moment)
    is_old = state.met_s is not None and moment.at_s - state.met_s < _FOUND_S
    replica = faults.heard(replica, before, moment, is_old=is_old)
    if before is None or before.generation != snapshot.generation:
        state = faults.last_words(state, snapshot, moment)
    replica = pace.heard(replica, before, moment)
    if snapshot.state is ReplicaState.STOPPING:
        replica = _leaves(replica, moment)
    elif before is not None and before.generation == snapshot.generation:
        replica = probes.credit_work(replica, before, moment)
    return with_replica(state, replica)


def _leaves(replica: Replica, moment: Moment) -> Replica:
    """A replica that leaves unasked does so because its engine ended or its own canary failed."""
    if replica.state in WATCHED:
        text = "the replica says that it leaves, and nobody told it to"
        replica = symptoms.symptom(replica, Cause.ENGINE_FAULT, text, moment)
    return moved(replica, Trigger.LEAVING, "it says that it leaves", moment)


def _ticked(state: FleetState, moment: Moment) -> FleetState:
    for replica in tuple(state.replicas.values()):
        ticked = orders.repeat_order(probes.went_silent(replica, moment), moment)
        if ticked is not replica:
            state = with_replica(state, ticked)
    return orders.forget_lost(poison.expired(state, moment), moment)


def _only_figures(state: FleetState, after: FleetState, notice: Notice) -> bool:
    """Whether a snapshot changed nothing that the rest of the fleet could depend on.

    Snapshots are the bulk of all notices: settling a fleet of a thousand after each of them
    would cost more than everything else together.
    """
    if not isinstance(notice, SnapshotSeen):
        return False
    old = state.replicas.get(notice.snapshot.replica_id)
    new = after.replicas[notice.snapshot.replica_id]
    if old is not None and old.next_exact_s != new.next_exact_s:
        return False
    return old is not None and (old.state, old.order, old.incident) == (
        new.state,
        new.order,
        new.incident,
    )


def _settled(state: FleetState, moment: Moment) -> FleetState:
    state = orders.grant_orders(orders.fill_places(state, moment), moment)
    ready = any(r.state is ReplicaState.READY for r in state.replicas.values())
    for replica in tuple(state.replicas.values()):
        settled = pace.gone(_mitigated(replica, ready=ready, at_s=moment.at_s), moment)
        settled = probes.send_if_due(settled, moment)
        if settled is not replica:
            state = with_replica(state, settled)
    return inherited.settle(hosts.settle(state, moment), moment)


def _mitigated(replica: Replica, *, ready: bool, at_s: float) -> Replica:
    suspect = replica.state is ReplicaState.SUSPECT and ready
    if suspect or replica.state in OUT_OF_ROTATION:
        return symptoms.out_of_rotation(replica, f"nothing goes to it: {replica.state}", at_s)
    return replica


def _effects_between(state: FleetState, after: FleetState) -> tuple[Effect, ...]:
    effects = _written(_beside_replicas(state), _beside_replicas(after))
    for name, new in after.replicas.items():
        old = state.replicas.get(name)
        if new is old:
            continue
        known = () if old is None else (old.incident, old.pace.incident)
        effects += _written(known, (new.incident, new.pace.incident))
        told_s = None if old is None or old.order is None else old.order.sent_s
        if new.order is not None and new.order.sent_s not in (None, told_s):
            effects.append(ReplaceReplica(replica_id=name, reason=new.order.reason))
        if new.probe is not None and (old is None or new.probe != old.probe):
            effects.append(
                SendProbe(replica_id=name, deadline_s=new.probe.deadline_s, exact=new.probe.exact)
            )
    return tuple(effects)


def _beside_replicas(state: FleetState) -> tuple[Incident | None, ...]:
    """The incidents that belong to no replica that is known."""
    held = (incident for host in state.hosts.values() for incident in (host.held, host.slow))
    return (*held, *state.inherited.values(), *state.poison_incidents.values())


def _written(
    before: tuple[Incident | None, ...], after: tuple[Incident | None, ...]
) -> list[Effect]:
    return [
        WriteIncident(incident=incident)
        for incident in after
        if incident is not None and incident not in before
    ]
