"""From a replica's symptoms to its incident: opened once, then added to, then closed."""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import Cause, Incident, ReplicaState, RequestMoved
from headrace_serve import incidents
from headrace_serve.fleet_state import Moment, Replica

# A symptom so soon after closing is the same trouble: a replica that flaps has one incident.
REOPEN_S: Final = 60.0

# Trouble with files that a replica spoke of so lately explains its silence.
_STORAGE_RECENT_S: Final = 10.0

_ENDING: Final = (ReplicaState.STOPPING, ReplicaState.LOST)
_SILENCE: Final = (Cause.REPLICA_STALLED, Cause.CANARY_TIMEOUT)


def symptom(replica: Replica, cause: Cause, text: str, moment: Moment) -> Replica:
    """The replica with this symptom in its incident.

    The open incident takes it; one that was closed within `REOPEN_S` is open again; else a new one
    is opened. A replica that ends as ordered, stops or is lost already opens none: what still
    comes in is added to the incident it has.

    With a new incident goes what the replica lately said of its files: a read that does not come
    back is why it is silent, and the cause then.
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
        explained = _with_trouble(incident, _storage_trouble(replica, at_s), text, at_s)
        changed = incidents.reopen(explained, cause=cause, text=text, at_s=at_s)
    if cause is Cause.REPLICA_DIED:
        changed = incidents.refine(changed, cause=cause, at_s=at_s)
    return replace(replica, incident=changed)


def refined(replica: Replica, cause: Cause, moment: Moment) -> Replica:
    """The replica whose incident, if it has one, gets a more precise cause."""
    if replica.incident is None:
        return replica
    incident = incidents.refine(replica.incident, cause=cause, at_s=moment.at_s)
    return replica if incident is replica.incident else replace(replica, incident=incident)


def _storage_trouble(replica: Replica, at_s: float) -> str:
    """What the replica lately said of its files; empty when that was nothing, or long ago."""
    said_s = replica.storage_s
    if replica.snapshot is None or said_s is None or at_s - said_s > _STORAGE_RECENT_S:
        return ""
    return replica.snapshot.storage_trouble


def _with_trouble(incident: Incident, trouble: str, text: str, at_s: float) -> Incident:
    if not trouble or trouble in text or trouble in incident.evidence:
        return incident
    return incidents.add_evidence(incident, cause=Cause.STORAGE_FAULT, text=trouble, at_s=at_s)


def _opened(replica: Replica, cause: Cause, text: str, at_s: float) -> Replica:
    host = "" if replica.snapshot is None else replica.snapshot.host
    trouble = _storage_trouble(replica, at_s)
    if trouble and cause in _SILENCE:
        cause = Cause.STORAGE_FAULT
    opened = incidents.open_(
        cause=cause,
        host=host,
        replica=replica.replica_id,
        generation=replica.generation,
        text=text,
        at_s=at_s,
    )
    return replace(replica, incident=_with_trouble(opened, trouble, text, at_s))


def storage_trouble_told(replica: Replica, moment: Moment) -> Replica:
    """The replica with its newest trouble with files in its incident, if that is not long over.

    By itself it opens none: a slow disk is slow, not sick.
    """
    incident = replica.incident
    if incident is None or replica.snapshot is None:
        return replica
    if incident.closed_s is not None and moment.at_s - incident.closed_s >= REOPEN_S:
        return replica
    text = replica.snapshot.storage_trouble
    told = incidents.add_evidence(incident, cause=Cause.STORAGE_FAULT, text=text, at_s=moment.at_s)
    return replace(replica, incident=told)


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
