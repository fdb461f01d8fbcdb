"""When the fleet opens an incident, adds to it, and closes it."""

from headrace_replicas.contract.fleet import (
    Cause,
    DrainOrdered,
    Incident,
    ReplicaState,
    RequestMoved,
)
from headrace_serve.fleet_symptoms import REOPEN_S
from tests.support.fleet import Fleet


def only(fleet_: Fleet) -> Incident:
    """The one incident there is."""
    (incident,) = fleet_.incidents.values()
    return incident


def move_request(fleet_: Fleet, from_replica: str, gap_s: float) -> None:
    fleet_.hear(
        RequestMoved(
            request_id="q",
            from_replica=from_replica,
            to_replica="b",
            attempt=2,
            replayed_tokens=10,
            gap_s=gap_s,
            at_s=fleet_.now_s,
        )
    )


def test_a_death_after_a_stall_is_one_incident() -> None:
    """Stall, death and its disappearance are three symptoms of one incident."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.lose_attempt("a", "stalled")
    fleet_.now_s += 1.0
    fleet_.lose_attempt("a", "died")
    fleet_.members("b")
    fleet_.lose_attempt("a", "died")
    incident = only(fleet_)
    assert incident.cause is Cause.REPLICA_STALLED
    assert len(incident.evidence) == 4
    assert incident.host == "host-a"


def test_an_incident_is_mitigated_when_its_culprit_is_out_of_rotation() -> None:
    """A suspect is out of rotation only while another replica is ready."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.lose_attempt("a", "stalled")
    assert only(fleet_).mitigated_s is None
    fleet_.now_s += 1.0
    fleet_.members("a", "b")
    fleet_.says("b")
    fleet_.answer("b")
    assert only(fleet_).mitigated_s == fleet_.now_s
    assert only(fleet_).closed_s is None


def test_an_incident_counts_the_requests_that_moved() -> None:
    """Moves, replayed tokens and the worst gap are counted, after closing too."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    move_request(fleet_, "a", 9.0)
    assert fleet_.incidents == {}, "a move without an incident is an operator's"
    fleet_.lose_attempt("a", "died")
    move_request(fleet_, "a", 0.2)
    move_request(fleet_, "a", 0.7)
    fleet_.make_ready("b", "a2", host="host-a", generation=2)
    move_request(fleet_, "a", 0.4)
    incident = only(fleet_)
    assert incident.closed_s is not None
    assert (incident.requests_moved, incident.replayed_tokens) == (3, 30)
    assert incident.worst_gap_s == 0.7


def test_the_culprits_own_canary_closes_its_incident() -> None:
    """A replica that passes again ends its incident at that moment."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.lose_attempt("a", "faulted")
    fleet_.now_s += 2.0
    fleet_.answer("a")
    assert only(fleet_).closed_s == fleet_.now_s


def test_a_flapping_replica_has_one_incident() -> None:
    """A symptom within `REOPEN_S` of closing opens the same incident again; later, a new one."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    for _ in range(5):
        fleet_.lose_attempt("a", "faulted")
        assert only(fleet_).closed_s is None
        fleet_.answer("a")
        fleet_.now_s += REOPEN_S / 2
    fleet_.now_s += REOPEN_S
    fleet_.lose_attempt("a", "faulted")
    assert len(fleet_.incidents) == 2


def test_the_successor_on_the_same_device_closes_the_incident() -> None:
    """With two lost, each successor closes the incident of its own device."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.members()
    fleet_.members("b2")
    fleet_.says("b2", host="host-b", generation=2)
    fleet_.answer("b2", generation=2)
    closed = {one.replica: one.closed_s is not None for one in fleet_.incidents.values()}
    assert closed == {"a": False, "b": True}


def test_a_newcomer_elsewhere_closes_the_oldest_incident() -> None:
    """A spare host stands in for the replica that is out longest."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.members("b")
    fleet_.now_s += 1.0
    fleet_.members()
    fleet_.make_ready("spare")
    closed = {one.replica: one.closed_s is not None for one in fleet_.incidents.values()}
    assert closed == {"a": True, "b": False}


def test_each_newcomer_elsewhere_stands_in_for_one() -> None:
    """Two spare hosts make up for two losses, not twice for the same."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.members()
    fleet_.make_ready("spare1")
    fleet_.make_ready("spare1", "spare2")
    assert [one.closed_s is not None for one in fleet_.incidents.values()] == [True, True]


def test_a_successor_need_not_wait_for_the_old_process() -> None:
    """The incident of a replica that was told to leave ends when a newcomer is ready."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.answer("a", passed=False)
    fleet_.answer("a", passed=False)
    assert fleet_.state_of("a") is ReplicaState.DRAINING
    fleet_.make_ready("a", "spare")
    assert only(fleet_).closed_s is not None


def test_a_successor_that_was_there_first_closes_the_incident_too() -> None:
    """A death that is noticed after the successor is ready is made up for at once."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.members("a", "a2")
    fleet_.says("a2", host="host-a", generation=2)
    fleet_.answer("a2", generation=2)
    fleet_.lose_attempt("a", "died")
    assert only(fleet_).closed_s == fleet_.now_s


def test_a_replica_that_never_said_where_it_ran_is_made_up_for_by_anyone() -> None:
    """A death before the first snapshot is closed by the next replica that gets ready."""
    fleet_ = Fleet()
    fleet_.members("a")
    fleet_.members()
    assert only(fleet_).host == ""
    fleet_.make_ready("b")
    assert only(fleet_).closed_s is not None


def test_a_planned_end_is_no_incident() -> None:
    """A drained replica that goes away was meant to."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.hear(DrainOrdered(replica_id="a", drain=True, at_s=fleet_.now_s))
    fleet_.members()
    fleet_.lose_attempt("a", "died")
    assert fleet_.state_of("a") is ReplicaState.LOST
    assert fleet_.incidents == {}


def test_a_replaced_replicas_end_belongs_to_its_incident() -> None:
    """Its ordered death is evidence in the incident that led to it, and opens no other."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.answer("a", passed=False)
    fleet_.answer("a", passed=False)
    fleet_.says("a", state=ReplicaState.STOPPING)
    fleet_.lose_attempt("a", "died")
    assert only(fleet_).cause is Cause.CANARY_FAILED
    assert only(fleet_).mitigated_s is not None


def test_a_replica_that_leaves_unasked_is_an_incident() -> None:
    """An idle engine that ends says only that it stops: that is an engine fault."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.says("a", state=ReplicaState.STOPPING)
    assert only(fleet_).cause is Cause.ENGINE_FAULT


def test_a_replica_that_nobody_could_ask_because_it_was_dead_died() -> None:
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.no_answer("a", timed_out=False)
    fleet_.members("b")
    [incident] = fleet_.incidents.values()
    assert incident.cause is Cause.REPLICA_DIED
