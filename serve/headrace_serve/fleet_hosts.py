"""Places where no engine is ready: whether one may be started there, and how its load goes.

Laws: neither a hold nor a slow load changes a replica's state or ends anything; each hold has one
incident, and so has each slow load; both are closed once an engine is ready there.
"""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import (
    Cause,
    HostReported,
    HostState,
    Incident,
    ReplicaState,
)
from headrace_serve import incidents
from headrace_serve.fleet_inherited import take_up_hold
from headrace_serve.fleet_records import Host, Load, is_open
from headrace_serve.fleet_state import WATCHED, FleetState, Moment, Replica, with_host

# A back-off that is shorter is how things get well by themselves.
HELD_S: Final = 60.0
# A place that says nothing for so long is not shown any more; a hold may last a quarter of an hour.
HOST_KEPT_S: Final = 1800.0
# The pace of a load is judged after this, and after a quarter of `load_slow_s` if that is less.
_LOAD_SEEN_S: Final = 60.0


def restamped(notice: HostReported, now_s: float) -> HostReported:
    """The report on the controller's own clock: clocks may differ by more than a load takes."""
    ahead_s = notice.at_s - now_s
    until_s = None if notice.until_s is None else notice.until_s - ahead_s
    return replace(notice, at_s=now_s, until_s=until_s)


def reported(state: FleetState, notice: HostReported, moment: Moment) -> FleetState:
    """The state after a report from an engine that is being started."""
    known = state.hosts.get((notice.host, notice.device))
    if known is not None and 0 < notice.generation < known.report.generation:
        return state  # a late word of a process that is gone
    host = known or Host(report=notice, heard_s=moment.at_s)
    host = replace(host, report=notice, heard_s=moment.at_s)
    if _ready_since(state, host) is not None:
        return state  # its engine was faster than its report
    host = _loading(host, moment)
    if _holds_back(notice):
        state, host = _held(state, host, moment)
    return with_host(state, host)


def _holds_back(report: HostReported) -> bool:
    match report.state:
        case HostState.USABLE:
            return False
        case HostState.QUARANTINED:
            return True
        case HostState.BACKING_OFF:
            return report.until_s is None or report.until_s - report.at_s >= HELD_S


def _held(state: FleetState, host: Host, moment: Moment) -> tuple[FleetState, Host]:
    held = host.held
    if not is_open(held):
        state, held = take_up_hold(state, host.report.host)
    text = _hold_story(host.report)
    if held is None:
        return state, replace(host, held=_open(host.report, Cause.HOST_HELD, "held", text, moment))
    if not incidents.holds(held, text):
        held = incidents.add_evidence(held, cause=Cause.HOST_HELD, text=text, at_s=moment.at_s)
    return state, replace(host, held=held)


def _hold_story(report: HostReported) -> str:
    until = (
        "until an operator or a reboot ends it"
        if report.until_s is None
        else f"until second {report.until_s:.0f}"
    )
    return (
        f"device {report.device} is {report.state}, {until}: {report.reason or 'no reason given'}"
    )


def _open(report: HostReported, cause: Cause, what: str, text: str, moment: Moment) -> Incident:
    opened = incidents.open_(
        cause=cause,
        host=report.host,
        replica="",
        generation=report.generation,
        text=text,
        at_s=moment.at_s,
        subject=f"{report.host}-{report.device}-{what}",
    )
    # Nothing is routed to an engine that is not there.
    return incidents.mitigate(opened, how="no engine is ready there", at_s=moment.at_s)


def _loading(host: Host, moment: Moment) -> Host:
    report = host.report
    goes_on = report.state is HostState.USABLE and 0 < report.total_bytes > report.loaded_bytes
    if host.load is not None and host.load.generation != report.generation:
        host = _load_over(host, "that start is over", moment)
    if not goes_on:
        return host
    if host.load is None:
        load = Load(
            generation=report.generation, first_bytes=report.loaded_bytes, first_s=moment.at_s
        )
        return replace(host, load=load)
    return _judged(host, host.load, moment)


def _load_over(host: Host, why: str, moment: Moment) -> Host:
    slow = None if host.slow is None else incidents.close(host.slow, why=why, at_s=moment.at_s)
    return replace(host, load=None, slow=slow)


