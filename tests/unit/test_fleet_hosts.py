"""Holds on hosts and slow loads: alarms that stop nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.fleet import (
    Cause,
    Effect,
    HostReported,
    HostState,
    Incident,
    ReplicaState,
    WriteIncident,
)
from headrace_serve import fleet
from headrace_serve.fleet_hosts import HOST_KEPT_S, restamped
from tests.support.fleet import Fleet, told_to_leave

GB = 10**9


def only(fleet_: Fleet) -> Incident:
    (incident,) = fleet_.incidents.values()
    return incident


def report(
    fleet_: Fleet,
    state: HostState = HostState.USABLE,
    *,
    host: str = "host-a",
    for_s: float | None = None,
    generation: int = 2,
    loaded: int = 0,
    total: int = 0,
    reason: str = "because",
) -> tuple[Effect, ...]:
    return fleet_.hear(
        HostReported(
            host=host,
            device=0,
            generation=generation if state is HostState.USABLE else 0,
            state=state,
            reason=reason,
            until_s=None if for_s is None else fleet_.now_s + for_s,
            loaded_bytes=loaded,
            total_bytes=total,
            at_s=fleet_.now_s,
        )
    )


def test_a_quarantine_is_one_incident_until_an_engine_is_ready_there() -> None:
    fleet_ = Fleet()
    fleet_.make_ready("b")
    for _ in range(5):
        report(fleet_, HostState.QUARANTINED, reason="its memory is stranded; reboot it")
        fleet_.tick(10.0)
    assert only(fleet_).cause is Cause.HOST_HELD
    assert only(fleet_).host == "host-a"
    assert len(only(fleet_).evidence) == 1
    assert "stranded" in only(fleet_).evidence[0]
    report(fleet_, loaded=1, total=2)
    assert only(fleet_).closed_s is None
    fleet_.make_ready("b", "a2", host="host-a", generation=2)
    assert only(fleet_).closed_s == fleet_.now_s


@pytest.mark.parametrize(("for_s", "opens"), [(1.0, False), (59.0, False), (900.0, True)])
def test_only_a_hold_of_a_minute_is_an_incident(for_s: float, opens: bool) -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.BACKING_OFF, for_s=for_s)
    assert [one.cause for one in fleet_.incidents.values()] == [Cause.HOST_HELD] * opens


def test_a_new_reason_is_evidence_of_the_same_hold() -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.BACKING_OFF, for_s=900.0, reason="3 deaths in 15 minutes")
    report(fleet_, HostState.QUARANTINED, reason="refused on its first call")
    assert [text.rsplit(": ", 1)[1] for text in only(fleet_).evidence] == [
        "3 deaths in 15 minutes",
        "refused on its first call",
    ]


def test_a_second_hold_is_a_second_incident() -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.QUARANTINED)
    fleet_.make_ready("a2", host="host-a", generation=2)
    fleet_.now_s += 100.0
    fleet_.members()
    report(fleet_, HostState.QUARANTINED)
    held = [one for one in fleet_.incidents.values() if one.cause is Cause.HOST_HELD]
    assert [one.closed_s is None for one in held] == [False, True]


def test_two_hosts_that_are_held_at_once_have_two_incidents() -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.QUARANTINED)
    report(fleet_, HostState.QUARANTINED, host="host-b")
    assert sorted(one.host for one in fleet_.incidents.values()) == ["host-a", "host-b"]


@given(st.floats(-4000.0, 4000.0), st.none() | st.floats(0.0, 900.0))
def test_a_hosts_clock_is_not_the_controllers(ahead_s: float, left_s: float | None) -> None:
    """What is left of a hold is what counts, however wrong the host's clock."""
    told_s = 1000.0 + ahead_s
    notice = HostReported(
        host="m1",
        device=0,
        generation=0,
        state=HostState.BACKING_OFF,
        until_s=None if left_s is None else told_s + left_s,
        at_s=told_s,
    )
    taken = restamped(notice, 1000.0)
    assert taken.at_s == 1000.0
    assert taken.until_s == (None if left_s is None else pytest.approx(1000.0 + left_s))


