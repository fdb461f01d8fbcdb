"""Which replica a request goes to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.fleet import ReplicaState
from headrace_serve.routing import Candidate, RouteAsk, RouteDecision, pick
from tests.support.fleet import snapshot

STARTING, READY, SUSPECT, SUSPENDED, DRAINING, STOPPING, LOST = ReplicaState
NOW_S = 1000.0
ASK = RouteAsk(prompt_tokens=100, max_tokens=100, avoid=frozenset(), now_s=NOW_S, tiebreak=0)


def candidate(
    replica_id: str,
    state: ReplicaState | None = READY,
    *,
    rate: float = 100.0,
    outstanding: int = 0,
    mine: int = 0,
    suspected: bool = False,
    age_s: float = 0.5,
) -> Candidate:
    """A replica with a snapshot of this age, that made its last progress when it was taken."""
    seen_s = NOW_S - age_s
    return Candidate(
        replica_id=replica_id,
        state=state,
        snapshot=snapshot(
            replica_id,
            step_rate=rate,
            outstanding_tokens=outstanding,
            running=1 if outstanding else 0,
            last_progress_s=seen_s,
            at_s=seen_s,
        ),
        in_flight_requests=1 if mine else 0,
        in_flight_tokens=mine,
        suspected=suspected,
        seen_s=seen_s,
    )


def ranked(*candidates: Candidate, ask: RouteAsk = ASK) -> tuple[str, ...]:
    return pick(candidates, ask).ranked


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    """Up to six replicas in any condition."""
    found = []
    for number in range(draw(st.integers(0, 6))):
        one = candidate(
            f"r{number}",
            draw(st.sampled_from([*ReplicaState, READY, READY, None])),
            rate=draw(st.sampled_from([0.0, 1.0, 50.0, 80.0, float("nan")])),
            outstanding=draw(st.integers(0, 5000)),
            mine=draw(st.integers(0, 5000)),
            suspected=draw(st.booleans()),
            age_s=draw(st.sampled_from([0.0, 1.0, 60.0])),
        )
        kept = draw(st.booleans()) or draw(st.booleans())
        found.append(one if kept else replace(one, snapshot=None, seen_s=0.0))
    return found


asks = st.builds(
    RouteAsk,
    prompt_tokens=st.integers(0, 1000),
    max_tokens=st.integers(0, 1000),
    avoid=st.sets(st.sampled_from([f"r{number}" for number in range(6)])).map(frozenset),
    now_s=st.just(NOW_S),
    tiebreak=st.integers(-100, 100),
)


def shows_life(one: Candidate) -> bool:
    return one.snapshot is not None and NOW_S - one.seen_s <= 5.0


def is_suspect(one: Candidate) -> bool:
    return one.suspected or one.state is SUSPECT


@given(fleets(), asks)
def test_each_replica_is_ranked_or_rejected_once(fleet: list[Candidate], ask: RouteAsk) -> None:
    """Nobody is forgotten or named twice, and there is a reason in words."""
    decision = pick(fleet, ask)
    named = [*decision.ranked, *(name for name, _ in decision.rejected)]
    assert sorted(named) == sorted(one.replica_id for one in fleet)
    assert decision.reason
    assert all(why for _, why in decision.rejected)


@given(fleets(), asks)
def test_who_cannot_answer_is_never_picked(fleet: list[Candidate], ask: RouteAsk) -> None:
    """Starting, suspended, draining, stopping and lost replicas get nothing, in panic either."""
    by_name = {one.replica_id: one for one in fleet}
    for name in pick(fleet, ask).ranked:
        one = by_name[name]
        own = None if one.snapshot is None else one.snapshot.state
        assert (one.state or own) in (READY, SUSPECT)


@given(fleets(), asks)
def test_the_dead_never_come_before_the_living(fleet: list[Candidate], ask: RouteAsk) -> None:
    """A replica that shows no life comes after all that do, however idle it seems."""
    by_name = {one.replica_id: one for one in fleet}
    life = [shows_life(by_name[name]) for name in pick(fleet, ask).ranked if name not in ask.avoid]
    assert life == sorted(life, reverse=True)


@given(fleets(), asks)
def test_suspects_are_used_rather_than_nothing(fleet: list[Candidate], ask: RouteAsk) -> None:
    """Suspects are ranked exactly when no ready, living replica is left to this request."""
    usable = [
        one
        for one in fleet
        if one.state in (READY, SUSPECT) or (one.state is None and one.snapshot is not None)
    ]
    good = [
        one
        for one in usable
        if not is_suspect(one) and shows_life(one) and one.replica_id not in ask.avoid
    ]
    decision = pick(fleet, ask)
    suspects = {one.replica_id for one in usable if is_suspect(one)}
    assert suspects & set(decision.ranked) == (set() if good else suspects)
    assert bool(decision.ranked) == bool(usable)
    if good:
        assert decision.ranked[0] in {one.replica_id for one in good}


@given(fleets(), asks)
def test_avoided_replicas_are_the_last_resort(fleet: list[Candidate], ask: RouteAsk) -> None:
    """A replica that this request failed on comes after all others that may be used."""
    failed = [name in ask.avoid for name in pick(fleet, ask).ranked]
    assert failed == sorted(failed)


@given(fleets(), asks, st.data())
def test_the_order_of_the_arguments_does_not_matter(
    fleet: list[Candidate], ask: RouteAsk, data: st.DataObject
) -> None:
    """The same fleet gives the same ranking in whatever order it is listed."""
    turned = data.draw(st.permutations(fleet))
    assert pick(turned, ask).ranked == pick(fleet, ask).ranked


def test_work_goes_where_it_finishes_first() -> None:
    """A fast replica with some work comes before a slow one with none."""
    slow = candidate("slow", rate=10.0)
    fast = candidate("fast", rate=100.0, outstanding=1000)
    assert ranked(slow, fast) == ("fast", "slow")
    assert ranked(slow, candidate("fast", rate=100.0, outstanding=3000)) == ("slow", "fast")


def test_requests_just_sent_count_before_the_snapshot_shows_them() -> None:
    """What this gateway sent since the snapshot makes a replica less attractive at once."""
    busy = candidate("a", outstanding=0, mine=500)
    assert ranked(busy, candidate("b", outstanding=100)) == ("b", "a")


def test_an_unmeasured_replica_is_taken_at_the_usual_rate() -> None:
    """Without a rate of its own a replica counts with the median of the others'."""
    new = candidate("new", rate=0.0, outstanding=1000)
    assert ranked(new, candidate("x", rate=100.0, outstanding=900)) == ("x", "new")
    assert ranked(new, candidate("x", rate=100.0, outstanding=1100)) == ("new", "x")


