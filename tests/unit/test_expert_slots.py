"""The slot bookkeeping of one expert layer."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.experts.slots import SlotTable

CALLS = st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=5), max_size=60)


@given(CALLS, st.integers(5, 16))
def test_needed_experts_have_slots_of_their_own_and_are_loaded_once(
    calls: list[set[int]], slots: int
) -> None:
    table = SlotTable(slots)
    content: dict[int, int] = {}
    for needed in calls:
        before = dict(content)
        placement = table.place(sorted(needed))
        for expert, slot in placement.loads:
            assert 0 <= slot < slots
            content = {held: where for held, where in content.items() if where != slot}
            content[expert] = slot
        loaded = {expert for expert, _slot in placement.loads}
        assert loaded == needed - before.keys()
        assert placement.hits == len(needed & before.keys())
        where = table.slots_of(sorted(needed))
        assert len(set(where)) == len(needed)
        assert where == [content[expert] for expert in sorted(needed)]
        assert len(table) == len(content) <= slots


def play(table: SlotTable, needed: set[int]) -> tuple[set[int], set[int]]:
    """(who left, who stayed without being needed) when a call is made."""
    before = {expert for expert in range(16) if expert in table}
    table.place(sorted(needed))
    after = {expert for expert in range(16) if expert in table}
    return before - after, (before & after) - needed


@given(CALLS, st.integers(5, 16), st.sampled_from([0.5, 3.0, 16.0, 1000.0]))
def test_whoever_leaves_has_the_least_decayed_uses_of_those_not_needed(
    calls: list[set[int]], slots: int, half_life: float
) -> None:
    """Also where the unit of the counts starts anew, every 32 calls at the shortest half-life."""
    table = SlotTable(slots, half_life)
    for number, needed in enumerate(calls):
        left, stayed = play(table, needed)
        uses = dict.fromkeys(range(16), 0.0)
        for earlier, used in enumerate(calls[:number]):
            for expert in used:
                uses[expert] += 2 ** ((earlier - number) / half_life)
        assert all(uses[a] <= uses[b] * (1 + 1e-9) for a in left for b in stayed)


@given(CALLS, st.integers(5, 16), st.sampled_from([0.25, 0.5, 1.0]))
def test_with_a_half_life_of_one_call_or_less_the_longest_unused_expert_leaves_first(
    calls: list[set[int]], slots: int, half_life: float
) -> None:
    table = SlotTable(slots, half_life)
    used_at: dict[int, int] = {}
    for number, needed in enumerate(calls):
        left, stayed = play(table, needed)
        assert all(used_at[a] <= used_at[b] for a in left for b in stayed)
        used_at |= dict.fromkeys(needed, number)


@given(CALLS, st.integers(5, 16))
def test_with_an_endless_half_life_the_least_used_expert_leaves_first(
    calls: list[set[int]], slots: int
) -> None:
    """Of equally used ones, the one that was used longest ago."""
    table = SlotTable(slots, math.inf)
    uses: Counter[int] = Counter()
    used_at: dict[int, int] = {}
    for number, needed in enumerate(calls):
        left, stayed = play(table, needed)
        rank = {expert: (uses[expert], used_at[expert]) for expert in left | stayed}
        assert all(rank[a] <= rank[b] for a in left for b in stayed)
        uses.update(needed)
        used_at |= dict.fromkeys(needed, number)


@given(CALLS, st.integers(5, 16), st.sets(st.integers(0, 15), min_size=2, max_size=5), st.data())
def test_a_call_in_groups_evicts_none_of_its_own_where_all_fit(
    calls: list[set[int]], slots: int, needed: set[int], data: st.DataObject
) -> None:
    """Those that are there go first, as a layer that computes while it reads has it."""
    table = SlotTable(slots)
    for call in calls:
        table.place(sorted(call))
    first = data.draw(st.sets(st.sampled_from(sorted(needed)), min_size=1))
    table.place(sorted(first))
    table.place(sorted(needed - first), earlier=sorted(first))
    assert all(expert in table for expert in needed)


@given(CALLS, st.integers(5, 16), st.sampled_from([1.0, 16.0]))
def test_a_call_in_two_groups_counts_as_one(
    calls: list[set[int]], slots: int, half_life: float
) -> None:
    whole, split = SlotTable(slots, half_life), SlotTable(slots, half_life)
    for needed in calls:
        there = sorted(expert for expert in needed if expert in split)
        missing = sorted(needed - set(there))
        whole.place([*there, *missing])
        if there:
            split.place(there)
        split.place(missing, earlier=there)
        assert [expert in whole for expert in range(16)] == [e in split for e in range(16)]


def test_the_group_before_leaves_only_when_no_others_can() -> None:
    """Although 1 and 2 were used far more often."""
    table = SlotTable(4)
    for _ in range(9):
        table.place([1, 2])
    table.place([3, 4])
    table.place([5], earlier=[3, 4])
    assert all(expert in table for expert in (3, 4, 5))
    table.place([6, 7, 8], earlier=[3, 4, 5])
    assert sum(expert in table for expert in (3, 4, 5)) == 1


def test_counts_do_not_overflow_in_a_long_life() -> None:
    table = SlotTable(3)
    for number in range(20_000):
        table.place([1, 2 + number % 2])
    table.place([4])
    table.place([5])
    assert 1 in table


@given(CALLS, st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True))
def test_a_refilled_table_holds_the_given_experts_and_the_last_of_them_longest(
    calls: list[set[int]], experts: list[int]
) -> None:
    """Whatever was used before; and what was there already is not read again."""
    table = SlotTable(5)
    for needed in calls:
        table.place(sorted(needed))
    there = {expert for expert in range(16) if expert in table}
    placement = table.refill(experts)
    assert {expert for expert, _slot in placement.loads} == set(experts) - there
    assert placement.hits == len(set(experts) & there)
    assert all(expert in table for expert in experts)
    others = (expert for expert in range(100, 200))
    left: list[int] = []
    while len(left) < len(experts):
        table.place([next(others)])
        left += [expert for expert in experts if expert not in table and expert not in left]
    assert left == experts


def test_an_expert_that_the_call_needs_is_not_evicted_by_it() -> None:
    table = SlotTable(3)
    table.place([1, 2, 3])
    table.place([1, 4, 5])
    assert all(expert in table for expert in (1, 4, 5))


def test_more_experts_than_slots_are_refused_and_nothing_changes() -> None:
    table = SlotTable(2)
    table.place([1, 2])
    with pytest.raises(ValueError, match="3 experts at once, 2 slots"):
        table.place([1, 3, 4])
    assert all(expert in table for expert in (1, 2))
    assert len(table) == 2


def test_experts_whose_bytes_did_not_arrive_are_forgotten() -> None:
    table = SlotTable(2)
    placement = table.place([1, 2])
    table.drop(expert for expert, _slot in placement.loads)
    assert len(table) == 0
    assert len(table.place([1, 2]).loads) == 2


@given(CALLS, st.integers(5, 16), st.integers(5, 16))
def test_a_resize_keeps_the_experts_used_most_and_the_bytes_that_belong_to_them(
    calls: list[set[int]], slots: int, resized: int
) -> None:
    """The slots that it names hold what it says, and the table goes on as a new one would."""
    table = SlotTable(slots)
    in_slot: dict[int, int] = {}
    for needed in calls:
        in_slot |= {slot: expert for expert, slot in table.place(sorted(needed)).loads}
    there = {expert for needed in calls for expert in needed if expert in table}
    had = table.resize(resized)
    assert {in_slot[was] for was in had.values()} == set(had)
    assert len(had) == min(resized, len(there))
    least = min((table._uses[expert] for expert in had), default=0.0)
    assert all(table._uses[expert] <= least for expert in there - set(had))
    assert table.slots_of(list(had)) == list(range(len(had)))
    assert (table.slots, len(table)) == (resized, len(had))
    placement = table.place(range(5))
    assert placement.hits == len(set(had) & set(range(5)))
    where = table.slots_of(range(5))
    assert len(set(where)) == 5
    assert all(0 <= slot < resized for slot in where)


def test_after_a_shrink_the_longest_unused_expert_still_leaves_first() -> None:
    table = SlotTable(4)
    table.place([1, 2, 3, 4])
    table.place([2])
    table.resize(3)
    assert 1 not in table
    table.place([5])
    assert 3 not in table
    assert all(expert in table for expert in (4, 2, 5))
