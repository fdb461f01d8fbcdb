"""When a watchdog kills, in virtual time: looks every 50 ms at a process that a test plays."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.flight import Phase
from headrace_replicas.flight_layout import BUSY_PHASES
from headrace_replicas.hang_watch import (
    AskForStacks,
    FlightReading,
    HangLimits,
    Kill,
    Leave,
    Wait,
    WatchState,
    WatchStep,
    begin_watch,
    watch,
)

LIMITS = HangLimits(floor_s=10.0, first_s=120.0, reading_s=300.0, grace_s=2.0)
LOOK_S = 0.05


@dataclass(slots=True)
class Played:
    """An engine and its watchdog on one virtual clock."""

    phase: Phase = "idle"
    now_s: float = 1000.0
    marks: int = 0
    beats: int = 0
    alive: bool = True
    ended: bool = False
    asked_s: list[float] = field(default_factory=list)
    killed: Kill | None = None
    killed_s: float = 0.0
    state: WatchState | None = None

    def reading(self) -> FlightReading:
        return FlightReading(
            phase=self.phase,
            busy=self.phase in BUSY_PHASES,
            marks=self.marks,
            beats=self.beats,
            ended=self.ended,
        )

    def look(self) -> WatchStep:
        if self.state is None:
            self.state = begin_watch(self.reading(), self.now_s)
        self.state, step = watch(self.state, self.reading(), self.now_s, LIMITS)
        if isinstance(step, AskForStacks):
            self.asked_s.append(self.now_s)
        if isinstance(step, Kill):
            self.killed, self.killed_s = step, self.now_s
        return step

    def run(self, seconds: float, *, mark_every_s: float | None = None) -> "Played":
        """Let time pass, with a mark of progress every so often; ends early with a kill."""
        end_s, next_mark_s = self.now_s + seconds, self.now_s + (mark_every_s or seconds * 2)
        while self.now_s < end_s and self.killed is None:
            self.now_s += LOOK_S
            if mark_every_s is not None and self.now_s >= next_mark_s:
                self.marks += 1
                next_mark_s += mark_every_s
            if self.alive:
                self.beats = int(self.now_s / 0.5)
            self.look()
        return self

    def enter(self, phase: Phase) -> "Played":
        self.phase = phase
        self.marks += 1
        return self


def test_a_prefill_of_six_minutes_that_progresses_is_not_killed() -> None:
    """H3: progress counts, not how long a phase lasts."""
    engine = Played().enter("prefill").run(360, mark_every_s=8)
    assert engine.killed is None
    assert not engine.asked_s


@pytest.mark.parametrize("phase", sorted(BUSY_PHASES))
def test_a_busy_phase_that_has_never_progressed_gets_the_long_limit(phase: Phase) -> None:
    engine = Played().enter(phase).run(400)
    assert engine.killed is not None
    assert engine.killed.phase == phase
    assert 120 < engine.asked_s[0] - 1000 < 121
    assert 2.0 <= engine.killed_s - engine.asked_s[0] < 2.2


def test_a_busy_phase_that_has_progressed_gets_the_floor() -> None:
    engine = Played().enter("decode").run(30, mark_every_s=0.1)
    stalled_s = engine.now_s
    engine.run(100)
    assert engine.killed is not None
    assert engine.killed_s - stalled_s < 10 + 2 + 0.5
    assert engine.killed.allowed_s == 10
    assert not engine.killed.stopped


def test_a_load_keeps_the_long_limit_after_its_weights_came_fast() -> None:
    """What follows them, kernels that are compiled, is slow in another way."""
    engine = Played().enter("load").run(30, mark_every_s=0.1).run(115)
    assert engine.killed is None
    engine.run(20)
    assert engine.killed is not None
    assert engine.killed.phase == "load"


def test_long_gaps_are_learned_each_phase_for_itself() -> None:
    engine = Played().enter("prefill").run(100, mark_every_s=6)
    engine.enter("decode").run(20, mark_every_s=0.1)
    began_s = engine.enter("prefill").now_s
    engine.run(100)
    assert engine.killed is not None
    assert 28 < engine.asked_s[0] - began_s < 31
    assert engine.killed.phase == "prefill"


def test_what_was_learned_fades() -> None:
    engine = Played().enter("decode").run(40, mark_every_s=19)
    engine.run(3 * 3600, mark_every_s=0.5)
    stalled_s = engine.now_s
    engine.run(200)
    assert engine.asked_s[0] - stalled_s < 11


def test_progress_after_the_stack_dump_calls_the_kill_off_and_is_learned() -> None:
    engine = Played().enter("decode").run(10, mark_every_s=0.1).run(11)
    assert len(engine.asked_s) == 1
    engine.run(1, mark_every_s=0.1)
    engine.run(40)
    assert engine.killed is None
    assert len(engine.asked_s) == 1


def test_waiting_for_storage_has_its_own_limit() -> None:
    engine = Played().enter("decode").run(10, mark_every_s=0.1).enter("read").run(290)
    assert engine.killed is None
    engine.run(20)
    assert engine.killed is not None
    assert engine.killed.phase == "read"


def test_an_idle_engine_need_not_progress() -> None:
    assert Played().run(3600).killed is None


def test_an_idle_engine_whose_heart_stands_still_is_killed() -> None:
    engine = Played().run(60)
    engine.alive = False
    engine.run(60)
    assert engine.killed is not None
    assert engine.killed.stopped
    assert engine.killed.phase == "idle"
    assert engine.killed_s - 1060 < 10 + 2 + 1


def test_a_machine_that_slept_kills_nothing() -> None:
    engine = Played().enter("decode").run(30, mark_every_s=0.1)
    for _ in range(5):
        engine.now_s += 3600
        assert isinstance(engine.look(), Wait)
        engine.run(5)
    assert not engine.asked_s


def test_a_sleep_in_the_grace_time_gives_all_of_the_silence_again() -> None:
    engine = Played().enter("decode").run(30, mark_every_s=0.1).run(11)
    assert engine.asked_s
    engine.now_s += 100
    engine.run(9.5)
    assert engine.killed is None
    engine.run(5)
    assert engine.killed is not None


def test_a_sleep_is_not_learned_as_a_gap() -> None:
    engine = Played().enter("decode").run(30, mark_every_s=0.1)
    engine.now_s += 3600
    engine.marks += 1
    engine.run(1, mark_every_s=0.1)
    stalled_s = engine.now_s
    engine.run(60)
    assert engine.killed is not None
    assert engine.killed_s - stalled_s < 13


def test_who_says_that_it_ends_is_left() -> None:
    engine = Played().enter("teardown")
    engine.look()
    engine.ended = True
    assert isinstance(engine.look(), Leave)


@given(
    gaps=st.lists(st.floats(0.01, 9.5), min_size=1, max_size=60),
    phase=st.sampled_from(sorted(BUSY_PHASES)),
)
def test_progress_within_the_floor_is_never_suspicious(gaps: list[float], phase: Phase) -> None:
    engine = Played().enter(phase)
    for gap in gaps:
        engine.run(gap)
        engine.marks += 1
    assert engine.killed is None
    assert not engine.asked_s


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 400)), max_size=40))
def test_no_kill_without_a_stack_dump_a_grace_before(moves: list[tuple[bool, float]]) -> None:
    state = begin_watch(FlightReading(phase="decode", busy=True, marks=0, beats=0, ended=False), 0)
    now_s, marks, asked_s, moved_s = 0.0, 0, -1.0, 0.0
    for moves_on, seconds in moves:
        marks += moves_on
        for _ in range(int(seconds)):
            now_s += 1.0
            reading = FlightReading(phase="decode", busy=True, marks=marks, beats=0, ended=False)
            moved_s = now_s if state.reading.marks != marks else moved_s
            state, step = watch(state, reading, now_s, LIMITS)
            if isinstance(step, AskForStacks):
                asked_s = now_s
            if isinstance(step, Kill):
                assert asked_s > moved_s
                assert now_s - asked_s >= LIMITS.grace_s
                return
