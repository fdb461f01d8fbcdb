"""How learning rate and rounding change over a training run (pure functions)."""

from __future__ import annotations

import math
from typing import Final

_WARM_UP_STEPS: Final = 250
_LAST_RATE: Final = 0.01
_ROUNDING_FROM: Final = 0.72
_ROUNDING_WHOLE_AT: Final = 0.80


def done_ratio(*, step: int, steps: int, minutes: float, most_minutes: float) -> float:
    """How much of the run is over, by steps or by time, whichever is further; the end is 1."""
    return max(step / steps, minutes / most_minutes)


def learning_rate_factor(*, step: int, done: float) -> float:
    """Factor of the highest learning rate: warm-up, then a cosine down to 1 %.

    Args:
        step: The number of the step, from 0.
        done: What `done_ratio` says.
    """
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return warm * (_LAST_RATE + (1 - _LAST_RATE) * cosine)


def rounding_share(done: float) -> float:
    """How much of the 4-bit rounding is mixed into the weights: from 0 to 1."""
    risen = (done - _ROUNDING_FROM) / (_ROUNDING_WHOLE_AT - _ROUNDING_FROM)
    return min(1.0, max(0.0, risen))
