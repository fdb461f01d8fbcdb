"""Replacement, drains and losses under the budget of replicas that may be out."""

import pytest

from headrace_replicas.contract.fleet import DrainOrdered, ReplicaState
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve import fleet
from headrace_serve.fleet_orders import LOST_KEPT_COUNT, LOST_KEPT_S, out_of_service
from tests.support.fleet import PATIENT, Fleet, probed, told_to_leave

STARTING, READY, SUSPECT, SUSPENDED, DRAINING, STOPPING, LOST = ReplicaState


def drain(fleet_: Fleet, replica_id: str, *, back: bool = False) -> None:
    fleet_.hear(DrainOrdered(replica_id=replica_id, drain=not back, at_s=fleet_.now_s))


def fail_two_canaries(fleet_: Fleet, replica_id: str) -> list[str]:
    """The replicas told to leave by the second wrong canary of this one."""
    fleet_.answer(replica_id, passed=False)
    return told_to_leave(fleet_.answer(replica_id, passed=False))


def test_replacement_waits_for_the_budget() -> None:
    """With one out already, the next replacement is owed, shown, and granted with the place."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b", "c")
    assert fail_two_canaries(fleet_, "a") == ["a"]
    assert fail_two_canaries(fleet_, "b") == []
    assert fleet_.state_of("b") is SUSPENDED
    reasons = {one.replica_id: one.reason for one in fleet.view(fleet_.state, 0.0).replicas}
    assert "replace owed" in reasons["b"]
    fleet_.members("b", "c", "a2")
    fleet_.says("a2", host="host-a", generation=2)
    assert told_to_leave(fleet_.answer("a2", generation=2)) == ["b"]


def test_a_loss_uses_the_budget_too() -> None:
    """While a lost replica is not made up for, no other is replaced by choice."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.lose_attempt("b", "died")
    assert fail_two_canaries(fleet_, "a") == []
    fleet_.members("a", "b2")
    fleet_.says("b2", host="host-b", generation=2)
    assert told_to_leave(fleet_.answer("b2", generation=2)) == ["a"]


def test_a_host_that_never_returns_does_not_block_the_others_for_ever() -> None:
    """A loss that nobody made up for within `LOST_KEPT_S` leaves the budget."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.members("a")
    assert fail_two_canaries(fleet_, "a") == []
    assert told_to_leave(fleet_.tick(LOST_KEPT_S)) == []
    assert told_to_leave(fleet_.tick(1.0)) == ["a"]


def test_a_passed_canary_cancels_an_owed_replacement() -> None:
    """A replica that proves well before its turn comes stays."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    drain(fleet_, "b")
    fail_two_canaries(fleet_, "a")
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY
    drain(fleet_, "b", back=True)
    assert told_to_leave(fleet_.tick()) == []
    assert fleet_.state_of("a") is READY


def test_an_order_to_leave_is_repeated() -> None:
    """A replica that has not begun to leave within a period is told again, until it does."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fail_two_canaries(fleet_, "a")
    assert told_to_leave(fleet_.tick(9.0)) == []
    assert told_to_leave(fleet_.tick(1.0)) == ["a"]
    fleet_.says("a", state=STOPPING)
    assert fleet_.state_of("a") is STOPPING
    assert told_to_leave(fleet_.tick(20.0)) == []


def test_a_drain_keeps_the_process_and_can_be_ended() -> None:
    """A drained replica is told nothing and not probed; called back, a canary decides."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    drain(fleet_, "a")
    assert fleet_.state_of("a") is DRAINING
    effects = fleet_.tick(60.0)
    assert (probed(effects), told_to_leave(effects)) == ([], [])
    drain(fleet_, "a", back=True)
    assert fleet_.state_of("a") is SUSPENDED
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY


