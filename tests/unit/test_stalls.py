"""How long an attempt may be silent."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve.stalls import (
    GapEstimator,
    PhaseGaps,
    deadline_s,
    observe,
    observe_phase,
    phase_deadline_s,
)

gaps = st.floats(min_value=0.0, max_value=600.0)


def learned(*measured_s: float) -> GapEstimator:
    estimator = GapEstimator()
    for gap_s in measured_s:
        estimator = observe(estimator, gap_s)
    return estimator


def deadline_after(*measured_s: float) -> float:
    return deadline_s(learned(*measured_s), floor_s=0.5, first_gap_s=2.0)


def test_before_any_gap_the_setting_is_expected() -> None:
    """The first deadline is the floor and three of the gaps that the settings expect."""
    assert deadline_after() == 0.5 + 3 * 2.0


@given(st.lists(gaps, min_size=1))
def test_the_deadline_is_finite_and_never_below_the_floor(measured_s: list[float]) -> None:
    """Whatever was measured, there is a deadline, and it leaves the floor."""
    assert 0.5 <= deadline_after(*measured_s) < 0.5 + 3 * 3 * 600.0


@given(st.lists(gaps, min_size=1, max_size=64), st.lists(gaps))
def test_a_gap_like_one_of_the_last_64_is_no_stall(
    recent_s: list[float], before_s: list[float]
) -> None:
    """A neighbour's prefill that delayed the batch once may delay it again."""
    assert deadline_after(*before_s, *recent_s) > max(recent_s)


def test_one_long_gap_is_remembered_for_64_gaps() -> None:
    """Among steady short gaps a rare long one is still expected when the next is due."""
    steady = [0.03] * 100
    assert deadline_after(*steady) < 1.0
    assert deadline_after(*steady, 5.0, *[0.03] * 63) > 5.0


@given(st.floats(min_value=0.001, max_value=10.0), st.lists(gaps, max_size=5))
def test_a_steady_stream_brings_the_deadline_down(gap_s: float, before_s: list[float]) -> None:
    """After enough equal gaps the deadline is the floor and three of them, whatever was before."""
    assert abs(deadline_after(*before_s, *[gap_s] * 2000) - (0.5 + 3 * gap_s)) < 0.01


@given(st.lists(gaps, min_size=1), gaps, gaps)
def test_a_longer_gap_never_shortens_the_deadline(
    before_s: list[float], one_s: float, other_s: float
) -> None:
    """Of two gaps above the mean, the longer one leads to the later deadline."""
    base_s = learned(*before_s).mean_s
    short_s, long_s = sorted((base_s + one_s, base_s + other_s))
    assert deadline_after(*before_s, short_s) <= deadline_after(*before_s, long_s) + 1e-9


def test_a_negative_gap_counts_as_none() -> None:
    """A gap below 0 is taken as 0."""
    assert learned(0.1, -5.0) == learned(0.1, 0.0)


def test_prefill_and_decode_are_learned_apart() -> None:
    """Slow prefill chunks do not lengthen the deadline of decode, nor the other way round."""
    settings = FailoverSettings()
    fresh = PhaseGaps()
    slow = observe_phase(fresh, "prefill", 30.0)
    assert phase_deadline_s(slow, "prefill", settings) > 90.0
    assert phase_deadline_s(slow, "decode", settings) == phase_deadline_s(fresh, "decode", settings)
    quick = observe_phase(slow, "decode", 0.03)
    assert phase_deadline_s(quick, "decode", settings) < 1.0
    assert quick.prefill == slow.prefill
