"""A controller that begins anew: what was open is taken up, and nobody pays for it."""

from dataclasses import replace

import pytest

from headrace_replicas.contract.fleet import (
    Cause,
    HostReported,
    HostState,
    Incident,
    PoisonFound,
    ReplicaState,
)
from headrace_serve import fleet, incidents
from headrace_serve.fleet_inherited import INHERITED_S
from tests.support.fleet import Fleet, probed, told_to_leave


def left_open(
    replica: str = "a", cause: Cause = Cause.METAL_FAULT, generation: int = 1
) -> Incident:
    return incidents.open_(
        cause=cause,
        host="host-a",
        replica=replica,
        generation=generation,
        text="as it was",
        at_s=900.0,
    )


def restarted(*open_: Incident) -> Fleet:
    """A fleet whose controller begins now and finds these incidents in its log."""
    fleet_ = Fleet()
    fleet_.state = fleet.begin(open_, fleet_.now_s)
    fleet_.incidents = {one.id: one for one in open_}
    return fleet_


def only(fleet_: Fleet) -> Incident:
    (incident,) = fleet_.incidents.values()
    return incident


def test_nobody_is_replaced_or_probed_twice_because_the_controller_is_new() -> None:
    """Each replica gets one canary, and goes on; with work it needs not even that."""
    fleet_ = restarted()
    names = [f"r{number}" for number in range(20)]
    sent, left = list(probed(fleet_.members(*names))), []
    for name in names:
        effects = fleet_.says(name, faults=2, fault_kind="timeout", fault_answer="canary")
        left += told_to_leave(effects)
    for name in names:
        effects = fleet_.answer(name)
        sent += probed(effects)
        left += told_to_leave(effects)
    effects = fleet_.tick(1.0)
    assert sorted(sent + probed(effects)) == sorted(names)
    assert left + told_to_leave(effects) == []
    assert all(fleet_.state_of(name) is ReplicaState.READY for name in names)
    assert fleet_.incidents == {}


def test_an_owed_replacement_is_still_owed_and_waits_for_others() -> None:
    owed = {"faults": 1, "fault_kind": "timeout", "fault_answer": "replace"}
    fleet_ = restarted(left_open())
    fleet_.members("a", "b")
    assert told_to_leave(fleet_.says("a", **owed)) == [], "nobody else is ready yet"
    fleet_.answer("a")
    assert fleet_.state_of("a") is ReplicaState.READY
    assert only(fleet_).closed_s is None
    fleet_.says("b")
    assert told_to_leave(fleet_.answer("b")) == ["a"]


def test_an_incident_is_closed_when_its_replica_is_ready() -> None:
    fleet_ = restarted(left_open())
    fleet_.make_ready("a")
    assert only(fleet_).closed_s == fleet_.now_s


def test_a_replica_that_dies_again_adds_to_the_incident_that_was_open() -> None:
    fleet_ = restarted(left_open())
    fleet_.members("a")
    fleet_.says("a")
    fleet_.lose_attempt("a", "died")
    assert only(fleet_).closed_s is None
    assert len(only(fleet_).evidence) == 2


@pytest.mark.parametrize(("generation", "closes"), [(1, False), (2, True)])
def test_a_ready_successor_on_its_host_closes_it(generation: int, closes: bool) -> None:
    fleet_ = restarted(left_open())
    fleet_.make_ready("a2", host="host-a", generation=generation)
    fleet_.tick()
    assert (only(fleet_).closed_s is not None) is closes


def test_it_is_not_left_open_for_ever() -> None:
    fleet_ = restarted(left_open())
    fleet_.make_ready("z")
    fleet_.tick(INHERITED_S - 1.0)
    assert only(fleet_).closed_s is None
    fleet_.tick(1.0)
    assert only(fleet_).closed_s is not None
    assert "the controller found" in only(fleet_).timeline[-1][1]
    fleet_.tick()
    assert fleet_.state.inherited == {}


def test_the_last_words_of_the_dead_reach_it() -> None:
    fleet_ = restarted(left_open(cause=Cause.REPLICA_DIED))
    words = "ended with page_fault: kIOGPUCommandBufferCallbackErrorPageFault"
    fleet_.says("a2", host="host-a", generation=2, predecessor=words, predecessor_generation=1)
    assert only(fleet_).cause is Cause.METAL_FAULT
    assert only(fleet_).evidence[-1] == words


def test_a_slow_spell_ends_with_its_replica_ready() -> None:
    """Whether it is still slow is found out anew."""
    fleet_ = restarted(left_open(cause=Cause.REPLICA_SLOW))
    fleet_.make_ready("a")
    fleet_.tick()
    assert only(fleet_).closed_s is not None


def test_a_hold_goes_on_under_its_incident() -> None:
    fleet_ = restarted(replace(left_open("", Cause.HOST_HELD, 0), host="host-a"))
    fleet_.hear(
        HostReported(
            host="host-a",
            device=0,
            generation=0,
            state=HostState.QUARANTINED,
            reason="stranded",
            at_s=fleet_.now_s,
        )
    )
    fleet_.tick(INHERITED_S + 1.0)
    assert only(fleet_).closed_s is None
    assert only(fleet_).evidence[-1].endswith("stranded")


def test_a_closed_incident_is_left_alone() -> None:
    closed = incidents.close(left_open(), why="over", at_s=950.0)
    fleet_ = restarted(closed)
    assert fleet_.state.inherited == {}
    fleet_.make_ready("a")
    assert only(fleet_) is closed


def test_a_stopped_request_is_recorded_once_and_told_to_all_gateways() -> None:
    fleet_ = Fleet()
    fleet_.make_ready("a")
    found = PoisonFound(
        fingerprint="f" * 32,
        request_id="q",
        replica_id="a",
        losses=("replica x died", "replica a died"),
        until_s=fleet_.now_s + 60.0,
        at_s=fleet_.now_s,
    )
    fleet_.hear(found)
    assert fleet_.hear(found) == ()
    assert only(fleet_).cause is Cause.POISON_REQUEST
    assert only(fleet_).evidence[1:] == ("replica x died", "replica a died")
    assert (only(fleet_).host, only(fleet_).closed_s) == ("host-a", fleet_.now_s)
    assert fleet.view(fleet_.state, 0.0).poison == (found,)
    fleet_.tick(60.0)
    assert fleet.view(fleet_.state, 0.0).poison == ()
