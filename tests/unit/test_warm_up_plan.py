"""What a warm-up reads next, and when."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.warm_up_plan import (
    CHUNK_BYTES,
    Action,
    Finished,
    Read,
    Wait,
    course,
    room_bytes,
    step,
    within,
)
from headrace_replicas.engine.memory_plan import MemoryPlan

RANGES = st.lists(
    st.builds(
        FileRange,
        file=st.integers(0, 2),
        offset=st.integers(0, 2**40),
        size_bytes=st.integers(1, 3 * CHUNK_BYTES),
    ),
    max_size=8,
)
RATES = st.floats(1e5, 1e10)


def play(
    ranges: list[FileRange], rate: float, lateness: list[float], busy: list[bool]
) -> list[tuple[float, bool, Action]]:
    """(time, whether busy, action) until everything is read; the thread wakes up late at times."""
    now, now_s = course(ranges, rate, 0.0), 0.0
    story: list[tuple[float, bool, Action]] = []
    while True:
        turn = len(story)
        is_busy = busy[turn] if turn < len(busy) else False
        now, action = step(now, now_s=now_s, is_busy=is_busy)
        story.append((now_s, is_busy, action))
        if isinstance(action, Finished):
            assert now.done_bytes == sum(one.size_bytes for one in ranges)
            return story
        if isinstance(action, Wait):
            assert action.seconds > 0
            now_s += action.seconds
        now_s += lateness[turn] if turn < len(lateness) else 0.0


@given(RANGES, RATES, st.lists(st.floats(0, 5), max_size=20), st.lists(st.booleans(), max_size=20))
def test_everything_is_read_once_and_in_order(
    ranges: list[FileRange], rate: float, lateness: list[float], busy: list[bool]
) -> None:
    story = play(ranges, rate, lateness, busy)
    reads = [action.range for _, _, action in story if isinstance(action, Read)]
    assert all(0 < one.size_bytes <= CHUNK_BYTES for one in reads)
    for whole in ranges:
        at = whole.offset
        while at < whole.offset + whole.size_bytes:
            read = reads.pop(0)
            assert (read.file, read.offset) == (whole.file, at)
            at += read.size_bytes
        assert at == whole.offset + whole.size_bytes
    assert reads == []


@given(RANGES, RATES, st.lists(st.floats(0, 5), max_size=20), st.lists(st.booleans(), max_size=20))
def test_no_read_begins_while_a_request_runs(
    ranges: list[FileRange], rate: float, lateness: list[float], busy: list[bool]
) -> None:
    story = play(ranges, rate, lateness, busy)
    assert not any(is_busy and isinstance(action, Read) for _, is_busy, action in story)


@given(RANGES, RATES, st.lists(st.floats(0, 5), max_size=20), st.lists(st.booleans(), max_size=20))
def test_in_any_stretch_of_time_no_more_is_read_than_the_rate_allows_and_one_burst(
    ranges: list[FileRange], rate: float, lateness: list[float], busy: list[bool]
) -> None:
    story = play(ranges, rate, lateness, busy)
    reads = [(at_s, one.range.size_bytes) for at_s, _, one in story if isinstance(one, Read)]
    for first, (begin_s, _) in enumerate(reads):
        total = 0
        for at_s, size in reads[first:]:
            total += size
            assert total <= 4 * CHUNK_BYTES + (at_s - begin_s) * rate * (1 + 1e-6) + 1


def test_the_rate_is_reached_where_nothing_disturbs() -> None:
    ranges = [FileRange(0, 0, 100 * CHUNK_BYTES)]
    last_s = play(ranges, 10 * CHUNK_BYTES, [], [])[-1][0]
    assert last_s == pytest.approx(9.9)


@given(
    st.lists(
        st.lists(
            st.builds(
                FileRange,
                file=st.integers(0, 1),
                offset=st.integers(0, 40),
                size_bytes=st.integers(0, 9),
            ),
            max_size=4,
        ),
        max_size=8,
    ),
    st.integers(0, 100),
)
def test_whole_experts_are_taken_in_order_as_long_as_they_fit(
    experts: list[list[FileRange]], room: int
) -> None:
    taken = within(experts, room)
    read = [(one.file, at) for one in taken for at in range(one.offset, _end(one))]
    wanted: list[tuple[int, int]] = []
    for ranges in experts:
        bytes_of = [(one.file, at) for one in ranges for at in range(one.offset, _end(one))]
        if len(wanted) + len(bytes_of) > room:
            break
        wanted += bytes_of
    assert read == wanted
    assert all(one.size_bytes for one in taken)


def _end(one: FileRange) -> int:
    return one.offset + one.size_bytes


def test_ranges_that_touch_are_read_as_one() -> None:
    """As in a pack, where an expert is one record."""
    ranges = [FileRange(0, at, 10) for at in (0, 10, 20)]
    elsewhere = FileRange(1, 30, 10)
    assert within([ranges, [elsewhere]], 40) == [
        FileRange(0, 0, 30),
        elsewhere,
    ]


PLAN = MemoryPlan(
    slots_per_layer=8,
    experts_per_layer=32,
    resident_bytes=100,
    slot_bytes=300,
    kv_bytes=50,
    kv_tokens=1,
    headroom_bytes=60,
    working_bytes=40,
    draft_bytes=0,
    allocator_cache_bytes=20,
    page_cache_bytes=90,
    limit_bytes=600,
    expected_hit_ratio=None,
    bound_tokens_per_s=None,
    reasons=(),
)


def test_the_page_cache_gets_what_the_plan_leaves() -> None:
    assert room_bytes(PLAN, 10_000) == 600 - (100 + 300 + 50 + 60)


def test_what_others_have_taken_since_the_plan_is_not_counted_on() -> None:
    """KV cache and headroom are still to come out of what is available."""
    assert room_bytes(PLAN, 150) == 150 - 50 - 60
    assert room_bytes(PLAN, 100) == 0


def test_a_plan_that_fills_the_host_leaves_nothing() -> None:
    assert room_bytes(replace(PLAN, limit_bytes=500), 10_000) == 0
