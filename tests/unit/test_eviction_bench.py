"""The policies that the bench compares with the engine's own."""

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.eviction import POLICIES, ClockTable, bound, replayed

CALLS = st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=7).map(sorted), max_size=20)


@given(CALLS, st.integers(3, 10))
def test_no_policy_beats_the_bound(calls: list[list[int]], slots: int) -> None:
    best = bound(calls, slots)
    assert all(replay(calls, slots) <= best for replay in POLICIES.values())


@given(CALLS)
def test_with_slots_for_all_only_the_first_use_misses(calls: list[list[int]]) -> None:
    uses = sum(map(len, calls))
    distinct = len({expert for needed in calls for expert in needed})
    assert {replay(calls, 10) for replay in POLICIES.values()} == {uses - distinct}


@given(CALLS, st.integers(7, 10))
def test_clock_has_what_a_call_needs_and_no_more_than_its_slots(
    calls: list[list[int]], slots: int
) -> None:
    table = ClockTable(slots)
    for needed in calls:
        table.place(needed)
        assert all(expert in table for expert in needed)
        assert sum(expert in table for expert in range(10)) <= slots


def test_clock_spares_what_was_used_since_the_hand_came_by() -> None:
    """Expert 2 is used again before the hand comes to it, so 3 leaves for 5."""
    assert replayed([[1], [2], [3], [4], [2], [5], [2]], 3, ClockTable(3)) == 2


def test_the_bound_keeps_what_is_used_again_soonest() -> None:
    assert bound([[1], [2], [3], [1], [2]], 2) == 1
