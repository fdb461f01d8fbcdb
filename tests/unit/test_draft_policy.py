"""When drafts are tried, when they rest, and that nothing of their cost is forgotten."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.drafts.policy import Pace, most_drafts, observed, prefilled

seconds = st.floats(0.001, 10, allow_nan=False)


def paces(tokens: int, cost_s: Callable[[Pace], float]) -> Iterator[Pace]:
    """The pace before each token."""
    pace = Pace()
    for _ in range(tokens):
        yield pace
        pace = observed(pace, cost_s(pace))


def phases(tokens: int, cost_s: Callable[[Pace], float]) -> list[tuple[str, int]]:
    """Phases in order, with the tokens of each."""
    found: list[tuple[str, int]] = []
    for pace in paces(tokens, cost_s):
        if found and found[-1][0] == pace.phase:
            found[-1] = (pace.phase, found[-1][1] + 1)
        else:
            found.append((pace.phase, 1))
    return found[:-1]  # the last one may not be over


@given(st.lists(seconds, min_size=1, max_size=300))
def test_tokens_without_drafts_are_measured_first(spent_s: list[float]) -> None:
    """Whatever they cost, nothing is drafted for before there is something to compare with."""
    costs = iter(spent_s)
    before = [pace.without.tokens for pace in paces(len(spent_s), lambda _: next(costs))]
    drafting = [pace.drafting for pace in paces(len(spent_s), lambda _: 1.0)]
    assert not any(drafting[:8])
    assert all(tokens > 0 for tokens in before[1:])


def test_drafts_that_do_not_pay_rest_longer_each_time_but_are_always_tried_again() -> None:
    """64, 128, ... tokens, and never more than 1024."""
    found = phases(8000, lambda pace: 1.1 if pace.drafting else 1.0)
    rests = [tokens for phase, tokens in found if phase == "resting"]
    assert rests == [64, 128, 256, 512, 1024, 1024, 1024, 1024, 1024, 1024][: len(rests)]
    assert len(rests) >= 7
    assert {tokens for phase, tokens in found if phase == "drafting"} == {32}


def test_drafts_that_pay_are_compared_again_every_eight_trials() -> None:
    """With eight tokens without drafts each time."""
    found = phases(3000, lambda pace: 0.5 if pace.drafting else 1.0)
    assert found[0] == ("measuring", 8)
    assert set(found) == {("measuring", 8), ("drafting", 8 * 32)}


def test_a_rest_is_short_again_after_drafts_paid() -> None:
    """Bad text passes, and what it taught is forgotten."""
    costs = iter([2.0] * 2 * 32 + [0.1] * 9 * 32)
    found = phases(700, lambda pace: next(costs, 2.0) if pace.drafting else 1.0)
    assert [tokens for phase, tokens in found if phase == "resting"] == [64, 128, 64]


@given(st.floats(0.01, 5), st.floats(0.01, 5))
def test_drafts_go_on_exactly_when_a_token_costs_less_with_them(
    with_s: float, bare_s: float
) -> None:
    """Constant costs give the verdict of their comparison."""
    pace = next(
        pace
        for pace in paces(200, lambda pace: with_s if pace.drafting else bare_s)
        if pace.paid is not None
    )
    if abs(with_s - bare_s) > 1e-6:
        assert pace.paid is (with_s < bare_s)


@given(st.lists(st.floats(0.001, 50), min_size=1, max_size=5))
def test_all_prefill_of_the_draft_model_is_charged_to_drafted_tokens(spent_s: list[float]) -> None:
    """What was charged and what is owed are together what was spent."""
    pace = Pace(phase="drafting", left_tokens=10**6)
    for one_s in spent_s:
        pace = prefilled(pace, one_s)
        pace = observed(pace, 0.0)
    assert pace.with_drafts.spent_s + pace.owed_s == pytest.approx(sum(spent_s))
    for _ in range(200):
        pace = observed(pace, 0.0)
    assert pace.with_drafts.spent_s == pytest.approx(sum(spent_s))


@pytest.mark.parametrize(("prefill_s", "pays"), [(1.0, True), (100.0, False)])
def test_a_dear_prefill_keeps_drafts_from_paying(prefill_s: float, pays: bool) -> None:
    """A drafted token saves 0.1 s, and each is charged a part of the prefill."""
    pace = prefilled(Pace(), prefill_s)
    while pace.paid is None:
        pace = observed(pace, 0.9 if pace.drafting else 1.0)
    assert pace.paid is pays


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 300))
def test_the_experts_of_a_pass_fit_into_the_slots(wanted: int, top_k: int, slots: int) -> None:
    """One more draft would not fit, or is not wanted."""
    tokens = most_drafts(wanted, top_k=top_k, slots=slots)
    assert 0 <= tokens <= wanted
    assert tokens == 0 or (tokens + 1) * top_k <= slots
    assert tokens == wanted or (tokens + 2) * top_k > slots
