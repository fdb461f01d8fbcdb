"""What an engine's own words about its faults, and its successor's about its end, mean for it.

Laws: a replica whose engine had a fault gets no work before a canary has passed that began after
it was heard of; one that asks for its replacement is replaced, however many canaries pass; doubts
ask for a canary and change no state; the words about a dead process reach its own incident and no
other, once.
"""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.contract.fleet import Cause, HostReported, ReplicaSnapshot
from headrace_replicas.faults import POLICIES, FaultAnswer, classify
from headrace_serve import incidents
from headrace_serve.fleet_inherited import with_words
from headrace_serve.fleet_orders import ask_replacement
from headrace_serve.fleet_probes import ask_at_once
from headrace_serve.fleet_records import is_open
from headrace_serve.fleet_state import (
    WATCHED,
    FleetState,
    Moment,
    Replica,
    Trigger,
    first_backoff_s,
    moved,
    with_replica,
)
from headrace_serve.fleet_symptoms import refined, symptom

_WRONG: Final = (FaultKind.NOT_FINITE, FaultKind.REPEATED_TOKEN)
# These say how a process ended, or nothing at all, and not what the GPU did.
_NOT_METAL: Final = (
    FaultKind.ABORTED,
    FaultKind.KILLED,
    FaultKind.EXITED,
    FaultKind.NO_PROGRESS,
    FaultKind.OTHER,
)


def cause_of(kind: FaultKind) -> Cause:
    """The cause of an incident that this kind of fault led to."""
    if kind in _WRONG:
        return Cause.WRONG_OUTPUT
    return Cause.ENGINE_FAULT if kind in _NOT_METAL else Cause.METAL_FAULT


def heard(
    replica: Replica, before: ReplicaSnapshot | None, moment: Moment, *, is_old: bool
) -> Replica:
    """The replica after a snapshot, which its record holds already.

    Args:
        replica: With the new snapshot.
        before: The one before it, None if there was none.
        moment: When it came.
        is_old: Whether a first snapshot tells of faults that another controller dealt with.
    """
    now = replica.snapshot
    if now is None:
        return replica
    known = None if before is None or before.generation != now.generation else before
    old_faults = known.faults if known is not None else now.faults if is_old else 0
    old_doubts = known.doubts if known is not None else now.doubts
    if now.faults > old_faults:
        replica = _faulted(replica, now, moment)
    if now.doubts > old_doubts:
        replica = ask_at_once(replica, moment)
    if now.fault_answer == FaultAnswer.REPLACE and replica.state in WATCHED:
        replica = _owed(replica, now, moment)
    return replica


def _faulted(replica: Replica, now: ReplicaSnapshot, moment: Moment) -> Replica:
    kind = _kind(now)
    cause = cause_of(kind)
    replica = refined(symptom(replica, cause, _story(kind, now), moment), cause, moment)
    why = f"its engine had a fault ({kind})"
    if replica.state not in WATCHED:
        return replica
    # In a suspension too a canary must begin after this fault, not after the one before.
    return replace(
        moved(replica, Trigger.DISTRUSTED, why, moment),
        reason=why,
        since_s=moment.at_s,
        next_probe_s=moment.at_s,
        backoff_s=first_backoff_s(moment.settings),
    )


def _owed(replica: Replica, now: ReplicaSnapshot, moment: Moment) -> Replica:
    if replica.replacement_owed:
        return replica
    kind = _kind(now)
    if not is_open(replica.incident):
        # Another controller heard of the fault, or the incident of it was closed too early.
        replica = symptom(replica, cause_of(kind), _story(kind, now), moment)
    return ask_replacement(replica, f"its engine had a fault ({kind})", moment, lasting=True)


def _kind(now: ReplicaSnapshot) -> FaultKind:
    known = {kind.value: kind for kind in FaultKind}
    return known.get(now.fault_kind) or classify(now.fault_text)


def _story(kind: FaultKind, now: ReplicaSnapshot) -> str:
    """The first line is what happened; then what it calls for."""
    neighbours = now.neighbours or "none seen"
    return (
        f"{kind}: {now.fault_text or 'no words'}\n"
        f"Faults of this engine: {now.faults}; it asks for: {now.fault_answer or 'nothing'}.\n"
        f"{POLICIES[kind].advice}\n"
        f"Other processes on the GPU: {neighbours}."
    )


def last_words(
    state: FleetState, said: ReplicaSnapshot | HostReported, moment: Moment
) -> FleetState:
    """The state with what a successor says of the process before it in that one's incident."""
    words = said.predecessor
    if not words:
        return state
    place, generation = (said.host, said.device), said.predecessor_generation
    for replica in tuple(state.replicas.values()):
        if replica.place == place and replica.generation == generation:
            state = with_replica(state, _with_words(replica, words, moment))
    return with_words(state, said.host, generation, words, _cause_in(words), moment)


def _with_words(replica: Replica, words: str, moment: Moment) -> Replica:
    incident = replica.incident
    if incident is None or incidents.holds(incident, words):
        return replica
    cause = _cause_in(words)
    told = incidents.add_evidence(incident, cause=cause, text=words, at_s=moment.at_s)
    return refined(replace(replica, incident=told), cause, moment)


def _cause_in(words: str) -> Cause:
    """The cause that the last words of a process name; its death itself when they name none."""
    kind = classify(words)
    if kind is FaultKind.OTHER and FaultKind.REPEATED_TOKEN.value in words:
        kind = FaultKind.REPEATED_TOKEN
    cause = cause_of(kind)
    return Cause.REPLICA_DIED if cause is Cause.ENGINE_FAULT else cause
