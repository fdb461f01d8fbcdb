"""When a process that makes no progress is hung; pure: state and reading in, state and step out.

Laws: a process that progresses at least once in `floor_s` is never killed, however long its phase
lasts. Nothing is killed without stacks having been asked for `grace_s` before, and progress in
between calls it off. Time in which the watchdog itself stood still counts for nothing. An idle
process need not progress, but its heartbeat must go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from headrace_replicas.contract.flight import Phase

# Five times the longest gap that was seen: kernels that are compiled for a new shape, and prompts
# that are longer than any before, take a few times as long as usual, not ten times.
_GAPS: Final = 5
# An old gap counts half after this long, so that one bad minute does not blunt the watch for ever.
_HALF_LIFE_S: Final = 1800.0
# A look that is later than this after the one before: the machine slept, or stood still.
_LATE_S: Final = 1.0
# Four heartbeats.
_STOPPED_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long a process may go without progress; see `FaultSettings.hang_*`."""

    floor_s: float
    first_s: float
    reading_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightReading:
    """What the flight record says at one look."""

    phase: Phase
    busy: bool
    marks: int
    beats: int
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """The longest gap of a phase, and when it ended."""

    seconds: float
    at_s: float

    def faded(self, now_s: float) -> float:
        half_lives = (now_s - self.at_s) / _HALF_LIFE_S
        return self.seconds * float(0.5**half_lives)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchState:
    """What is known of a process.

    Attributes:
        looked_s: When it was looked at last, on the watchdog's monotonic clock.
        reading: What was seen then.
        moved_s: When it made progress last.
        beat_s: When its heart beat last.
        gaps: The longest gap of each phase that has shown progress.
        beat_gap: The longest gap between two heartbeats.
        asked_s: When its stacks were asked for; None while nothing is wrong.
    """

    looked_s: float
    reading: FlightReading
    moved_s: float
    beat_s: float
    gaps: Mapping[Phase, _Gap] = field(default_factory=dict)
    beat_gap: _Gap
    asked_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done now."""


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """It seems hung: have it write its stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """It is hung.

    Attributes:
        phase: What it was doing.
        silence_s: Since when.
        allowed_s: How long it might have.
        stopped: Whether its heartbeat stood still too.
    """

    phase: Phase
    silence_s: float
    allowed_s: float
    stopped: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """It has said that it ends: there is nothing to watch any more."""


WatchStep = Wait | AskForStacks | Kill | Leave


def begin_watch(reading: FlightReading, now_s: float) -> WatchState:
    """The state at the first look."""
    return WatchState(
        looked_s=now_s,
        reading=reading,
        moved_s=now_s,
        beat_s=now_s,
        beat_gap=_Gap(seconds=0.0, at_s=now_s),
    )


def watch(
    state: WatchState, reading: FlightReading, now_s: float, limits: HangLimits
) -> tuple[WatchState, WatchStep]:
    """Take one more look.

    Args:
        state: What is known.
        reading: What is seen now.
        now_s: The watchdog's monotonic clock.
        limits: How long is too long.

    Returns:
        What is known then, and what is to be done.
    """
    if reading.ended:
        return state, Leave()
    state = _updated(_awake(state, now_s), reading, now_s)
    idle = not reading.busy and reading.phase != "read"
    silence_s = now_s - (max(state.moved_s, state.beat_s) if idle else state.moved_s)
    allowed_s = _allowed_s(state, now_s, limits, idle=idle)
    if silence_s <= allowed_s:
        return replace(state, asked_s=None), Wait()
    if state.asked_s is None:
        return replace(state, asked_s=now_s), AskForStacks()
    if now_s - state.asked_s < limits.grace_s:
        return state, Wait()
    stopped = now_s - max(state.moved_s, state.beat_s) > _STOPPED_S
    return state, Kill(
        phase=reading.phase, silence_s=silence_s, allowed_s=allowed_s, stopped=stopped
    )


def _awake(state: WatchState, now_s: float) -> WatchState:
    """After a standstill of the watchdog all silence counts from now."""
    if now_s - state.looked_s <= _LATE_S:
        return state
    return replace(state, moved_s=now_s, beat_s=now_s, asked_s=None)


def _updated(state: WatchState, reading: FlightReading, now_s: float) -> WatchState:
    """Learn from what has changed since the last look."""
    before = state.reading
    if reading.marks != before.marks:
        gap = _longer(state.gaps.get(before.phase), now_s - state.moved_s, now_s)
        gaps = {**state.gaps, before.phase: gap}
        state = replace(state, moved_s=now_s, gaps=gaps, asked_s=None)
    if reading.beats != before.beats:
        beat_gap = _longer(state.beat_gap, now_s - state.beat_s, now_s)
        state = replace(state, beat_s=now_s, beat_gap=beat_gap)
    return replace(state, looked_s=now_s, reading=reading)


def _longer(known: _Gap | None, seconds: float, now_s: float) -> _Gap:
    faded = 0.0 if known is None else known.faded(now_s)
    return _Gap(seconds=max(seconds, faded), at_s=now_s)


def _allowed_s(state: WatchState, now_s: float, limits: HangLimits, *, idle: bool) -> float:
    if state.reading.phase == "read":
        return limits.reading_s
    if idle:
        return max(limits.floor_s, _GAPS * state.beat_gap.faded(now_s))
    gap = state.gaps.get(state.reading.phase)
    learned_s = 0.0 if gap is None else _GAPS * gap.faded(now_s)
    # What a load does it does for the first time, from one part to the next.
    is_first = gap is None or state.reading.phase == "load"
    return max(limits.floor_s, learned_s, limits.first_s if is_first else 0.0)
