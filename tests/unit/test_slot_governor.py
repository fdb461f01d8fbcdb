"""How many expert slots an engine keeps: laws of the decision, on hosts made of numbers."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.experts.governor import (
    QUIET_S,
    SETTLE_S,
    Decision,
    Limits,
    Reading,
    State,
    begin,
    bytes_left,
    decide,
)
from headrace_replicas.engine.footprint import HostPressure, PressureLevel

GIB = 2**30
MIB = 2**20
PERIOD_S = 1.0
# For laws about long times: rarer looks, so that there are fewer of them.
SLOW_S = 15.0
# Qwen3-30B-A3B in 4 bits with half of its experts in memory, on a host that gives 16 GiB.
LIMITS = Limits(
    least_slots=8,
    planned_slots=64,
    slot_bytes=48 * 2_654_208,
    planned_bytes=13 * GIB,
    headroom_bytes=2 * GIB,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A host on which the engine and other programs live.

    Attributes:
        limits: The engine's.
        spare_bytes: What the host has beyond the plan and its headroom.
        others_bytes: What other programs have taken since the plan was made.
        kv_bytes: KV cache that is in use.
        cached_bytes: What MLX's allocator keeps.
        swapping: Bytes swapped in a second.
        stalled: Share of time in which somebody waits for memory.
    """

    limits: Limits = LIMITS
    spare_bytes: int = 0
    others_bytes: int = 0
    kv_bytes: int = 0
    cached_bytes: int = 0
    level: PressureLevel = "normal"
    swapping: int = 0
    stalled: float = 0.0

    def reading(self, slots: int, now_s: float) -> Reading:
        """What the engine would see with so many slots."""
        limits = self.limits
        idle_bytes = limits.planned_bytes - self.kv_planned_bytes
        active_bytes = (
            idle_bytes - (limits.planned_slots - slots) * limits.slot_bytes + self.kv_bytes
        )
        given_bytes = limits.planned_bytes + limits.headroom_bytes + self.spare_bytes
        taken_bytes = active_bytes + self.cached_bytes + self.others_bytes
        return Reading(
            host=HostPressure(
                available_bytes=given_bytes - taken_bytes,
                source="a host of the test's",
                level=self.level,
                swapped_bytes=int(self.swapping * now_s),
                stalled_s=self.stalled * now_s,
            ),
            active_bytes=active_bytes,
            cached_bytes=self.cached_bytes,
        )

    @property
    def kv_planned_bytes(self) -> int:
        """All that is neither resident nor in slots."""
        slots_bytes = self.limits.planned_slots * self.limits.slot_bytes
        return (self.limits.planned_bytes - slots_bytes) // 2

    def left_bytes(self, slots: int) -> int:
        """What is left with so many slots."""
        return bytes_left(self.limits, slots, self.reading(slots, 0.0))


def watched(
    world: World, state: State, *, times: int, from_s: float = 0.0, period_s: float = PERIOD_S
) -> list[Decision]:
    """Decisions in a world that stays as it is, one each period."""
    decisions = []
    for number in range(times):
        now_s = from_s + number * period_s
        decisions.append(decide(state, world.reading(state.slots, now_s), now_s))
        state = decisions[-1].state
    return decisions


def slots_over_time(
    world: World, state: State, *, times: int, period_s: float = PERIOD_S
) -> list[int]:
    """The slots at the beginning and after each decision."""
    decisions = watched(world, state, times=times, period_s=period_s)
    return [state.slots, *(one.state.slots for one in decisions)]


limits = st.integers(1, 16).flatmap(
    lambda least: st.builds(
        lambda more, slot_bytes, rest_bytes, headroom_bytes: Limits(
            least_slots=least,
            planned_slots=least + more,
            slot_bytes=slot_bytes,
            planned_bytes=(least + more) * slot_bytes + rest_bytes,
            headroom_bytes=headroom_bytes,
        ),
        st.integers(0, 120),
        st.integers(1, 512 * MIB),
        st.integers(0, 8 * GIB),
        st.integers(2, 8 * GIB),
    )
)
levels: st.SearchStrategy[PressureLevel] = st.sampled_from(["normal", "warn", "critical"])


@st.composite
def worlds(draw: st.DrawFn, *, calm: bool = False) -> World:
    made = World(
        limits=draw(limits),
        spare_bytes=draw(st.integers(0, 8 * GIB)),
        others_bytes=draw(st.integers(0, 200 * GIB)),
        cached_bytes=draw(st.integers(0, 512 * MIB)),
        level="normal" if calm else draw(levels),
        swapping=0 if calm else draw(st.integers(0, 64 * MIB)),
        stalled=0.0 if calm else draw(st.floats(0, 1)),
    )
    return replace(made, kv_bytes=draw(st.integers(0, made.kv_planned_bytes)))


@st.composite
def states(draw: st.DrawFn, world: World) -> State:
    least, most = world.limits.least_slots, world.limits.planned_slots
    return replace(begin(world.limits), slots=draw(st.integers(least, most)))