def test_any_device_of_a_host_ends_its_quarantine() -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.QUARANTINED)
    fleet_.make_ready("a2", host="host-a", device=1)
    assert only(fleet_).closed_s is not None


def test_a_hold_of_one_device_is_not_ended_by_another() -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.BACKING_OFF, for_s=900.0)
    fleet_.make_ready("a2", host="host-a", device=1)
    assert only(fleet_).closed_s is None


def test_the_board_shows_places_without_a_ready_engine() -> None:
    fleet_ = Fleet()
    report(fleet_, HostState.BACKING_OFF, for_s=30.0)
    report(fleet_, host="host-b", loaded=GB, total=2 * GB)
    shown = {one.host: one for one in fleet.view(fleet_.state, 0.0).hosts}
    assert shown["host-a"].state is HostState.BACKING_OFF
    assert shown["host-b"].loaded_bytes == GB
    fleet_.make_ready("b", host="host-b", generation=2)
    assert [one.host for one in fleet.view(fleet_.state, 0.0).hosts] == ["host-a"]
    fleet_.tick(HOST_KEPT_S + 1.0)
    assert fleet.view(fleet_.state, 0.0).hosts == ()


def test_a_report_that_comes_after_its_engine_is_ready_is_not_shown() -> None:
    fleet_ = Fleet()
    fleet_.make_ready("b", host="host-b", generation=2)
    fleet_.now_s += 0.1
    report(fleet_, host="host-b", generation=2, loaded=2, total=2)
    fleet_.tick()
    assert fleet.view(fleet_.state, 0.0).hosts == ()


def load(fleet_: Fleet, *, bytes_per_s: float, total: int, for_s: float) -> float | None:
    """Report a load each five seconds; the seconds after which an incident was opened, if any."""
    began_s = fleet_.now_s
    while fleet_.now_s - began_s <= for_s:
        done_s = fleet_.now_s - began_s
        effects = report(fleet_, loaded=min(total, int(done_s * bytes_per_s)), total=total)
        if any(isinstance(effect, WriteIncident) for effect in effects):
            return done_s
        assert told_to_leave((*effects, *fleet_.tick(5.0))) == []
    return None


def test_a_slow_load_is_an_alarm_within_two_minutes_and_nothing_is_ended() -> None:
    """A gigabyte a minute, as it was seen: 400 GB would take 400 minutes."""
    fleet_ = Fleet()
    fleet_.make_ready("b")
    after_s = load(fleet_, bytes_per_s=GB / 60, total=400 * GB, for_s=600.0)
    assert after_s is not None
    assert after_s <= 120.0
    assert only(fleet_).cause is Cause.LOAD_SLOW
    assert "1000.0 MB of 400000.0 MB came in 60 s" in only(fleet_).evidence[0]
    assert "takes 400 minutes" in only(fleet_).evidence[0]
    assert fleet_.state_of("b") is ReplicaState.READY
    fleet_.make_ready("b", "a2", host="host-a", generation=2)
    assert only(fleet_).closed_s is not None


def test_a_load_that_brings_nothing_is_slow_too() -> None:
    after_s = load(Fleet(), bytes_per_s=0.0, total=GB, for_s=300.0)
    assert after_s is not None
    assert after_s <= 120.0


@pytest.mark.parametrize("bytes_per_s", [3 * GB, 0.3 * GB])
def test_a_long_load_that_goes_well_is_none(bytes_per_s: float) -> None:
    assert load(Fleet(), bytes_per_s=bytes_per_s, total=400 * GB, for_s=1500.0) is None


def test_the_next_start_ends_the_slow_loads_incident() -> None:
    fleet_ = Fleet()
    load(fleet_, bytes_per_s=GB / 60, total=400 * GB, for_s=600.0)
    report(fleet_, generation=3, total=GB)
    assert only(fleet_).closed_s == fleet_.now_s


def test_a_late_word_of_an_earlier_start_changes_nothing() -> None:
    fleet_ = Fleet()
    report(fleet_, generation=3, loaded=1, total=2)
    before = fleet_.state
    report(fleet_, generation=2, loaded=2, total=2)
    assert fleet_.state is before
