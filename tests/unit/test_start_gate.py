"""The laws of starting an engine again: pauses, the breaker, poisoned births, stranded memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.start_gate import (
    Ending,
    MemoryReading,
    PastStart,
    Quarantine,
    Start,
    StartDecision,
    Wait,
    decide_memory,
    decide_start,
)

SETTINGS = FaultSettings(
    back_off_s=1.0,
    back_off_max_s=300.0,
    breaker_deaths=3,
    breaker_window_s=900.0,
    breaker_hold_s=900.0,
    memory_wait_s=120.0,
)
PATIENT = SETTINGS.model_copy(update={"breaker_deaths": 1000})
GIB = 2**30


def run(
    at_s: float,
    lived_s: float = 5.0,
    kind: FaultKind | None = FaultKind.KILLED,
    *,
    worked: bool = True,
    boot_id: str = "boot-1",
    host_down: bool = False,
) -> PastStart:
    """An engine that was started and has ended."""
    ending = Ending(
        at_s=at_s + lived_s, kind=kind, worked=worked, lived_s=lived_s, host_down=host_down,
        text="it died",
    )  # fmt: skip
    return PastStart(generation=1, at_s=at_s, pid=1, boot_id=boot_id, ending=ending)


def decide(
    history: Sequence[PastStart],
    now_s: float,
    settings: FaultSettings = SETTINGS,
    *,
    draw: float = 0.0,
    boot_id: str = "boot-1",
) -> StartDecision:
    return decide_start(history, now_s=now_s, boot_id=boot_id, settings=settings, draw=draw)


def poisoned(at_s: float, boot_id: str = "boot-1") -> PastStart:
    return run(at_s, 2.0, FaultKind.SUBMISSIONS_IGNORED, worked=False, boot_id=boot_id)


def test_the_first_start_of_a_device_waits_for_nothing() -> None:
    assert decide((), 0.0) == Start()


def test_ends_in_order_are_no_deaths() -> None:
    assert decide([run(at_s, kind=None) for at_s in range(0, 100, 10)], 96.0) == Start()


def test_pauses_double_with_each_death_in_a_row() -> None:
    history: list[PastStart] = []
    pauses = []
    at_s = 1000.0
    for _ in range(12):
        history.append(run(at_s))
        died_s = at_s + 5
        decision = decide(history, died_s, PATIENT)
        assert isinstance(decision, Wait)
        assert "it died" in decision.reason
        pauses.append(decision.until_s - died_s)
        at_s = decision.until_s
        assert decide(history, at_s, PATIENT) == Start()
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300])


def test_a_long_run_begins_a_new_row() -> None:
    history = [run(0), run(100), run(200, lived_s=901)]
    decision = decide(history, 1101.0)
    assert isinstance(decision, Wait)
    assert decision.until_s == 1102.0


def test_the_breaker_holds_and_then_tries_one_start() -> None:
    """M2: three deaths within a quarter of an hour, two minutes after each start."""
    history = [run(0, 120), run(130, 120), run(260, 120)]
    held = decide(history, 380.0)
    assert isinstance(held, Wait)
    assert held.until_s == 380 + 900
    assert "held for 900 s" in held.reason
    assert isinstance(decide(history, 1279.0), Wait)
    assert decide(history, 1280.0) == Start(trial=True)
    tried = [*history, run(1280, 120)]
    again = decide(tried, 1400.0)
    assert isinstance(again, Wait)
    assert again.until_s == 1400 + 900


def test_a_trial_that_lives_closes_the_breaker() -> None:
    history = [run(0), run(10), run(20), run(1000, lived_s=2000)]
    assert decide(history, 3005.0) == Start()


def test_a_trial_that_left_in_order_after_a_moment_proves_nothing() -> None:
    history = [run(0), run(10), run(20), run(1000, kind=None)]
    assert decide(history, 1010.0) == Start(trial=True)


def test_deaths_far_apart_do_not_trip_the_breaker() -> None:
    history = [run(at_s) for at_s in (0, 500, 1000, 1500)]
    decision = decide(history, 1505.0)
    assert isinstance(decision, Wait)
    assert decision.until_s < 1520


def test_three_poisoned_births_quarantine_the_host_and_there_is_no_fourth() -> None:
    """E5."""
    history = [poisoned(0), poisoned(10)]
    for count in (1, 2):
        assert isinstance(decide(history[:count], history[count - 1].at_s + 2.0), Wait)
        assert decide(history[:count], 900.0) == Start()
    history.append(poisoned(20))
    for now_s in (22.0, 1e6, 1e9):
        decision = decide(history, now_s)
        assert isinstance(decision, Quarantine)
        assert decision.until_s is None
        assert "reboot" in decision.reason


def test_a_reboot_ends_it_and_what_was_before_counts_for_nothing() -> None:
    history = [poisoned(0), poisoned(10), poisoned(20)]
    assert decide(history, 30.0, boot_id="boot-2") == Start()
    again = [*history, poisoned(40, "boot-2")]
    assert isinstance(decide(again, 42.0, boot_id="boot-2"), Wait)
    assert decide(again, 60.0, boot_id="boot-2") == Start()


@pytest.mark.parametrize(
    "between",
    [
        run(15, kind=FaultKind.KILLED),
        run(15, kind=FaultKind.SUBMISSIONS_IGNORED, worked=True),
        run(15, kind=None, worked=True),
    ],
)
def test_poisoned_births_count_in_a_row_only(between: PastStart) -> None:
    history = [poisoned(0), poisoned(10), between, poisoned(20)]
    assert not isinstance(decide(history, 25.0), Quarantine)


def test_a_start_that_was_refused_in_order_does_not_break_the_row() -> None:
    history = [poisoned(0), poisoned(10), run(15, kind=None, worked=False), poisoned(20)]
    assert isinstance(decide(history, 25.0), Quarantine)


def test_after_the_host_went_down_a_minute_passes() -> None:
    """P1."""
    history = [run(0, lived_s=500, host_down=True)]
    decision = decide(history, 520.0, boot_id="boot-2")
    assert isinstance(decision, Wait)
    assert decision.until_s == 560
    assert decide(history, 560.0, boot_id="boot-2") == Start()


def test_a_stamp_from_the_future_proves_nothing() -> None:
    assert decide([run(1e6)], 1000.0) == Start()


KINDS = st.sampled_from([None, *FaultKind])
# Whole seconds, so that sums are exact.
RUNS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 3000), KINDS, st.booleans()), max_size=30
)


@settings(max_examples=50)
@given(runs=RUNS, draw=st.floats(0, 1), later_s=st.integers(0, 5000))
def test_no_wait_is_longer_than_the_settings_allow_and_it_ends(
    runs: list[tuple[int, int, FaultKind | None, bool]], draw: float, later_s: int
) -> None:
    now_s, history = 1000.0, []
    for pause_s, lived_s, kind, worked in runs:
        history.append(run(now_s + pause_s, lived_s, kind, worked=worked))
        now_s += pause_s + lived_s
    decision = decide(history, now_s + later_s, draw=draw)
    match decision:
        case Wait(until_s=until_s):
            assert now_s + later_s < until_s <= now_s + 900
            assert isinstance(decide(history, until_s, draw=draw), Start)
        case Quarantine():
            assert all(not one.ending.worked for one in history[-3:] if one.ending)
        case Start():
            assert decide(history, now_s + later_s + 1, draw=draw) == decision


@given(deaths=st.integers(1, 10_000), draw=st.floats(0, 1))
def test_no_number_of_deaths_is_too_large(deaths: int, draw: float) -> None:
    history = [run(0.0, 0.0)] * deaths
    decision = decide(
        history, 0.0, SETTINGS.model_copy(update={"breaker_deaths": 10**6}), draw=draw
    )
    assert isinstance(decision, Wait)
    assert min(2.0 ** min(deaths - 1, 30), 300) / 2 <= decision.until_s <= 300


def after(held_gib: float, before: MemoryReading, **changes: object) -> list[PastStart]:
    start = replace(run(0), memory=before, held_bytes=int(held_gib * GIB))
    return [replace(start, **changes)]  # type: ignore[arg-type]


def reading(available_gib: float, wired_gib: float | None = None) -> MemoryReading:
    return MemoryReading(
        available_bytes=int(available_gib * GIB),
        wired_bytes=None if wired_gib is None else int(wired_gib * GIB),
    )


def decide_on(
    history: Sequence[PastStart],
    now: MemoryReading,
    now_s: float = 10.0,
    need_gib: float | None = None,
    boot_id: str = "boot-1",
) -> StartDecision:
    need_bytes = None if need_gib is None else int(need_gib * GIB)
    return decide_memory(
        history, now, need_bytes=need_bytes, now_s=now_s, boot_id=boot_id, settings=SETTINGS
    )


def test_memory_that_came_back_lets_the_next_engine_start() -> None:
    assert decide_on(after(40, reading(60)), reading(55)) == Start()


def test_stranded_memory_is_waited_for_and_then_quarantines() -> None:
    """M1: no start while it is stranded."""
    history = after(40, reading(60))
    decision = decide_on(history, reading(25))
    assert isinstance(decision, Wait)
    assert decision.until_s == 130
    assert "35.0 GiB of the last engine's 40.0 GiB" in decision.reason
    noted = after(40, reading(60), stranded_s=10.0)
    assert isinstance(decide_on(noted, reading(25), 129.0), Wait)
    assert decide_on(noted, reading(55), 129.0) == Start()
    final = decide_on(noted, reading(25), 130.0)
    assert isinstance(final, Quarantine)
    assert final.until_s is None
    assert "Reboot" in final.reason


def test_memory_that_others_took_is_nothing_when_there_is_enough() -> None:
    assert decide_on(after(40, reading(100)), reading(60), need_gib=50) == Start()
    assert isinstance(decide_on(after(40, reading(100)), reading(60), need_gib=70), Wait)


def test_on_a_mac_wired_memory_counts() -> None:
    history = after(400, reading(480, wired_gib=4))
    assert decide_on(history, reading(90, wired_gib=6)) == Start()
    assert isinstance(decide_on(history, reading(90, wired_gib=390)), Wait)


def test_a_reboot_gave_all_memory_back() -> None:
    history = after(40, reading(60), stranded_s=0.0)
    assert decide_on(history, reading(25), 500.0, boot_id="boot-2") == Start()


def test_without_anything_known_nothing_is_stranded() -> None:
    assert decide_on((), reading(1)) == Start()
    assert decide_on([run(0)], reading(1)) == Start()
    assert decide_on(after(0, reading(60)), reading(1)) == Start()


def test_what_an_engine_holds_is_known_from_those_before_when_it_died_early() -> None:
    history = [*after(40, reading(60)), *after(0, reading(59))]
    assert isinstance(decide_on(history, reading(20)), Wait)
