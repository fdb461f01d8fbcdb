"""Decides how many expert slots a running engine keeps, from what its host has left.

A memory plan is made once, from what the host gave before the engine took any of it. Programs that
start later take from the same memory. What counts is what the plan has left of it: available now,
less what the plan has promised to the engine itself (its KV cache) and the engine does not use yet.
So an engine's own use moves nothing, and neither do pages of files, which count as available.

Pure. Laws:
- Slots stay between one token's experts and the plan's.
- They become fewer as soon as half of the headroom is gone, and at once by so many that the whole
  headroom is there again (or by all that may go). While the host swaps or its processes wait for
  memory, that happens as soon as anything of the headroom is gone. Where the headroom is whole,
  swapping and waiting alone take no slot: reading many files causes both.
- A Mac's own level of pressure counts as half of the headroom gone (warn) or all of it (critical),
  whatever the numbers say, because its kernel counts memory as available that it can compress.
- They become more only where there was room for more during a whole quiet time, and to as many as
  leave the whole headroom.
- A reading that stays the same leads to a number of slots that stays the same, and never to fewer
  after more.
"""

from dataclasses import dataclass, replace
from typing import Final

from headrace_replicas.engine.footprint import HostPressure
from headrace_replicas.engine.memory_refusal import shown_bytes

# There must be room for so long before slots become more: each growth copies pools and reads
# experts again, so a program that comes and goes must not be followed.
QUIET_S: Final = 60.0
# A kernel needs a moment to notice memory that was given back; its level counts again after that.
SETTLE_S: Final = 5.0
# Smaller growth than this part of the plan is not worth the copying, unless it completes the plan.
_GROWTH_PARTS: Final = 8
# More than a page now and then: a page that some program left in swap long ago is no shortage.
_SWAPPING_BYTES_PER_S: Final = 2**20
# Share of time in which some process waited for memory.
_STALLED_RATIO: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan allows.

    Attributes:
        least_slots: One token's experts.
        planned_slots: The most that there may be.
        slot_bytes: Memory of one slot in all streaming layers together.
        planned_bytes: Resident weights, all planned slots and the whole KV cache.
        headroom_bytes: What should stay free.
    """

    least_slots: int
    planned_slots: int
    slot_bytes: int
    planned_bytes: int
    headroom_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Memory at one moment.

    Attributes:
        host: How the host fares.
        active_bytes: What the engine uses, in MLX's count.
        cached_bytes: Freed memory that MLX's allocator keeps; the headroom is there for it too.
    """

    host: HostPressure
    active_bytes: int
    cached_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known between two readings.

    Attributes:
        limits: What the plan allows.
        slots: How many there are in each streaming layer.
        host: The newest reading of the host; None before the first.
        read_s: Monotonic second of it.
        room_since_s: Since when there has been room for more slots; None while there is none.
        shrunk_s: When slots last became fewer.
    """

    limits: Limits
    slots: int
    host: HostPressure | None = None
    read_s: float = 0.0
    room_since_s: float | None = None
    shrunk_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now.

    Attributes:
        state: With the slots that there should be.
        left_bytes: What the plan has left of the host's memory; negative when it is in debt.
        reason: For a person; empty when the slots stay as they are.
    """

    state: State
    left_bytes: int
    reason: str = ""


def begin(limits: Limits) -> State:
    """All slots of a plan."""
    return State(limits=limits, slots=limits.planned_slots)


def decide(state: State, reading: Reading, now_s: float) -> Decision:
    """How many slots there should be from now on.

    Args:
        state: As the last decision left it; its slots are there by now.
        reading: Memory now.
        now_s: Monotonic seconds.
    """
    strain = _strain(state, reading.host, now_s)
    left_bytes = bytes_left(state.limits, state.slots, reading)
    counted_bytes = _counted(state, reading.host, left_bytes, now_s, strained=bool(strain))
    noted = replace(state, host=reading.host, read_s=now_s, room_since_s=None)
    if counted_bytes <= state.limits.headroom_bytes // 2:
        after = _with_less(noted, state.limits.headroom_bytes - counted_bytes, now_s)
    elif strain:
        after = noted
    else:
        spare_bytes = left_bytes - state.limits.headroom_bytes
        after = _with_more(noted, spare_bytes, state.room_since_s, now_s)
    if after.slots == state.slots:
        return Decision(state=after, left_bytes=left_bytes)
    reason = (
        f"{shown_bytes(left_bytes)} left for a headroom of "
        f"{shown_bytes(state.limits.headroom_bytes)} ({reading.host.source})"
    )
    return Decision(
        state=after, left_bytes=left_bytes, reason=f"{reason}; {strain}" if strain else reason
    )


def bytes_left(limits: Limits, slots: int, reading: Reading) -> int:
    """What a plan has left of the host's memory beside all that it promised.

    Args:
        limits: What the plan allows.
        slots: How many there are.
        reading: Memory now.
    """
    promised = limits.planned_bytes - (limits.planned_slots - slots) * limits.slot_bytes
    unused = max(promised - reading.active_bytes, 0)
    return reading.host.available_bytes + reading.cached_bytes - unused


def _strain(state: State, host: HostPressure, now_s: float) -> str:
    """What beside the numbers points to a shortage; empty when nothing does."""
    if host.level != "normal":
        return f"the system's level of pressure is {host.level}"
    elapsed_s = now_s - state.read_s
    if state.host is None or elapsed_s <= 0:
        return ""
    if host.swapped_bytes - state.host.swapped_bytes >= _SWAPPING_BYTES_PER_S * elapsed_s:
        return "the host swaps"
    if host.stalled_s - state.host.stalled_s >= _STALLED_RATIO * elapsed_s:
        return "processes wait for memory"
    return ""


def _counted(
    state: State, host: HostPressure, left_bytes: int, now_s: float, *, strained: bool
) -> int:
    """What is left, or less where something beside the numbers points to a shortage."""
    headroom_bytes = state.limits.headroom_bytes
    settled = state.shrunk_s is None or now_s - state.shrunk_s >= SETTLE_S
    if host.level == "critical" and settled:
        return min(left_bytes, 0)
    warned = host.level == "warn" and settled
    if warned or (strained and left_bytes < headroom_bytes):
        return min(left_bytes, headroom_bytes // 2)
    return left_bytes


def _with_less(state: State, lacking_bytes: int, now_s: float) -> State:
    """Without the slots that lack elsewhere, as far as they may go."""
    fewer = -(-lacking_bytes // state.limits.slot_bytes)
    slots = max(state.slots - fewer, state.limits.least_slots)
    return state if slots == state.slots else replace(state, slots=slots, shrunk_s=now_s)


def _with_more(state: State, spare_bytes: int, since_s: float | None, now_s: float) -> State:
    """With what fits into the spare bytes, once so much as this has fitted for a while."""
    limits = state.limits
    slots = min(state.slots + spare_bytes // limits.slot_bytes, limits.planned_slots)
    worth_it = slots - state.slots >= max(limits.planned_slots // _GROWTH_PARTS, 1)
    if not worth_it and not state.slots < slots == limits.planned_slots:
        return state
    since_s = now_s if since_s is None else since_s
    if now_s - since_s < QUIET_S:
        return replace(state, room_since_s=since_s)
    return replace(state, slots=slots)
