"""Incidents that were open when a controller began: who takes them up, and when they are closed.

Laws: an inherited incident is either taken up by its own replica, which then goes on as if the
controller had never died, or closed with a note: it is never left open for longer than
`INHERITED_S`, and nothing is probed or replaced because of it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import Cause, Incident, ReplicaState
from headrace_serve import incidents
from headrace_serve.fleet_records import is_open
from headrace_serve.fleet_state import FleetState, Moment, Replica

# An incident that nobody can be found for is not true for ever. Loading a large model takes
# minutes, and a host that held its starts for longer opens an incident of its own.
INHERITED_S: Final = 900.0

# These are about something beside the replica's own state, which is found out anew.
_FOUND_OUT_ANEW: Final = (
    Cause.REPLICA_SLOW,
    Cause.LOAD_SLOW,
    Cause.HOST_HELD,
    Cause.POISON_REQUEST,
)


def begin(left_open: Iterable[Incident], at_s: float) -> FleetState:
    """What a controller that begins knows: the incidents that the last one left open."""
    found = {one.id: one for one in left_open if is_open(one)}
    return FleetState(inherited=found, began_s=at_s)


def take_up(state: FleetState, replica: Replica) -> tuple[FleetState, Replica]:
    """The state and a replica that was just met, with the incident that was left open for it."""
    for incident in state.inherited.values():
        own = incident.replica == replica.replica_id and incident.cause not in _FOUND_OUT_ANEW
        if own and is_open(incident):
            return _without(state, incident.id), replace(replica, incident=incident)
    return state, replica


def take_up_hold(state: FleetState, host: str) -> tuple[FleetState, Incident | None]:
    """The state and the incident of a hold on this host that was left open, if there is one."""
    for incident in state.inherited.values():
        if incident.cause is Cause.HOST_HELD and incident.host == host and is_open(incident):
            return _without(state, incident.id), incident
    return state, None


def _without(state: FleetState, incident_id: str) -> FleetState:
    kept = {name: one for name, one in state.inherited.items() if name != incident_id}
    return replace(state, inherited=kept)


def with_words(
    state: FleetState, host: str, generation: int, words: str, cause: Cause, moment: Moment
) -> FleetState:
    """The state with the last words of a process in the incident that was left open for it."""
    for incident in state.inherited.values():
        own = incident.host == host and incident.generation == generation > 0
        if own and is_open(incident) and not incidents.holds(incident, words):
            told = incidents.add_evidence(incident, cause=cause, text=words, at_s=moment.at_s)
            state = _with(state, incidents.refine(told, cause=cause, at_s=moment.at_s))
    return state


def _with(state: FleetState, incident: Incident) -> FleetState:
    return replace(state, inherited={**state.inherited, incident.id: incident})


def settle(state: FleetState, moment: Moment) -> FleetState:
    """The state with inherited incidents closed as far as that can be told now."""
    for incident in tuple(state.inherited.values()):
        if not is_open(incident):
            # Its end was written with the step before.
            state = _without(state, incident.id)
            continue
        why = _over(state, incident, moment)
        if why:
            note = f"{why}, as the controller found that began meanwhile"
            state = _with(state, incidents.close(incident, why=note, at_s=moment.at_s))
    return state


def _over(state: FleetState, incident: Incident, moment: Moment) -> str:
    ready = [one for one in state.replicas.values() if one.state is ReplicaState.READY]
    if any(one.replica_id == incident.replica for one in ready):
        return "the replica is ready"
    met = state.replicas.get(incident.replica)
    gone = met is None or met.state is ReplicaState.LOST
    for one in ready if gone else ():
        host = "" if one.snapshot is None else one.snapshot.host
        if host == incident.host and one.generation > incident.generation:
            return f"replica {one.replica_id} took its place"
    if state.began_s is not None and moment.at_s - state.began_s >= INHERITED_S:
        return f"nothing was heard of its culprit for {INHERITED_S / 60:.0f} minutes"
    return ""