def test_a_replica_that_has_work_and_stands_still_shows_no_life() -> None:
    """Fresh snapshots of an engine without progress are no sign of life."""
    frozen = candidate("frozen", outstanding=1)
    assert frozen.snapshot is not None
    stuck = replace(frozen.snapshot, last_progress_s=frozen.snapshot.at_s - 60.0)
    frozen = replace(frozen, snapshot=stuck)
    busy = candidate("busy", outstanding=100_000)
    assert ranked(frozen, busy) == ("busy", "frozen")


def test_equals_take_turns() -> None:
    """Among equals each value of the tie-break starts with the next replica."""
    equals = [candidate(name) for name in ("a", "b", "c")]
    firsts = [ranked(*equals, ask=replace(ASK, tiebreak=turn))[0] for turn in range(4)]
    assert firsts == ["a", "b", "c", "a"]


def test_a_replica_unknown_to_the_controller_is_taken_at_its_word() -> None:
    """Without the controller, what calls itself ready is ready; the silent are not."""
    known = candidate("a", state=None)
    assert ranked(known) == ("a",)
    decision = pick([replace(known, snapshot=None)], ASK)
    assert decision == RouteDecision(
        ranked=(),
        reason="no replica can take it: a nobody has heard of it yet",
        rejected=(("a", "nobody has heard of it yet"),),
    )


@pytest.mark.parametrize("state", [READY, SUSPECT, None])
def test_a_replica_that_says_it_stops_is_believed(state: ReplicaState | None) -> None:
    """Its own word that it stops is newer than whatever the controller said."""
    one = candidate("a", state=state)
    assert one.snapshot is not None
    leaving = replace(one, snapshot=replace(one.snapshot, state=STOPPING))
    assert ranked(leaving) == ()


def test_the_reason_admits_a_doubtful_choice() -> None:
    """In panic the reason says what is wrong with the best that is left."""
    decision = pick([candidate("a", suspected=True)], replace(ASK, avoid=frozenset({"a"})))
    assert decision.ranked == ("a",)
    assert "failed on this request before and it is suspect" in decision.reason


def share(rates: dict[str, float], requests: int) -> dict[str, int]:
    """Requests that each replica gets when so many come one after the other and none ends."""
    given = dict.fromkeys(rates, 0)
    for number in range(requests):
        fleet = [
            candidate(name, rate=rate, outstanding=200 * given[name])
            for name, rate in rates.items()
        ]
        given[pick(fleet, replace(ASK, tiebreak=number)).ranked[0]] += 1
    return given


def test_a_slow_replica_gets_its_share_of_the_work_and_no_more() -> None:
    """At a twentieth of the others' rate it gets about a twentieth of their requests."""
    given = share({"a": 100.0, "b": 100.0, "slow": 5.0}, 82)
    assert given["slow"] <= 2
    assert given["a"] == pytest.approx(40, abs=2)
    assert given["b"] == pytest.approx(40, abs=2)
