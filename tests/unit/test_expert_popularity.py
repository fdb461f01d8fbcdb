"""Which experts are asked for most."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.experts.popularity import (
    Popularity,
    hottest,
    misfit,
    ranked,
    unknown,
    with_uses,
)

USES = st.lists(st.integers(0, 50), min_size=4, max_size=4)
COUNTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=9)


def counted(*portions: list[int], half_life_uses: float = 1000.0) -> tuple[float, ...]:
    known = unknown({"a": 4})
    for fresh in portions:
        known = with_uses(known, {"a": fresh}, half_life_uses=half_life_uses)
    return known.layers["a"]


@given(st.lists(USES, max_size=20))
def test_counts_stay_between_nothing_and_all_uses(portions: list[list[int]]) -> None:
    for expert, count in enumerate(counted(*portions)):
        assert 0 <= count <= sum(fresh[expert] for fresh in portions)


@given(st.lists(USES, max_size=20))
def test_who_is_never_used_less_than_another_never_ranks_behind_it(
    portions: list[list[int]],
) -> None:
    ordered = [sorted(fresh, reverse=True) for fresh in portions]
    counts = counted(*ordered, half_life_uses=30)
    assert all(a >= b for a, b in itertools.pairwise(counts))


def test_a_count_halves_when_the_experts_of_its_layer_were_used_a_half_life_each() -> None:
    assert counted([800, 0, 0, 0], [0, 40, 0, 0], half_life_uses=10)[0] == pytest.approx(400)


def test_small_portions_keep_counts_bounded_for_ever() -> None:
    counts = counted(*[[3, 2, 1, 0]] * 5000, half_life_uses=20)
    assert sum(counts) < 4 * (20 / math.log(2) + 1)


def test_a_new_kind_of_work_takes_over() -> None:
    old, new = [[4, 0, 0, 0]] * 500, [[0, 0, 0, 4]] * 60
    assert hottest(counted(*old, *new, half_life_uses=20), 1) == (3,)


def test_no_uses_change_nothing_and_layers_that_do_not_stream_are_kept() -> None:
    known = Popularity(layers={"a": (1.0, 2.0), "resident": (5.0, 6.0, 7.0)})
    assert with_uses(known, {"a": [0, 0]}) == known
    assert with_uses(known, {"a": [9, 9]}).layers["resident"] == (5.0, 6.0, 7.0)
    assert with_uses(known, {"new": [1, 0]}).layers["new"] == (1.0, 0.0)


@given(COUNTS, st.integers(0, 12))
def test_the_hottest_are_those_with_the_highest_counts_highest_first(
    uses: list[float], count: int
) -> None:
    best = hottest(uses, count)
    assert len(best) == min(count, sum(one > 0 for one in uses)) == len(set(best))
    assert [uses[expert] for expert in best] == sorted(uses, reverse=True)[: len(best)]


def test_equally_hot_experts_go_by_their_number() -> None:
    assert hottest([1.0, 2.0, 1.0, 2.0, 0.0], 9) == (1, 3, 0, 2)


@given(COUNTS, COUNTS)
def test_ranking_names_every_expert_once_and_goes_by_shares(
    first: list[float], second: list[float]
) -> None:
    known = Popularity(layers={"a": tuple(first), "b": tuple(second)})
    order = ranked(known)
    assert sorted(order) == sorted(
        (path, expert) for path, uses in known.layers.items() for expert in range(len(uses))
    )
    shares = [known.layers[path][e] / (sum(known.layers[path]) or 1) for path, e in order]
    assert shares == sorted(shares, reverse=True)


def test_a_layer_that_has_streamed_for_a_short_time_is_not_behind() -> None:
    known = Popularity(layers={"old": (600.0, 400.0), "new": (7.0, 3.0)})
    assert ranked(known) == [("new", 0), ("old", 0), ("old", 1), ("new", 1)]


def test_counts_fit_a_model_whose_layers_have_as_many_experts() -> None:
    known = Popularity(layers={"a": (1.0, 2.0), "resident now": (1.0,)})
    assert misfit(known, {"a": 2, "streams now": 9}) is None
    assert misfit(known, {"a": 3}) == "it has 2 experts in a, and the model has 3"