moments = st.builds(
    World,
    limits=st.just(LIMITS),
    others_bytes=st.integers(-4 * GIB, 20 * GIB),
    level=levels,
    swapping=st.sampled_from([0, 64 * MIB]),
)


@given(st.lists(st.tuples(moments, st.sampled_from([0.0, PERIOD_S, SETTLE_S, QUIET_S]))))
def test_slots_stay_between_one_tokens_experts_and_the_plan(
    moments: list[tuple[World, float]],
) -> None:
    """Whatever is read, in whatever order."""
    state, now_s = begin(LIMITS), 0.0
    for world, later_s in moments:
        now_s += later_s
        state = decide(state, world.reading(state.slots, now_s), now_s).state
        assert LIMITS.least_slots <= state.slots <= LIMITS.planned_slots


@given(st.data())
def test_one_shrink_restores_the_headroom(data: st.DataObject) -> None:
    """Or takes all that may be taken; and it takes no slot too many."""
    world = data.draw(worlds(calm=True))
    state = data.draw(states(world))
    after = decide(state, world.reading(state.slots, 0.0), 0.0).state.slots
    headroom_bytes = world.limits.headroom_bytes
    if after == state.slots:
        enough = world.left_bytes(after) > headroom_bytes // 2
        assert enough or after == world.limits.least_slots
    else:
        assert world.left_bytes(state.slots) <= headroom_bytes // 2
        assert world.left_bytes(after + 1) < headroom_bytes
        enough = world.left_bytes(after) >= headroom_bytes
        assert enough or after == world.limits.least_slots


@given(st.data())
def test_growth_leaves_the_whole_headroom_and_comes_after_a_quiet_time(data: st.DataObject) -> None:
    world = data.draw(worlds())
    state = data.draw(states(world))
    slots = slots_over_time(world, state, times=20, period_s=SLOW_S)
    for number, (before, after) in enumerate(pairwise(slots)):
        if after > before:
            assert number * SLOW_S >= QUIET_S
            assert world.left_bytes(after) >= world.limits.headroom_bytes
            assert world.level == "normal"


@given(st.data())
def test_a_world_that_stays_the_same_leads_to_slots_that_stay_the_same(
    data: st.DataObject,
) -> None:
    """And on the way there they never become fewer again after they have become more."""
    world = data.draw(worlds())
    state = data.draw(states(world))
    slots = slots_over_time(world, state, times=60, period_s=SLOW_S)
    changes = [after - before for before, after in pairwise(slots)]
    grown = [number for number, change in enumerate(changes) if change > 0]
    assert not any(change < 0 for change in changes[min(grown, default=60) :])
    assert not any(changes[40:]) or world.level != "normal"


@given(st.data())
def test_the_very_same_reading_over_and_over_leads_to_slots_that_stay_the_same(
    data: st.DataObject,
) -> None:
    """A host that does not notice what the engine gives back or takes."""
    world = data.draw(worlds())
    state = data.draw(states(world))
    reading = world.reading(state.slots, 0.0)
    slots = [state.slots]
    for number in range(world.limits.planned_slots + 60):
        state = decide(state, reading, number * SLOW_S).state
        slots.append(state.slots)
    assert slots == sorted(slots) or slots == sorted(slots, reverse=True)
    assert len(set(slots[-10:])) == 1 or world.level != "normal"


@given(worlds(calm=True), st.data())
def test_the_engines_own_use_of_what_was_planned_moves_nothing(
    world: World, data: st.DataObject
) -> None:
    """A KV cache that fills and empties, and what the allocator keeps."""
    state = data.draw(states(world))
    busier = replace(
        world,
        kv_bytes=data.draw(st.integers(0, world.kv_planned_bytes)),
        cached_bytes=data.draw(st.integers(0, 512 * MIB)),
    )
    one, other = (
        slots_over_time(host, state, times=12, period_s=SLOW_S) for host in (world, busier)
    )
    assert one == other


@given(worlds(calm=True), st.integers(1, 64 * MIB), st.floats(0, 1), st.data())
def test_swapping_and_waiting_take_no_slot_while_the_headroom_is_whole(
    world: World, swapping: int, stalled: float, data: st.DataObject
) -> None:
    """Both come from reading many files as well."""
    state = data.draw(states(world))
    strained = replace(world, swapping=swapping, stalled=stalled)
    for decision in watched(strained, state, times=4):
        if world.left_bytes(state.slots) >= world.limits.headroom_bytes:
            assert decision.state.slots == state.slots


@given(worlds(), st.integers(0, 16 * GIB), st.data())
def test_less_memory_never_means_more_slots(
    world: World, taken_bytes: int, data: st.DataObject
) -> None:
    state = replace(data.draw(states(world)), room_since_s=0.0)
    poorer = replace(world, others_bytes=world.others_bytes + taken_bytes)
    now_s = QUIET_S
    rich, poor = (
        decide(state, host.reading(state.slots, now_s), now_s).state.slots
        for host in (world, poorer)
    )
    assert poor <= rich


