"""The one place that reads a clock.

Stamps that cross a process or a host are wall-clock seconds (`now_s`). Durations inside a
process are differences of `monotonic_s`, which no clock adjustment can turn negative.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell takes its time from. Pure modules get times as arguments instead."""

    def now_s(self) -> float:
        """Wall-clock time, seconds since the Unix epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def now_s(self) -> float:
        """Wall-clock time, seconds since the Unix epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        return time.monotonic()