def _judged(host: Host, load: Load, moment: Moment) -> Host:
    report, limit_s = host.report, moment.settings.load_slow_s
    seen_s = moment.at_s - load.first_s
    if seen_s < min(_LOAD_SEEN_S, limit_s / 4) or is_open(host.slow):
        return host
    came = report.loaded_bytes - load.first_bytes
    whole_s = seen_s * report.total_bytes / came if came > 0 else float("inf")
    if whole_s <= limit_s:
        return host
    text = (
        f"{came / 1e6:.1f} MB of {report.total_bytes / 1e6:.1f} MB came in {seen_s:.0f} s; at that "
        f"pace the load takes {whole_s / 60:.0f} minutes, and {limit_s / 60:.0f} would be slow"
    )
    return replace(host, slow=_open(report, Cause.LOAD_SLOW, "load", text, moment))


def settle(state: FleetState, moment: Moment) -> FleetState:
    """The state without the places where an engine got ready, or that are silent for long.

    A place whose incidents were closed just now is kept for one more step, so that they are
    written.
    """
    for host in tuple(state.hosts.values()):
        ready = _ready_since(state, host)
        if ready is not None:
            why = f"replica {ready.replica_id} is ready there"
            closed = _closed(host, why, moment.at_s)
            state = _dropped(state, host) if closed is host else with_host(state, closed)
        elif _forgotten(host, moment.at_s):
            state = _dropped(state, host)
    return state


def _dropped(state: FleetState, host: Host) -> FleetState:
    place = (host.report.host, host.report.device)
    return replace(state, hosts={name: one for name, one in state.hosts.items() if name != place})


def _ready_since(state: FleetState, host: Host) -> Replica | None:
    """The replica that got ready at this place since the last that was heard of it.

    A start that may not be has no generation; then only the time tells which came later. A
    quarantine is the whole host's, whichever of its devices is the first to have an engine again.
    """
    report, started = host.report, host.report.generation
    whole_host = report.state is HostState.QUARANTINED
    for replica in state.replicas.values():
        at = replica.place
        if replica.state is not ReplicaState.READY or at is None or at[0] != report.host:
            continue
        if at[1] != report.device and not whole_host:
            continue
        if replica.generation >= started > 0 or (not started and replica.since_s >= host.heard_s):
            return replica
    return None


def _closed(host: Host, why: str, at_s: float) -> Host:
    held = None if host.held is None else incidents.close(host.held, why=why, at_s=at_s)
    slow = None if host.slow is None else incidents.close(host.slow, why=why, at_s=at_s)
    if held is host.held and slow is host.slow:
        return host
    return replace(host, held=held, slow=slow)


def _forgotten(host: Host, at_s: float) -> bool:
    troubled = is_open(host.held) or is_open(host.slow)
    return not troubled and at_s - host.heard_s > HOST_KEPT_S


def ready_in_s(state: FleetState, at_s: float) -> float | None:
    """Seconds until an engine may be ready, as loads and holds stand.

    None while there is one that can be asked or that a canary is deciding about, and when nobody
    can tell. A hold's end counts alone: the load after it is not known yet.
    """
    if any(replica.state in WATCHED for replica in state.replicas.values()):
        return None
    waits = [_waits_s(host, at_s) for host in state.hosts.values()]
    return min((wait_s for wait_s in waits if wait_s is not None), default=None)


def _waits_s(host: Host, at_s: float) -> float | None:
    report, load = host.report, host.load
    if report.state is not HostState.USABLE:
        return None if report.until_s is None else max(0.0, report.until_s - at_s)
    came = 0 if load is None else report.loaded_bytes - load.first_bytes
    if load is None or came <= 0:
        return None
    rest = report.total_bytes - report.loaded_bytes
    rest_s = rest * (host.heard_s - load.first_s) / came
    return max(0.0, rest_s - (at_s - host.heard_s))


def shown(state: FleetState) -> tuple[HostReported, ...]:
    """What people see of places where no engine is ready, by host and device."""
    return tuple(host.report for _, host in sorted(state.hosts.items()))
