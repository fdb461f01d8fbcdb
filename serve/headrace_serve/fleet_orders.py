"""Who may be taken out of service by choice, and when a newcomer has taken a place.

Laws: at most `max_unavailable` replicas are out by choice; a loss that is not made up yet uses
the same budget; a replica that can still serve is not replaced while fewer than `min_ready` others
are ready; an order that must wait is owed, and granted as soon as both allow it.
"""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import ReplicaState
from headrace_serve.fleet_state import (
    WATCHED,
    FleetState,
    Moment,
    Order,
    Replica,
    Trigger,
    moved,
    with_replica,
)
from headrace_serve.fleet_symptoms import over

# A loss that nobody has made up for after this is not waited for: its host may be gone for good,
# and the others must stay replaceable. Loading a large model takes minutes, not more.
LOST_KEPT_S: Final = 300.0
# So many lost replicas are remembered at most, in a crash loop that nobody stops.
LOST_KEPT_COUNT: Final = 256


def ask_replacement(
    replica: Replica, reason: str, moment: Moment, *, lasting: bool = False
) -> Replica:
    """The replica with a replacement owed; an order for the same already stands as it is.

    Args:
        replica: One that is watched.
        reason: Why, for a person.
        moment: When.
        lasting: Whether passed canaries leave it owed.
    """
    order = replica.order
    if order is None or order.kind != "replace":
        order = Order(kind="replace", reason=reason, asked_s=moment.at_s, lasting=lasting)
    elif lasting and not order.lasting:
        order = replace(order, reason=reason, lasting=True)
    return replace(replica, order=order)


def cancel_replacement(replica: Replica) -> Replica:
    """The replica that proved well before its replacement was granted.

    Only failed canaries are made up for by a passed one.
    """
    if replica.order is None or replica.order.kind != "replace" or replica.order.lasting:
        return replica
    return replace(replica, order=None)


def order_drain(replica: Replica, moment: Moment) -> Replica:
    """The replica with an operator's drain owed, unless an order stands already."""
    if replica.order is not None or replica.state not in WATCHED:
        return replica
    order = Order(kind="drain", reason="an operator's order", asked_s=moment.at_s)
    return replace(replica, order=order)


def end_drain(replica: Replica, moment: Moment) -> Replica:
    """The replica that an operator wants back: a canary decides, as after any absence."""
    if replica.order is None or replica.order.kind != "drain":
        return replica
    if replica.state is ReplicaState.DRAINING:
        return moved(replica, Trigger.CALLED_BACK, "an operator ended its drain", moment)
    return replace(replica, order=None) if replica.state in WATCHED else replica


def grant_orders(state: FleetState, moment: Moment) -> FleetState:
    """The state with as many waiting orders granted, oldest first, as budget and floor allow."""
    waiting = [
        replica
        for replica in state.replicas.values()
        if replica.order is not None and replica.order.granted_s is None
    ]
    for replica in sorted(waiting, key=_asked):
        if out_of_service(state, moment.at_s) >= moment.settings.max_unavailable:
            return state
        if not _needed(state, replica, moment):
            state = with_replica(state, _granted(replica, moment))
    return state


def _needed(state: FleetState, replica: Replica, moment: Moment) -> bool:
    """Whether a replica must go on serving though its replacement is owed."""
    if replica.order is None or replica.order.kind != "replace" or not replica.can_serve:
        return False
    others = sum(
        1
        for other in state.replicas.values()
        if other.state is ReplicaState.READY and other.replica_id != replica.replica_id
    )
    return others < moment.settings.min_ready


def _asked(replica: Replica) -> tuple[float, str]:
    asked_s = 0.0 if replica.order is None else replica.order.asked_s
    return (asked_s, replica.replica_id)


def _granted(replica: Replica, moment: Moment) -> Replica:
    if replica.order is None:
        return replica
    sent_s = moment.at_s if replica.order.kind == "replace" else None
    order = replace(replica.order, granted_s=moment.at_s, sent_s=sent_s)
    reason = f"{order.kind}: {order.reason}"
    return moved(replace(replica, order=order), Trigger.ORDERED_OUT, reason, moment)


def out_of_service(state: FleetState, at_s: float) -> int:
    """Replicas that use the budget: on their way out, or lost and not made up for yet."""
    return sum(1 for replica in state.replicas.values() if _uses_budget(replica, at_s))