def test_a_drain_beyond_the_budget_is_owed_and_can_be_withdrawn() -> None:
    """The second drain waits for the first; withdrawn before its turn it never happens."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b", "c")
    drain(fleet_, "a")
    drain(fleet_, "b")
    drain(fleet_, "c")
    assert (fleet_.state_of("b"), fleet_.state_of("c")) == (READY, READY)
    drain(fleet_, "b", back=True)
    drain(fleet_, "a", back=True)
    assert (fleet_.state_of("b"), fleet_.state_of("c")) == (READY, DRAINING)


def test_an_ordered_replacement_is_not_an_operators_to_undo() -> None:
    """Ending a drain does not bring back a replica that must be replaced."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fail_two_canaries(fleet_, "a")
    drain(fleet_, "a", back=True)
    assert fleet_.state_of("a") is DRAINING


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_as_many_as_the_budget_go_at_once(budget: int) -> None:
    """With every canary failing, exactly `max_unavailable` replicas leave, oldest order first."""
    fleet_ = Fleet(FleetSettings(max_unavailable=budget, snapshot_stale_s=3600.0))
    names = ("a", "b", "c", "d")
    fleet_.make_ready(*names)
    for name in names:
        fail_two_canaries(fleet_, name)
        fleet_.now_s += 1.0
    assert [name for name in names if fleet_.state_of(name) is DRAINING] == list(names[:budget])
    assert out_of_service(fleet_.state, fleet_.now_s) == budget


def test_a_replica_that_was_unlisted_by_mistake_starts_anew() -> None:
    """One empty list does not end the fleet: who is listed again needs a canary, no restart."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.members()
    assert fleet_.state_of("a") is LOST
    assert probed(fleet_.members("a", "b")) == ["a", "b"]
    fleet_.answer("a")
    fleet_.answer("b")
    assert (fleet_.state_of("a"), fleet_.state_of("b")) == (READY, READY)
    assert all(incident.closed_s is not None for incident in fleet_.incidents.values())


def test_a_death_that_was_none_is_taken_back() -> None:
    """A replica reported dead that is still listed and goes on sending snapshots starts anew."""
    fleet_ = Fleet(FleetSettings(snapshot_stale_s=5.0))
    fleet_.make_ready("a")
    fleet_.lose_attempt("a", "died")
    fleet_.says("a")
    fleet_.members("a")
    assert fleet_.state_of("a") is LOST
    fleet_.now_s += 5.1
    fleet_.members("a")
    assert fleet_.state_of("a") is LOST, "without a newer snapshot it is dead"
    fleet_.says("a")
    fleet_.members("a")
    assert fleet_.state_of("a") is STARTING


def test_a_snapshot_may_come_before_the_list() -> None:
    """A replica known by its snapshot alone is not lost because the list is late."""
    fleet_ = Fleet(FleetSettings(snapshot_stale_s=5.0))
    fleet_.says("a")
    fleet_.members()
    assert fleet_.state_of("a") is STARTING
    fleet_.now_s += 6.0
    fleet_.members()
    assert fleet_.state_of("a") is LOST
    assert fleet_.incidents == {}


def test_the_lost_are_forgotten_once_made_up_for() -> None:
    """A lost replica stays on the board for `LOST_KEPT_S`, and while its incident is open."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.members()
    fleet_.tick(LOST_KEPT_S + 1.0)
    assert fleet_.state_of("a") is LOST
    fleet_.make_ready("a2", host="host-a", generation=2)
    fleet_.tick()
    assert list(fleet_.state.replicas) == ["a2"]


def test_a_lost_replica_that_is_still_listed_is_not_forgotten() -> None:
    """Forgotten, a dead replica that Ray Serve still lists would come back as a new one."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.lose_attempt("a", "died")
    fleet_.make_ready("a", "b", "spare")
    fleet_.tick(LOST_KEPT_S + 1.0)
    fleet_.members("a", "b", "spare")
    assert fleet_.state_of("a") is LOST
    fleet_.members("b", "spare")
    fleet_.tick()
    assert set(fleet_.state.replicas) == {"b", "spare"}


def test_a_crash_loop_does_not_fill_the_memory() -> None:
    """However many replicas die before any is ready, a bounded number is remembered."""
    fleet_ = Fleet(PATIENT)
    for number in range(LOST_KEPT_COUNT + 20):
        fleet_.members(f"r{number}")
        fleet_.now_s += 1.0
    fleet_.members()
    fleet_.tick()
    assert len(fleet_.state.replicas) == LOST_KEPT_COUNT
