"""Which replica a request goes to.

Laws: starting, suspended, draining, stopping and lost replicas are never picked, since they cannot
answer or their next answer may be wrong; suspects are picked only when no ready replica is left
that shows life and that the request has not failed on; a replica that shows no life never comes
before one that does, however little work it seems to have; the order depends on the arguments
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from headrace_replicas.contract.fleet import ReplicaSnapshot, ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One replica, as the gateway that routes knows it.

    Attributes:
        state: The controller's verdict; None when the controller has not spoken of it.
        snapshot: The newest one that reached this gateway.
        in_flight_requests: Requests of this gateway that run or wait there.
        in_flight_tokens: Prompt and answer tokens of those requests at most. The snapshot may
            count some of them already; a request just sent is only here.
        suspected: This gateway lost an attempt there, and nothing has cleared it since.
        seen_s: Wall-clock second of the snapshot; 0 without one.
    """

    replica_id: str
    state: ReplicaState | None
    snapshot: ReplicaSnapshot | None
    in_flight_requests: int
    in_flight_tokens: int
    suspected: bool
    seen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAsk:
    """What is to be routed.

    Attributes:
        prompt_tokens: Tokens to prefill, replayed output included.
        max_tokens: Tokens still to generate at most.
        avoid: Replicas on which this request has failed already; they come last.
        tiebreak: Turns the order of equals, so that not everybody takes the same one.
        stale_s: A snapshot or progress older than this is no sign of life
            (`FleetSettings.snapshot_stale_s`).
    """

    prompt_tokens: int
    max_tokens: int
    avoid: frozenset[str]
    now_s: float
    tiebreak: int
    stale_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDecision:
    """The outcome for one request.

    Attributes:
        ranked: Replicas to try, best first; empty when nobody can take it now.
        reason: Why the first one is first, or why nobody is.
        rejected: (replica, why not) for all the others.
    """

    ranked: tuple[str, ...]
    reason: str
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """A candidate that may be picked, with all that orders it; smaller is better."""

    replica_id: str
    avoided: bool
    silent: bool
    suspect: bool
    finish_s: float
    requests: int
    turn: int


def pick(candidates: Sequence[Candidate], ask: RouteAsk) -> RouteDecision:
    """Rank the replicas that may take this request by when each would finish it."""
    barred = tuple(
        (candidate.replica_id, why)
        for candidate in candidates
        if (why := _bar(candidate)) is not None
    )
    names = {name for name, _ in barred}
    usable = [candidate for candidate in candidates if candidate.replica_id not in names]
    standings = _standings(usable, ask)
    panic = all(one.suspect or one.avoided or one.silent for one in standings)
    chosen = sorted((one for one in standings if panic or not one.suspect), key=_order)
    spared = (
        ()
        if panic
        else tuple(
            (one.replica_id, "suspect, and others are ready") for one in standings if one.suspect
        )
    )
    return RouteDecision(
        ranked=tuple(one.replica_id for one in chosen),
        reason=_reason(chosen, barred),
        rejected=barred + spared,
    )


def _bar(candidate: Candidate) -> str | None:
    """Why a replica may not be picked at all, or None."""
    own = None if candidate.snapshot is None else candidate.snapshot.state
    if own is ReplicaState.STOPPING:
        return "says that it is stopping"
    state = own if candidate.state is None else candidate.state
    match state:
        case ReplicaState.READY | ReplicaState.SUSPECT:
            return None
        case None:
            return "nobody has heard of it yet"
        case _:
            return str(state.value)


def _standings(usable: Sequence[Candidate], ask: RouteAsk) -> list[_Standing]:
    rates = [rate for one in usable if (rate := _measured_rate(one)) is not None]
    usual_rate = median(rates) if rates else 1.0
    turns = {name: turn for turn, name in enumerate(sorted(one.replica_id for one in usable))}
    return [
        _Standing(
            replica_id=one.replica_id,
            avoided=one.replica_id in ask.avoid,
            silent=_silent(one, ask),
            suspect=one.suspected or one.state is ReplicaState.SUSPECT,
            finish_s=_tokens_until_done(one, ask) / (_measured_rate(one) or usual_rate),
            requests=one.in_flight_requests,
            turn=(turns[one.replica_id] - ask.tiebreak) % len(turns),
        )
        for one in usable
    ]


def _silent(candidate: Candidate, ask: RouteAsk) -> bool:
    """Whether a replica shows no life: no fresh snapshot, or one that has work and stands still.

    The second is judged on the replica's own clock alone, so that skew between hosts is no sign.
    """
    snapshot = candidate.snapshot
    if snapshot is None or ask.now_s - candidate.seen_s > ask.stale_s:
        return True
    return snapshot.running > 0 and snapshot.at_s - snapshot.last_progress_s > ask.stale_s


def _tokens_until_done(candidate: Candidate, ask: RouteAsk) -> int:
    """Tokens ahead of the end of this request, its own included.

    What the snapshot says and what this gateway has there overlap by an unknown part, so the
    larger of the two counts: never less than this gateway knows by itself.
    """
    said = 0 if candidate.snapshot is None else candidate.snapshot.outstanding_tokens
    ahead = max(said, candidate.in_flight_tokens, 0)
    return ahead + max(0, ask.prompt_tokens) + max(0, ask.max_tokens)


def _measured_rate(candidate: Candidate) -> float | None:
    """Tokens per second, None when never measured."""
    rate = 0.0 if candidate.snapshot is None else candidate.snapshot.step_rate
    return rate if isfinite(rate) and rate > 0 else None


def _order(one: _Standing) -> tuple[bool, bool, bool, float, int, int]:
    return (one.avoided, one.silent, one.suspect, one.finish_s, one.requests, one.turn)


def _reason(chosen: Sequence[_Standing], barred: Sequence[tuple[str, str]]) -> str:
    if not chosen:
        others = ", ".join(f"{name} {why}" for name, why in barred)
        return f"no replica can take it: {others or 'none is known'}"
    first = chosen[0]
    doubts = [
        doubt
        for doubt, holds in (
            ("it failed on this request before", first.avoided),
            ("it shows no fresh sign of life", first.silent),
            ("it is suspect", first.suspect),
        )
        if holds
    ]
    if doubts:
        return f"no better replica is left, though {' and '.join(doubts)}"
    return f"expected to finish first of {len(chosen)}, in {first.finish_s:.2f} s"
