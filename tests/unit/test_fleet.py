"""Replica states, and what the board shows."""

import pytest

from headrace_replicas.contract.fleet import (
    AttemptFailure,
    Cause,
    DrainOrdered,
    ProbeFinished,
    ReplicaState,
    SnapshotSeen,
    Tick,
    WriteIncident,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve import fleet
from headrace_serve.fleet_state import (
    TRANSITIONS,
    ImpossibleTransitionError,
    Moment,
    Trigger,
    moved,
)
from tests.support.fleet import Fleet, probed, snapshot, verdict

STARTING, READY, SUSPECT, SUSPENDED, DRAINING, STOPPING, LOST = ReplicaState


def test_a_listed_replica_starts_and_is_probed_at_once() -> None:
    """A replica that Ray Serve lists is starting, and its probe goes out in the same step."""
    fleet_ = Fleet()
    assert probed(fleet_.members("a")) == ["a"]
    assert fleet_.state_of("a") is STARTING


def test_a_snapshot_alone_makes_no_replica_ready() -> None:
    """A replica that calls itself ready is starting until a generation probe passed."""
    fleet_ = Fleet()
    assert probed(fleet_.says("a")) == ["a"]
    assert fleet_.state_of("a") is STARTING
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY


def test_an_older_snapshot_is_dropped() -> None:
    """A snapshot with an older sequence or generation changes nothing at all."""
    fleet_ = Fleet()
    fleet_.says("a", generation=3, sequence=10)
    before = fleet_.state
    for generation, sequence in ((3, 10), (3, 9), (2, 11)):
        fleet_.says("a", generation=generation, sequence=sequence)
        assert fleet_.state is before


def test_a_new_engine_under_an_old_id_starts_anew() -> None:
    """A higher generation under a known id has proved nothing yet."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.says("a", generation=2)
    assert fleet_.state_of("a") is STARTING


@pytest.mark.parametrize(
    ("failure", "state", "cause"),
    [
        ("died", LOST, Cause.REPLICA_DIED),
        ("stalled", SUSPECT, Cause.REPLICA_STALLED),
        ("ended_early", SUSPENDED, Cause.STREAM_ENDED_EARLY),
        ("faulted", SUSPENDED, Cause.ENGINE_FAULT),
        ("unreadable", SUSPECT, Cause.STORAGE_FAULT),
        ("mismatch", SUSPENDED, Cause.WEIGHTS_MISMATCH),
    ],
)
def test_a_lost_attempt_moves_its_replica_at_once(
    failure: AttemptFailure, state: ReplicaState, cause: Cause
) -> None:
    """Each way to lose an attempt has its state, its incident, and a probe unless it is lost."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    effects = fleet_.lose_attempt("a", failure)
    assert fleet_.state_of("a") is state
    assert [incident.cause for incident in fleet_.incidents.values()] == [cause]
    assert probed(effects) == ([] if state is LOST else ["a"])


def test_a_silent_board_makes_suspect_not_lost() -> None:
    """A ready replica whose snapshots stopped is suspect, and ready again once both are back."""
    fleet_ = Fleet(FleetSettings(snapshot_stale_s=5.0))
    fleet_.make_ready("a")
    assert probed(fleet_.tick(5.1)) == ["a"]
    assert fleet_.state_of("a") is SUSPECT
    fleet_.answer("a")
    assert fleet_.state_of("a") is SUSPECT
    fleet_.says("a")
    fleet_.tick()
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY
    assert fleet_.incidents == {}


@pytest.mark.parametrize("state", [DRAINING, STOPPING, LOST])
def test_a_passing_probe_moves_nothing_that_is_on_its_way_out(state: ReplicaState) -> None:
    """A drained, stopping or lost replica stays so, whatever its canary says."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    if state is DRAINING:
        fleet_.hear(DrainOrdered(replica_id="a", drain=True, at_s=fleet_.now_s))
    elif state is STOPPING:
        fleet_.says("a", state=STOPPING)
    else:
        fleet_.members()
    for kind in ("canary", "self", "work"):
        fleet_.answer("a", kind=kind)
        assert fleet_.state_of("a") is state


def test_a_transition_that_cannot_be_tells_its_story() -> None:
    """The error names the replica, where it stands, where it should go, and the notice."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    moment = Moment(notice=Tick(at_s=7.0), settings=fleet_.settings)
    with pytest.raises(ImpossibleTransitionError) as caught:
        moved(fleet_.state.replicas["a"], Trigger.CALLED_BACK, "a test", moment)
    for part in ("replica a", "from ready", "to suspended", "Tick(at_s=7.0)"):
        assert part in str(caught.value)


def test_a_proof_leads_to_ready_from_three_states_only() -> None:
    """The table lets a passed probe move starting, suspect and suspended, and nothing else."""
    changed = {
        state
        for (trigger, state), to in TRANSITIONS.items()
        if trigger is Trigger.PROVED and to is not state
    }
    assert changed == {STARTING, SUSPECT, SUSPENDED}
    into_ready = {trigger for (trigger, state), to in TRANSITIONS.items() if to is READY != state}
    assert into_ready == {Trigger.PROVED, Trigger.WORKED}


def test_strangers_are_ignored() -> None:
    """A notice about a replica that nobody listed changes nothing, except that it died."""
    fleet_ = Fleet()
    before = fleet_.state
    fleet_.lose_attempt("x", "stalled")
    fleet_.no_answer("x")
    fleet_.hear(ProbeFinished(result=verdict("x"), at_s=0.0))
    fleet_.hear(DrainOrdered(replica_id="x", drain=True, at_s=0.0))
    assert fleet_.state is before


def test_a_loss_that_a_new_controller_hears_first_of_is_an_incident() -> None:
    """An engine may die while the controller is dead; gateways keep the notice for the next one."""
    fleet_ = Fleet()
    effects = fleet_.lose_attempt("x", "died")
    assert [effect.incident.cause for effect in effects if isinstance(effect, WriteIncident)] == [
        Cause.REPLICA_DIED
    ]
    assert fleet_.state.replicas["x"].state is ReplicaState.LOST


def test_the_board_shows_each_replica_once_and_sorted() -> None:
    """The view has the state's version, sorted replicas, and their newest snapshots."""
    fleet_ = Fleet()
    fleet_.make_ready("b", "a")
    board = fleet.view(fleet_.state, 5.0)
    assert (board.version, board.at_s) == (fleet_.state.version, 5.0)
    assert [status.replica_id for status in board.replicas] == ["a", "b"]
    assert all(status.snapshot is not None for status in board.replicas)


def test_a_snapshot_taken_twice_is_one_change() -> None:
    """The same snapshot again gives the same object and no effect."""
    fleet_ = Fleet()
    notice = SnapshotSeen(snapshot=snapshot("a"), at_s=fleet_.now_s)
    fleet_.hear(notice)
    before = fleet_.state
    assert fleet_.hear(notice) == ()
    assert fleet_.state is before
