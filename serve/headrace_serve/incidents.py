"""What an incident record becomes as things happen to it.

Laws: a record is bounded whatever happens; opened <= mitigated <= closed; counts only grow; the
id depends on nothing but the first symptom.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, TypeVar

from headrace_replicas.contract.fleet import Cause, Incident

# A flood of symptoms keeps the first text, where the root cause mostly is, and the newest ones.
EVIDENCE_KEPT: Final = 20
EVIDENCE_CHARS: Final = 2000
TIMELINE_KEPT: Final = 64

# What a symptom alone says, before anybody knows what was behind it. REPLICA_STALLED and the like
# may turn out to be a fault of the GPU; the reverse never happens.
_VAGUE: Final = frozenset(
    {
        Cause.REPLICA_DIED,
        Cause.REPLICA_STALLED,
        Cause.STREAM_ENDED_EARLY,
        Cause.ENGINE_FAULT,
        Cause.CANARY_TIMEOUT,
    }
)

_Entry = TypeVar("_Entry")

_UNSAFE_IN_FILE_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")

_TITLES: Final = {
    Cause.REPLICA_DIED: "The replica died",
    Cause.REPLICA_STALLED: "The replica stalled",
    Cause.STREAM_ENDED_EARLY: "A stream ended without its last chunk",
    Cause.ENGINE_FAULT: "The engine failed",
    Cause.CANARY_FAILED: "The canary failed",
    Cause.CANARY_TIMEOUT: "The canary got no answer",
    Cause.WEIGHTS_MISMATCH: "The replica's model differs from the others'",
    Cause.STORAGE_FAULT: "The replica could not read its experts",
    Cause.METAL_FAULT: "The GPU's driver failed a command",
    Cause.WRONG_OUTPUT: "The engine computed nonsense",
    Cause.REPLICA_SLOW: "The replica is far slower than usual",
    Cause.LOAD_SLOW: "An engine loads its model far too slowly",
    Cause.HOST_HELD: "No engine may be started on the host",
    Cause.POISON_REQUEST: "A request was there at two deaths",
}


def incident_id(*, opened_s: float, subject: str, generation: int) -> str:
    """A name that sorts by time of opening and is safe in a file name."""
    opened_ms = max(0, round(opened_s * 1000))
    safe_subject = _UNSAFE_IN_FILE_NAME.sub("-", subject)
    return f"{opened_ms:015d}-{safe_subject}-g{generation}"


def open_(
    *,
    cause: Cause,
    host: str,
    replica: str,
    generation: int,
    text: str,
    at_s: float,
    subject: str = "",
) -> Incident:
    """A new record with its first symptom.

    Args:
        cause: What it is.
        host: The host's label; empty while it is not known.
        replica: The culprit; empty when it is none.
        generation: The culprit's.
        text: The first symptom.
        at_s: When it showed.
        subject: What the id names, when that is not the replica: things that may go wrong at once
            need names of their own.
    """
    cut = _cut(text)
    return Incident(
        id=incident_id(opened_s=at_s, subject=subject or replica, generation=generation),
        cause=cause,
        host=host,
        replica=replica,
        generation=generation,
        opened_s=at_s,
        evidence=(cut,),
        timeline=((at_s, f"opened: {cause}: {_first_line(cut)}"),),
    )


def add_evidence(incident: Incident, *, cause: Cause, text: str, at_s: float) -> Incident:
    """The record with one more symptom. Its own cause stays that of the first one."""
    cut = _cut(text)
    kept = _bounded((*incident.evidence, cut), EVIDENCE_KEPT)
    return _noted(replace(incident, evidence=kept), at_s, f"{cause}: {_first_line(cut)}")


def holds(incident: Incident, text: str) -> bool:
    """Whether this text is in the evidence already."""
    return _cut(text) in incident.evidence


def refine(incident: Incident, *, cause: Cause, at_s: float) -> Incident:
    """The record with a more precise cause; one that is precise already keeps its own.

    A death says more than that nobody answered before it was known.
    """
    found_dead = incident.cause is Cause.CANARY_TIMEOUT and cause is Cause.REPLICA_DIED
    precise = cause not in _VAGUE and incident.cause in _VAGUE
    if incident.cause is cause or not (precise or found_dead):
        return incident
    return _noted(
        replace(incident, cause=cause), at_s, f"the cause is {cause}, not {incident.cause}"
    )


def count_move(
    incident: Incident,
    *,
    request_id: str,
    to_replica: str,
    replayed_tokens: int,
    gap_s: float,
    at_s: float,
) -> Incident:
    """The record with one more request that goes on elsewhere because of it."""
    counted = replace(
        incident,
        requests_moved=incident.requests_moved + 1,
        replayed_tokens=incident.replayed_tokens + replayed_tokens,
        worst_gap_s=max(incident.worst_gap_s, gap_s),
    )
    return _noted(
        counted,
        at_s,
        f"{request_id} goes on at {to_replica} after {gap_s:.2f} s, {replayed_tokens} replayed",
    )


def mitigate(incident: Incident, *, how: str, at_s: float) -> Incident:
    """The record once nothing is routed to the culprit any more; a second call changes nothing."""
    if incident.mitigated_s is not None:
        return incident
    mitigated = replace(incident, mitigated_s=max(at_s, incident.opened_s))
    return _noted(mitigated, at_s, f"mitigated: {how}")


def close(incident: Incident, *, why: str, at_s: float) -> Incident:
    """The record once the trouble is over; a second call changes nothing."""
    if incident.closed_s is not None:
        return incident
    mitigated = mitigate(incident, how=why, at_s=at_s)
    closed_s = max(at_s, mitigated.mitigated_s or mitigated.opened_s)
    return _noted(replace(mitigated, closed_s=closed_s), at_s, f"closed: {why}")


def reopen(incident: Incident, *, cause: Cause, text: str, at_s: float) -> Incident:
    """A closed record whose trouble is back: closing it was too early."""
    opened = replace(incident, mitigated_s=None, closed_s=None)
    return add_evidence(opened, cause=cause, text=f"again: {text}", at_s=at_s)


def summary(incident: Incident) -> tuple[str, ...]:
    """Five lines for a person: what, where, what requests felt, how long, and how it stands."""
    first = _first_line(incident.evidence[0]) if incident.evidence else "no evidence was kept"
    last = _first_line(incident.timeline[-1][1]) if incident.timeline else "nothing noted"
    felt = f"{incident.requests_moved} moved, {incident.replayed_tokens} tokens replayed"
    return (
        f"What: {_TITLES[incident.cause]} ({incident.cause}): {first}",
        f"Where: {_where(incident)}host {incident.host or 'unknown'}",
        f"Requests: {felt}, longest pause {incident.worst_gap_s:.2f} s",
        f"Time: opened {_utc(incident.opened_s)}, {_durations(incident)}",
        f"State: {_standing(incident)}; last entry: {last}",
    )


def _where(incident: Incident) -> str:
    if not incident.replica:
        return ""
    return f"replica {incident.replica}, generation {incident.generation}, "


def _durations(incident: Incident) -> str:
    if incident.mitigated_s is None:
        return "still in rotation"
    out = f"out of rotation after {incident.mitigated_s - incident.opened_s:.2f} s"
    if incident.closed_s is None:
        return f"{out}, not over yet"
    return f"{out}, over after {incident.closed_s - incident.opened_s:.2f} s"


def _standing(incident: Incident) -> str:
    if incident.closed_s is not None:
        return "closed"
    return "open" if incident.mitigated_s is None else "mitigated"


def _utc(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).isoformat(timespec="milliseconds")


def _noted(incident: Incident, at_s: float, what: str) -> Incident:
    return replace(incident, timeline=_bounded((*incident.timeline, (at_s, what)), TIMELINE_KEPT))


def _bounded(entries: tuple[_Entry, ...], kept: int) -> tuple[_Entry, ...]:
    if len(entries) <= kept:
        return entries
    return entries[:1] + entries[len(entries) - kept + 1 :]


def _cut(text: str) -> str:
    if len(text) <= EVIDENCE_CHARS:
        return text
    return text[: EVIDENCE_CHARS - 3] + "..."


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else "no text"
