"""How long an attempt may be silent before it counts as stalled, learned from measured gaps.

The estimate follows RFC 6298 (TCP's retransmission timer): a smoothed mean with gain 1/8 and a
smoothed deviation with gain 1/4. Decode gaps have two humps, because a neighbour's prefill chunk
delays a whole batch now and then, and a smoothed mean forgets a rare long gap within ten short
ones. So the longest recent gap is kept as well, and fades by 1/64 with each gap.

Laws: a deadline is never below the floor; a gap no longer than one of the last 64 is never a
stall; a steady stream brings the deadline down to the floor and three gaps.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from headrace_replicas.contract.settings import FailoverSettings

Phase = Literal["prefill", "decode"]

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 2.0
_PEAK_FADE: Final = 63 / 64
_GAPS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GapEstimator:
    """What was learned about the gaps between two signs of life.

    Attributes:
        count: Gaps measured; the other fields mean nothing while it is 0.
        mean_s: Smoothed mean.
        deviation_s: Smoothed distance from the mean.
        peak_s: The longest gap, faded by the gaps since.
    """

    count: int = 0
    mean_s: float = 0.0
    deviation_s: float = 0.0
    peak_s: float = 0.0


def observe(estimator: GapEstimator, gap_s: float) -> GapEstimator:
    """The estimator after one more gap; a negative one counts as none."""
    gap_s = max(0.0, gap_s)
    if estimator.count == 0:
        return GapEstimator(count=1, mean_s=gap_s, deviation_s=gap_s / 2, peak_s=gap_s)
    distance_s = abs(gap_s - estimator.mean_s)
    return GapEstimator(
        count=estimator.count + 1,
        mean_s=estimator.mean_s + _MEAN_GAIN * (gap_s - estimator.mean_s),
        deviation_s=estimator.deviation_s + _DEVIATION_GAIN * (distance_s - estimator.deviation_s),
        peak_s=max(gap_s, estimator.peak_s * _PEAK_FADE),
    )


def expected_gap_s(estimator: GapEstimator, first_gap_s: float) -> float:
    """The longest gap to expect, seconds; `first_gap_s` before any was measured."""
    if estimator.count == 0:
        return first_gap_s
    return max(estimator.mean_s + _DEVIATIONS * estimator.deviation_s, estimator.peak_s)


def deadline_s(estimator: GapEstimator, *, floor_s: float, first_gap_s: float) -> float:
    """Seconds of silence after which an attempt is stalled: the floor and three expected gaps."""
    return floor_s + _GAPS * expected_gap_s(estimator, first_gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseGaps:
    """One estimator for waiting and prefill, one for decode: their gaps differ by a factor."""

    prefill: GapEstimator = field(default_factory=GapEstimator)
    decode: GapEstimator = field(default_factory=GapEstimator)


def observe_phase(gaps: PhaseGaps, phase: Phase, gap_s: float) -> PhaseGaps:
    """The estimators after one more gap in this phase."""
    match phase:
        case "prefill":
            return replace(gaps, prefill=observe(gaps.prefill, gap_s))
        case "decode":
            return replace(gaps, decode=observe(gaps.decode, gap_s))


def phase_deadline_s(gaps: PhaseGaps, phase: Phase, settings: FailoverSettings) -> float:
    """Seconds of silence in this phase after which an attempt is stalled."""
    estimator = gaps.prefill if phase == "prefill" else gaps.decode
    return deadline_s(estimator, floor_s=settings.stall_floor_s, first_gap_s=settings.first_gap_s)
