"""The slot bookkeeping of one expert layer."""

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


def test_the_longest_unused_expert_leaves_first() -> None:
    table = SlotTable(3)
    table.place([1, 2, 3])
    table.place([1])
    table.place([4])
    assert 2 not in table
    assert all(expert in table for expert in (1, 3, 4))


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
def test_a_resize_keeps_the_experts_used_last_and_the_bytes_that_belong_to_them(
    calls: list[set[int]], slots: int, resized: int
) -> None:
    """The slots that it names hold what it says, and the table goes on as a new one would."""
    table = SlotTable(slots)
    in_slot: dict[int, int] = {}
    used: list[int] = []
    for needed in calls:
        ordered = sorted(needed)
        in_slot |= {slot: expert for expert, slot in table.place(ordered).loads}
        used = [expert for expert in used if expert not in needed] + ordered
    there = [expert for expert in used if expert in table]
    had = table.resize(resized)
    assert {in_slot[was] for was in had.values()} == set(had)
    assert set(had) == set(there[-resized:])
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