def test_a_program_that_takes_two_gib_gets_them_and_gives_them_back() -> None:
    """The whole way: at once down by what lacks, a quiet minute, and up to the plan."""
    calm, state = World(), begin(LIMITS)
    taken = replace(calm, others_bytes=2 * GIB)
    [first, *later] = watched(taken, state, times=30)
    assert first.state.slots == 64 - 17  # 17 slots of 121.5 MiB are the first to make 2 GiB
    assert first.reason == ("0.0 KiB left for a headroom of 2.00 GiB (a host of the test's)")
    assert {one.state.slots for one in later} == {47}
    back = watched(calm, later[-1].state, times=70, from_s=30.0)
    assert [one.state.slots for one in back] == [47] * 60 + [64] * 10
    assert back[60].reason.startswith("4.02 GiB left for a headroom of 2.00 GiB")


def test_a_little_less_than_the_headroom_is_what_the_headroom_is_for() -> None:
    """Slots stay until half of it is gone."""
    most = World(others_bytes=GIB - 1)
    assert set(slots_over_time(most, begin(LIMITS), times=90)) == {64}
    half = World(others_bytes=GIB)
    assert slots_over_time(half, begin(LIMITS), times=1) == [64, 64 - 9]


@pytest.mark.parametrize(
    ("strain", "says"),
    [
        (World(others_bytes=MIB, swapping=MIB), "the host swaps"),
        (World(others_bytes=MIB, stalled=0.1), "processes wait for memory"),
    ],
)
def test_swapping_and_waiting_make_it_act_before_half_of_the_headroom_is_gone(
    strain: World, says: str
) -> None:
    first, second, *_ = watched(strain, begin(LIMITS), times=3)
    assert first.state.slots == 64  # nothing to compare with yet
    assert second.state.slots == 64 - 9
    assert second.reason.endswith(says)


def test_a_page_now_and_then_is_no_swapping_and_does_not_keep_slots_from_growing() -> None:
    """Some program left it in swap long ago."""
    world = World(swapping=4096, stalled=0.01)
    state = replace(begin(LIMITS), slots=20)
    assert slots_over_time(world, state, times=70)[-1] == 64


@pytest.mark.parametrize(("level", "fewer"), [("warn", 9), ("critical", 17)])
def test_a_macs_own_level_counts_whatever_the_numbers_say(level: PressureLevel, fewer: int) -> None:
    """Half of the headroom or all of it, again each five seconds until the level falls."""
    world = World(spare_bytes=8 * GIB, level=level)
    slots = slots_over_time(world, begin(LIMITS), times=11)
    assert slots[1:6] == [64 - fewer] * 5
    assert slots[6:11] == [64 - 2 * fewer] * 5
    assert slots_over_time(world, begin(LIMITS), times=60)[-1] == LIMITS.least_slots


def test_a_level_that_stays_keeps_slots_from_growing() -> None:
    state = replace(begin(LIMITS), slots=8)
    assert set(slots_over_time(World(level="warn"), state, times=200)) == {8}


@pytest.mark.parametrize("strain", [World(swapping=MIB), World(stalled=0.1)])
def test_slots_do_not_grow_while_the_host_swaps_or_processes_wait(strain: World) -> None:
    """Though the headroom is whole: others may still come back from swap."""
    state = replace(begin(LIMITS), slots=20)
    assert set(slots_over_time(strain, state, times=200)) == {20}


def test_two_looks_in_the_same_moment_are_no_sign_of_anything() -> None:
    world = World(others_bytes=MIB)
    state = begin(LIMITS)
    for _ in range(3):
        state = decide(state, world.reading(state.slots, 5.0), 5.0).state
    assert state.slots == 64


def test_growth_that_is_not_worth_the_copying_waits() -> None:
    """Less than an eighth of the plan, unless it completes the plan."""
    state = replace(begin(LIMITS), slots=40)
    room_bytes = 24 * LIMITS.slot_bytes
    seven = World(others_bytes=room_bytes - 7 * LIMITS.slot_bytes)
    assert set(slots_over_time(seven, state, times=200)) == {40}
    eight = World(others_bytes=room_bytes - 8 * LIMITS.slot_bytes)
    assert slots_over_time(eight, state, times=200)[-1] == 48
    last = replace(begin(LIMITS), slots=63)
    assert slots_over_time(World(), last, times=70)[-1] == 64


def test_a_shortage_that_comes_back_starts_the_quiet_time_again() -> None:
    calm, short = World(), World(others_bytes=2 * GIB)
    state = begin(LIMITS)
    now_s = 0.0
    for _ in range(5):
        for world in [short, *[calm] * 50]:
            state = decide(state, world.reading(state.slots, now_s), now_s).state
            now_s += PERIOD_S
        assert state.slots == 47


def test_an_engine_in_debt_keeps_one_tokens_experts() -> None:
    [decision] = watched(World(others_bytes=100 * GIB), begin(LIMITS), times=1)
    assert decision.state.slots == LIMITS.least_slots
    assert decision.left_bytes == -98 * GIB