def _uses_budget(replica: Replica, at_s: float) -> bool:
    if replica.state in (ReplicaState.DRAINING, ReplicaState.STOPPING):
        return True
    lost = replica.state is ReplicaState.LOST and not replica.replaced
    return lost and at_s - replica.since_s <= LOST_KEPT_S


def out_by_choice(state: FleetState) -> int:
    """Replicas that an order keeps out."""
    return sum(1 for replica in state.replicas.values() if replica.out_by_choice)


def repeat_order(replica: Replica, moment: Moment) -> Replica:
    """The replica told once more to leave, when it has not begun to within a probe period."""
    order = replica.order
    if replica.state is not ReplicaState.DRAINING or order is None or order.sent_s is None:
        return replica
    if moment.at_s - order.sent_s < moment.settings.probe_period_s:
        return replica
    return replace(replica, order=replace(order, sent_s=moment.at_s))


def fill_places(state: FleetState, moment: Moment) -> FleetState:
    """The state with the places that others have taken no longer missing.

    A replica that is ready takes the places of earlier generations on its own device. One that is
    ready for the first time also takes those of replicas that never said where they ran, and if
    its own device missed nobody, it stands in for the replica that is out longest.
    """
    for replica in tuple(state.replicas.values()):
        if replica.state is ReplicaState.READY and not replica.proved:
            state = _welcomed(state, replica, moment)
    for replica in _missing(state):
        successors = (
            other
            for other in state.replicas.values()
            if other.state is ReplicaState.READY and _same_device(replica, other)
        )
        for successor in successors:
            state = _filled(state, replica, successor, moment)
    return state


def _welcomed(state: FleetState, newcomer: Replica, moment: Moment) -> FleetState:
    state = with_replica(state, replace(newcomer, proved=True))
    missing = _missing(state)
    own = any(_same_device(replica, newcomer) for replica in missing)
    elsewhere = [replica for replica in missing if replica.place is not None]
    nowhere = [replica for replica in missing if replica.place is None]
    for replica in (*nowhere, *(() if own else elsewhere[:1])):
        state = _filled(state, replica, newcomer, moment)
    return state


def _missing(state: FleetState) -> list[Replica]:
    """Replicas that are on their way out or lost, and not made up for; out longest first."""
    missing = [replica for replica in state.replicas.values() if _leaves_a_place(replica)]
    return sorted(missing, key=lambda replica: (replica.since_s, replica.replica_id))


def _leaves_a_place(replica: Replica) -> bool:
    going = replica.state in (ReplicaState.STOPPING, ReplicaState.LOST)
    return (going or replica.leaves_as_ordered) and not replica.replaced


def _same_device(replica: Replica, successor: Replica) -> bool:
    return (
        replica.place is not None
        and replica.place == successor.place
        and replica.generation < successor.generation
    )


def _filled(state: FleetState, replica: Replica, successor: Replica, moment: Moment) -> FleetState:
    why = f"replica {successor.replica_id} took its place"
    return with_replica(state, over(replace(replica, replaced=True), why, moment.at_s))


def forget_lost(state: FleetState, moment: Moment) -> FleetState:
    """The state without the lost replicas that nobody asks about any more.

    One that Ray Serve still lists is kept: forgotten, it would look like a new one.
    """
    lost = sorted(
        (
            replica
            for replica in state.replicas.values()
            if replica.state is ReplicaState.LOST and not replica.listed
        ),
        key=lambda replica: replica.since_s,
    )
    surplus = {replica.replica_id for replica in lost[: max(0, len(lost) - LOST_KEPT_COUNT)]}
    settled = {replica.replica_id for replica in lost if _settled(replica, moment.at_s)}
    gone = surplus | settled
    if not gone:
        return state
    kept = {name: replica for name, replica in state.replicas.items() if name not in gone}
    return replace(state, replicas=kept)


def _settled(replica: Replica, at_s: float) -> bool:
    incident = replica.incident
    closed = incident is None or incident.closed_s is not None
    return closed and at_s - replica.since_s > LOST_KEPT_S


def owed_note(replica: Replica) -> str:
    """What a person should know of an order that waits; empty when none does."""
    order = replica.order
    if order is None or order.granted_s is not None:
        return ""
    return (
        f"; {order.kind} owed ({order.reason}): as many are out as may be, or too few others ready"
    )
