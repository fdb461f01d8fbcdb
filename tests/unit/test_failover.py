"""What becomes of a request that lost its attempt."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineFaultError,
    ExpertReadError,
    HeadraceError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    WeightsMismatchError,
)
from headrace_replicas.contract.fleet import AttemptFailure
from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve.failover import (
    Complete,
    Fail,
    Loss,
    Resume,
    Retry,
    Wait,
    decide,
    failure_of,
)

SETTINGS = FailoverSettings(max_moves=2, no_replica_wait_s=30.0)
DIED = Loss(
    replica_id="a",
    failure="died",
    raw_text="ActorDiedError: killed",
    delivered_tokens=7,
    finished=False,
    moves=0,
    another_available=True,
    deadline_s=200.0,
    now_s=100.0,
)
STALLED = replace(DIED, failure="stalled")

losses = st.builds(
    Loss,
    replica_id=st.just("a"),
    failure=st.sampled_from([*get_args(AttemptFailure), None]),
    error=st.sampled_from([None, InvalidRequestError("bad"), OverloadedError("full")]),
    raw_text=st.sampled_from(["", "as it came"]),
    delivered_tokens=st.integers(0, 50),
    finished=st.booleans(),
    moves=st.integers(0, 4),
    another_available=st.booleans(),
    waited_s=st.floats(0.0, 60.0),
    deadline_s=st.none() | st.floats(0.0, 200.0),
    now_s=st.floats(0.0, 200.0),
)


def error_of(loss: Loss) -> HeadraceError:
    decision = decide(loss, SETTINGS)
    assert isinstance(decision, Fail)
    return decision.error


@pytest.mark.parametrize("failure", get_args(AttemptFailure))
def test_what_was_delivered_is_resumed(failure: AttemptFailure) -> None:
    """Any failure with tokens delivered and a replica to go to resumes; without tokens, retries."""
    loss = replace(DIED, failure=failure)
    assert decide(loss, SETTINGS) == Resume(delivered_tokens=7)
    assert decide(replace(loss, delivered_tokens=0), SETTINGS) == Retry()


def test_a_finished_answer_is_complete() -> None:
    """A loss after the finish changes nothing, past the deadline too."""
    assert decide(replace(DIED, finished=True, now_s=999.0, moves=9), SETTINGS) == Complete()


def test_a_clients_own_mistake_is_not_tried_elsewhere() -> None:
    """An error that no replica could cure goes to the client as it is."""
    error = ContextLengthExceededError("too long")
    assert error_of(replace(DIED, failure=None, error=error)) is error


def test_a_busy_replica_is_left_for_another() -> None:
    """A shed attempt is tried elsewhere, and at the last move the client learns of the load."""
    error = OverloadedError("full")
    shed = replace(DIED, failure=None, error=error, delivered_tokens=0)
    assert decide(shed, SETTINGS) == Retry()
    assert error_of(replace(shed, moves=2)) is error
    assert error_of(replace(shed, another_available=False, waited_s=30.0)) is error


def test_moves_are_bounded() -> None:
    """The third loss ends the request, with the text of the failure in the error."""
    assert decide(replace(DIED, moves=1), SETTINGS) == Resume(delivered_tokens=7)
    error = error_of(replace(DIED, moves=2))
    assert isinstance(error, ReplicaLostError)
    assert "ActorDiedError: killed" in str(error)
    assert isinstance(error_of(replace(DIED, moves=2, failure="faulted")), EngineFaultError)
    assert isinstance(error_of(replace(DIED, moves=2, failure="unreadable")), ExpertReadError)


def test_no_request_moves_past_its_deadline() -> None:
    """At its deadline a request ends with that error, whatever replicas there are."""
    assert isinstance(error_of(replace(DIED, now_s=200.0)), DeadlineExceededError)
    assert isinstance(error_of(replace(STALLED, now_s=200.0)), DeadlineExceededError)


@pytest.mark.parametrize("change", [{"another_available": False}, {"moves": 2}])
def test_a_stalled_attempt_with_no_better_place_is_kept(change: dict[str, int]) -> None:
    """Silence is not death: with nowhere to go the attempt stays open until the deadline."""
    loss = replace(STALLED, **change)  # type: ignore[arg-type]  # both fields take these values
    assert decide(loss, SETTINGS) == Wait(keep_attempt=True, until_s=200.0)


def test_a_lost_request_waits_for_a_replica_and_then_gives_up() -> None:
    """It waits `no_replica_wait_s` in all, never past its deadline, and then gets a 503."""
    alone = replace(DIED, another_available=False)
    assert decide(alone, SETTINGS) == Wait(keep_attempt=False, until_s=130.0)
    later = replace(alone, waited_s=20.0, now_s=120.0)
    assert decide(later, SETTINGS) == Wait(keep_attempt=False, until_s=130.0)
    hurried = replace(alone, deadline_s=110.0)
    assert decide(hurried, SETTINGS) == Wait(keep_attempt=False, until_s=110.0)
    error = error_of(replace(alone, waited_s=30.0, now_s=130.0))
    assert isinstance(error, NoReplicaError)
    assert error.http_status == 503


@given(losses)
def test_every_loss_has_one_bounded_outcome(loss: Loss) -> None:
    """No move past the limit or the deadline, no resume of nothing, no wait into the past."""
    decision = decide(loss, SETTINGS)
    assert isinstance(decision, Complete) == loss.finished
    match decision:
        case Resume(delivered_tokens=tokens):
            assert tokens == loss.delivered_tokens > 0
        case Retry():
            assert loss.delivered_tokens == 0
        case Wait(keep_attempt=keep, until_s=until_s):
            assert keep == (loss.failure == "stalled")
            assert until_s is None or until_s > loss.now_s
        case Fail(error=error):
            assert str(error)
        case Complete():
            pass
    if isinstance(decision, (Resume, Retry)):
        assert loss.moves < SETTINGS.max_moves
        assert loss.another_available
        assert loss.deadline_s is None or loss.now_s < loss.deadline_s


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (EngineFaultError("x"), "faulted"),
        (ExpertReadError("x"), "unreadable"),
        (WeightsMismatchError("x"), "mismatch"),
        (ReplicaLostError("x"), "died"),
        (InvalidRequestError("x"), None),
        (OverloadedError("x"), None),
        (DeadlineExceededError("x"), None),
    ],
)
def test_only_a_replicas_own_errors_speak_against_it(
    error: HeadraceError, failure: AttemptFailure | None
) -> None:
    """A refused, shed or late request is no failure of the replica that says so."""
    assert failure_of(error) == failure
