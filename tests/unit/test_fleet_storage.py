"""Trouble with files: whose incident names it, and when it takes a replica out."""

from typing import get_args

import pytest

from headrace_replicas.contract.fleet import (
    Cause,
    DrainOrdered,
    Incident,
    ProbeKind,
    ReplicaState,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve.fleet_symptoms import REOPEN_S
from tests.support.fleet import Fleet, told_to_leave

WAITS = "a read of /m/model-2 at byte 7 has not come back for 3.0 s"
FAILS = "/m/model-2 cannot be read at byte 7: Input/output error"


def only(fleet_: Fleet) -> Incident:
    (incident,) = fleet_.incidents.values()
    return incident


def ready(*names: str, **settings: float) -> Fleet:
    fleet_ = Fleet(FleetSettings.model_validate({"snapshot_stale_s": 3600.0, **settings}))
    fleet_.make_ready(*names)
    return fleet_


def test_slow_reads_alone_are_no_incident_and_change_no_state() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    assert fleet_.state_of("a") is ReplicaState.READY
    assert fleet_.incidents == {}


def test_a_stall_during_a_read_that_does_not_come_back_is_the_storages() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    fleet_.now_s += 5.0
    fleet_.lose_attempt("a", "stalled")
    assert only(fleet_).cause is Cause.STORAGE_FAULT
    assert only(fleet_).evidence[1] == WAITS


def test_a_stall_that_is_heard_of_first_gets_the_file_as_evidence() -> None:
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "stalled")
    fleet_.now_s += 1.0
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    fleet_.says("a", storage_trouble=WAITS.replace("3.0", "4.0"), storage_troubles=1)
    assert only(fleet_).cause is Cause.REPLICA_STALLED
    assert only(fleet_).evidence[1:] == (WAITS,)


def test_an_incident_that_is_just_over_still_learns_of_the_file() -> None:
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "stalled")
    fleet_.answer("a")
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    assert only(fleet_).evidence[-1] == WAITS
    assert only(fleet_).closed_s is not None
    fleet_.now_s += REOPEN_S
    fleet_.says("a", storage_trouble=FAILS, storage_troubles=2)
    assert only(fleet_).evidence[-1] == WAITS


def test_a_canary_that_runs_out_of_time_over_a_read_is_the_storages() -> None:
    fleet_ = ready("a", "b")
    fleet_.tick(11.0)
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    fleet_.no_answer("a")
    assert only(fleet_).cause is Cause.STORAGE_FAULT


def test_old_trouble_explains_no_stall() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    fleet_.now_s += 60.0
    fleet_.says("a", storage_trouble=WAITS, storage_troubles=1)
    fleet_.lose_attempt("a", "stalled")
    assert only(fleet_).cause is Cause.REPLICA_STALLED
    assert len(only(fleet_).evidence) == 1


def test_a_read_that_waits_on_stays_recent() -> None:
    fleet_ = ready("a", "b")
    for waited_s in (3, 13, 23, 33):
        trouble = WAITS.replace("3.0", f"{waited_s}.0")
        fleet_.says("a", storage_trouble=trouble, storage_troubles=1)
        fleet_.now_s += 10.0
    fleet_.lose_attempt("a", "stalled")
    assert only(fleet_).cause is Cause.STORAGE_FAULT


def test_an_unreadable_expert_makes_suspect_until_a_probe_passes() -> None:
    """The engine computes rightly, and others may need other bytes: it is routed last, not out."""
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "unreadable")
    assert fleet_.state_of("a") is ReplicaState.SUSPECT
    assert only(fleet_).cause is Cause.STORAGE_FAULT
    fleet_.answer("a")
    assert fleet_.state_of("a") is ReplicaState.READY
    assert only(fleet_).closed_s is not None


def test_a_canary_that_cannot_be_read_takes_a_replica_out_and_then_replaces_it() -> None:
    fleet_ = ready("a", "b")
    fleet_.answer("a", passed=False, unreadable=FAILS)
    assert fleet_.state_of("a") is ReplicaState.SUSPENDED
    assert only(fleet_).cause is Cause.STORAGE_FAULT
    assert FAILS in only(fleet_).evidence[0]
    assert told_to_leave(fleet_.answer("a", passed=False, unreadable=FAILS)) == ["a"]
    assert len(fleet_.incidents) == 1


@pytest.mark.parametrize("kind", get_args(ProbeKind))
def test_a_replica_that_lost_its_files_is_replaced_whatever_its_probes_say(kind: ProbeKind) -> None:
    """What its canary needs may lie in memory; the order waits until the budget allows it."""
    fleet_ = ready("a", "b", "c")
    fleet_.hear(DrainOrdered(replica_id="c", drain=True, at_s=fleet_.now_s))
    fleet_.says("a", storage_trouble=FAILS, storage_troubles=3, storage_lost=True)
    for _ in range(3):
        assert told_to_leave(fleet_.answer("a", kind=kind)) == []
        assert fleet_.state_of("a") is ReplicaState.SUSPECT
    assert only(fleet_).closed_s is None
    back = fleet_.hear(DrainOrdered(replica_id="c", drain=False, at_s=fleet_.now_s))
    assert told_to_leave(back) == ["a"]


def test_a_lost_file_is_told_once_and_with_its_incident() -> None:
    fleet_ = ready("a", "b")
    effects = fleet_.says("a", storage_trouble=FAILS, storage_troubles=3, storage_lost=True)
    assert told_to_leave(effects) == ["a"]
    assert only(fleet_).cause is Cause.STORAGE_FAULT
    assert only(fleet_).evidence == (f"lost its files: {FAILS}",)
    fleet_.says("a", storage_trouble=FAILS, storage_troubles=3, storage_lost=True)
    assert len(only(fleet_).evidence) == 1


def test_a_new_engine_starts_with_a_clean_sheet() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", storage_trouble=FAILS, storage_troubles=3, storage_lost=True)
    fleet_.says("a", generation=2)
    fleet_.answer("a", generation=2)
    assert fleet_.state_of("a") is ReplicaState.READY
    assert only(fleet_).closed_s is not None
