"""From a replica's symptoms to its incident: opened once, then added to, then closed."""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import Cause, ReplicaState, RequestMoved
from headrace_serve import incidents
from headrace_serve.fleet_state import Moment, Replica

# A symptom so soon after closing is the same trouble: a replica that flaps has one incident.
REOPEN_S: Final = 60.0

_ENDING: Final = (ReplicaState.STOPPING, ReplicaState.LOST)


def symptom(replica: Replica, cause: Cause, text: str, moment: Moment) -> Replica:
    """The replica with this symptom in its incident.

    The open incident takes it; one that was closed within `REOPEN_S` is open again; else a new one
    is opened. A replica that ends as ordered, stops or is lost already opens none: what still
    comes in is added to the incident it has.
    """
    incident, at_s = replica.incident, moment.at_s
    ending = replica.leaves_as_ordered or replica.state in _ENDING
    recent = incident is not None and (
        incident.closed_s is None or at_s - incident.closed_s < REOPEN_S
    )
    if incident is None or not recent:
        return replica if ending else _opened(replica, cause, text, at_s)
    if incident.closed_s is None or ending:
        changed = incidents.add_evidence(incident, cause=cause, text=text, at_s=at_s)
    else:
        changed = incidents.reopen(incident, cause=cause, text=text, at_s=at_s)
    return replace(replica, incident=changed)


def _opened(replica: Replica, cause: Cause, text: str, at_s: float) -> Replica:
    host = "" if replica.snapshot is None else replica.snapshot.host
    opened = incidents.open_(
        cause=cause,
        host=host,
        replica=replica.replica_id,
        generation=replica.generation,
        text=text,
        at_s=at_s,
    )
    return replace(replica, incident=opened)


def out_of_rotation(replica: Replica, how: str, at_s: float) -> Replica:
    """The replica once nothing is routed to it any more."""
    if replica.incident is None or replica.incident.closed_s is not None:
        return replica
    return replace(replica, incident=incidents.mitigate(replica.incident, how=how, at_s=at_s))


def over(replica: Replica, why: str, at_s: float) -> Replica:
    """The replica once it is well again, or once another has taken its place."""
    if replica.incident is None:
        return replica
    return replace(replica, incident=incidents.close(replica.incident, why=why, at_s=at_s))


def request_moved(replica: Replica, notice: RequestMoved) -> Replica:
    """The replica with one more request that goes on elsewhere because of its incident."""
    if replica.incident is None:
        return replica
    counted = incidents.count_move(
        replica.incident,
        request_id=notice.request_id,
        to_replica=notice.to_replica,
        replayed_tokens=notice.replayed_tokens,
        gap_s=notice.gap_s,
        at_s=notice.at_s,
    )
    return replace(replica, incident=counted)
