"""What a replica's own words about its files mean for it.

Laws: slowness alone changes no state and opens no incident; a replica that has lost its files is
suspect at best, and its replacement is asked for, until another engine answers under its id.
"""

from dataclasses import replace

from headrace_replicas.contract.fleet import Cause, ReplicaSnapshot
from headrace_serve.fleet_orders import ask_replacement
from headrace_serve.fleet_state import WATCHED, Moment, Replica, Trigger, moved
from headrace_serve.fleet_symptoms import storage_trouble_told, symptom


def heard(replica: Replica, before: ReplicaSnapshot | None, moment: Moment) -> Replica:
    """The replica after a snapshot, which its record holds already.

    Args:
        replica: With the new snapshot.
        before: The one before it, None if there was none.
        moment: When it came.
    """
    now = replica.snapshot
    if now is None or not now.storage_trouble:
        return replica
    known = None if before is None or before.generation != now.generation else before
    if known is None or known.storage_trouble != now.storage_trouble:
        replica = replace(replica, storage_s=moment.at_s)
    if known is None or known.storage_troubles < now.storage_troubles:
        replica = storage_trouble_told(replica, moment)
    if now.storage_lost and replica.state in WATCHED and not _leaves_already(replica):
        replica = _lost(replica, now.storage_trouble, moment)
    return replica


def _leaves_already(replica: Replica) -> bool:
    return replica.order is not None and replica.order.kind == "replace"


def _lost(replica: Replica, trouble: str, moment: Moment) -> Replica:
    replica = symptom(replica, Cause.STORAGE_FAULT, f"lost its files: {trouble}", moment)
    replica = moved(replica, Trigger.DOUBTED, "it cannot read its experts", moment)
    return ask_replacement(replica, trouble, moment, lasting=True)
