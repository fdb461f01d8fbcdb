"""What becomes of a request that lost its attempt.

Laws: an answer that has its finish is never touched again; a client's own mistake is never tried
elsewhere; a request moves `max_moves` times at most (and `extra_moves` if it has some) and never
past its deadline; whatever was delivered is resumed, never started anew.
"""

from dataclasses import dataclass

from headrace_replicas.contract.errors import (
    DeadlineExceededError,
    EngineFaultError,
    ExpertReadError,
    HeadraceError,
    NoReplicaError,
    ReplicaLostError,
    WeightsMismatchError,
)
from headrace_replicas.contract.fleet import AttemptFailure
from headrace_replicas.contract.settings import FailoverSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An attempt that ended, or seems to have ended, before its answer did.

    Attributes:
        failure: How the replica failed; None when it did not, as with `error`.
        error: What the replica answered on purpose instead of tokens, if anything.
        raw_text: The failure's own text.
        delivered_tokens: Output tokens that the journal holds.
        finished: Whether the journal holds a finish reason.
        moves: How often the request has moved already.
        extra_moves: Moves that it has beyond `max_moves`.
        another_available: Whether routing ranks any replica to go to now; for a stalled attempt,
            any but the one it is on.
        waited_s: Seconds since the attempt was lost, with no replica to go to.
        deadline_s: The request's, wall clock; None without one.
    """

    replica_id: str
    failure: AttemptFailure | None
    error: HeadraceError | None = None
    raw_text: str = ""
    delivered_tokens: int
    finished: bool
    moves: int
    extra_moves: int = 0
    another_available: bool
    waited_s: float = 0.0
    deadline_s: float | None
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Go on elsewhere, with the delivered tokens as output."""

    delivered_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Start elsewhere: nothing was delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Decide again when the fleet changes, and at `until_s` at the latest.

    Attributes:
        keep_attempt: Whether the present attempt stays open, because it is only silent and there
            is nobody better. Otherwise it is over and the request waits for a replica.
        until_s: Wall-clock second; None when only the attempt itself or the fleet can end it.
    """

    keep_attempt: bool
    until_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Nothing is missing: the answer had its finish before the attempt was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """End the request with this error."""

    error: HeadraceError


FailoverDecision = Resume | Retry | Wait | Complete | Fail


def failure_of(error: HeadraceError) -> AttemptFailure | None:
    """How a replica failed that answered with this error; None when the error is not its fault.

    A refused or shed request says nothing against a replica: one bad client must not take it out
    of rotation for everybody.
    """
    match error:
        case WeightsMismatchError():
            return "mismatch"
        case EngineFaultError():
            return "faulted"
        case ExpertReadError():
            return "unreadable"
        case ReplicaLostError():
            return "died"
        case _:
            return None


def decide(loss: Loss, settings: FailoverSettings) -> FailoverDecision:
    """Resume, retry, wait, or end a request whose attempt was lost."""
    ended = _ended(loss)
    if ended is not None:
        return ended
    spent = loss.moves >= settings.max_moves + loss.extra_moves
    if loss.failure == "stalled" and (spent or not loss.another_available):
        return Wait(keep_attempt=True, until_s=loss.deadline_s)
    if spent:
        return Fail(error=_moved_too_often(loss))
    if not loss.another_available:
        return _wait_for_replica(loss, settings)
    if loss.delivered_tokens > 0:
        return Resume(delivered_tokens=loss.delivered_tokens)
    return Retry()


def _ended(loss: Loss) -> Complete | Fail | None:
    """The end that no replica could change, or None."""
    if loss.finished:
        return Complete()
    if loss.failure is None and loss.error is not None and not loss.error.retryable:
        return Fail(error=loss.error)
    if loss.deadline_s is not None and loss.now_s >= loss.deadline_s:
        return Fail(error=_too_late(loss))
    return None


def _wait_for_replica(loss: Loss, settings: FailoverSettings) -> Wait | Fail:
    left_s = settings.no_replica_wait_s - loss.waited_s
    if left_s <= 0:
        shed = loss.error if loss.failure is None else None
        return Fail(error=shed or _nobody_left(loss))
    until_s = loss.now_s + left_s
    if loss.deadline_s is not None:
        until_s = min(until_s, loss.deadline_s)
    return Wait(keep_attempt=False, until_s=until_s)


def _story(loss: Loss) -> str:
    what = loss.failure or (loss.error.code if loss.error is not None else "lost")
    text = f" ({loss.raw_text})" if loss.raw_text else ""
    return (
        f"the attempt on replica {loss.replica_id} {what}{text} after {loss.delivered_tokens} "
        f"tokens and {loss.moves} moves"
    )


def _too_late(loss: Loss) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"The request's deadline passed: {_story(loss)}. Send it again with a longer timeout."
    )


def _moved_too_often(loss: Loss) -> HeadraceError:
    if loss.failure is None and loss.error is not None:
        return loss.error
    text = f"The request may not move again: {_story(loss)}. Send it again."
    match loss.failure:
        case "faulted":
            return EngineFaultError(text)
        case "unreadable":
            return ExpertReadError(text)
        case _:
            return ReplicaLostError(text)


def _nobody_left(loss: Loss) -> NoReplicaError:
    return NoReplicaError(
        f"No replica came back within {loss.waited_s:.0f} s: {_story(loss)}. Send it again later."
    )
