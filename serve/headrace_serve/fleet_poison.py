"""Requests that gateways have stopped: the record of each, and who refuses them for how long.

Laws: one request has one record while it is refused, however many gateways meet it; no replica
changes its state because of it.
"""

from dataclasses import replace

from headrace_replicas.contract.fleet import Cause, Incident, PoisonFound
from headrace_serve import incidents
from headrace_serve.fleet_state import FleetState, Moment


def found(state: FleetState, notice: PoisonFound) -> FleetState:
    """The state with a request that is refused from now on."""
    name = notice.fingerprint
    if name in state.poison:
        return state
    return replace(
        state,
        poison={**state.poison, name: notice},
        poison_incidents={**state.poison_incidents, name: _record(state, notice)},
    )


def _record(state: FleetState, notice: PoisonFound) -> Incident:
    last = state.replicas.get(notice.replica_id)
    snapshot = None if last is None else last.snapshot
    opened = incidents.open_(
        cause=Cause.POISON_REQUEST,
        host="" if snapshot is None else snapshot.host,
        replica=notice.replica_id,
        generation=0 if snapshot is None else snapshot.generation,
        text=f"request {notice.request_id} (fingerprint {notice.fingerprint}) was there at "
        f"{len(notice.losses)} losses",
        at_s=notice.at_s,
        subject=f"request-{notice.fingerprint[:12]}",
    )
    for text in notice.losses:
        opened = incidents.add_evidence(
            opened, cause=Cause.POISON_REQUEST, text=text, at_s=notice.at_s
        )
    why = f"the same request is refused until second {notice.until_s:.0f}"
    return incidents.close(opened, why=why, at_s=notice.at_s)


def expired(state: FleetState, moment: Moment) -> FleetState:
    """The state without the requests whose time is over."""
    kept = {name: one for name, one in state.poison.items() if one.until_s > moment.at_s}
    if len(kept) == len(state.poison):
        return state
    records = {name: one for name, one in state.poison_incidents.items() if name in kept}
    return replace(state, poison=kept, poison_incidents=records)
