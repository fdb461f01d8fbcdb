"""The fewest reads: what a search over every possible policy finds, and never more."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.experts.least_reads import least_misses
from headrace_replicas.engine.experts.slots import SlotTable

EXPERTS = 5

uses_of_a_layer = st.lists(
    st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=2).map(sorted), max_size=7
)


def best_of_all(uses: Sequence[Sequence[int]], slots: int) -> int:
    """The least over all contents at the start and all choices of who leaves."""
    every = [frozenset(held) for held in combinations(range(EXPERTS), min(slots, EXPERTS))]
    costs = dict.fromkeys(every, 0)
    for needed in map(frozenset, uses):
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            paid = cost + len(needed - held)
            for kept in every:
                if needed <= kept <= held | needed:
                    after[kept] = min(paid, after.get(kept, paid))
        costs = after
    return min(costs.values())


@given(uses_of_a_layer, st.integers(2, EXPERTS + 1))
def test_no_policy_reads_less_and_one_reads_as_little(uses: list[list[int]], slots: int) -> None:
    assert least_misses(uses, slots) == best_of_all(uses, slots)


@given(uses_of_a_layer, st.integers(2, EXPERTS))
def test_lru_reads_at_least_as_much(uses: list[list[int]], slots: int) -> None:
    table = SlotTable(slots)
    misses = sum(len(table.place(needed).loads) for needed in uses)
    assert misses >= least_misses(uses, slots)


@given(uses_of_a_layer, st.integers(2, EXPERTS))
def test_more_slots_never_need_more_reads(uses: list[list[int]], slots: int) -> None:
    assert least_misses(uses, slots + 1) <= least_misses(uses, slots)


def test_slots_for_everybody_need_no_read() -> None:
    assert least_misses([[0, 1], [2, 3], [4, 0]], EXPERTS) == 0


def test_a_cycle_longer_than_the_slots_needs_reads() -> None:
    """One slot too few: LRU would miss 40 times, and the best misses every third time."""
    uses = [[number % 4] for number in range(40)]
    assert least_misses(uses, 3) == 13


def test_more_experts_at_once_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="3 experts at once, 2 slots"):
        least_misses([[0, 1, 2]], 2)
