"""When reads were waited for, and how long nothing was heard of them."""

import time
from collections.abc import Sequence
from itertools import pairwise


class ReadWaits:
    """Sleeps for injected faults, and remembers when.

    Args:
        stall_s: What the stalled read asks for, and nobody else.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._slept_s: list[tuple[float, float]] = []
        self._stalled_s = (0.0, 0.0)

    def sleep(self, seconds: float) -> None:
        """Wait, on whatever thread."""
        began_s = time.monotonic()
        time.sleep(seconds)
        slept_s = (began_s, time.monotonic())
        self._slept_s.append(slept_s)
        if seconds == self.stall_s:
            self._stalled_s = slept_s

    @property
    def stalled_s(self) -> float:
        """How long the stalled read took; 0 when there was none."""
        return self._stalled_s[1] - self._stalled_s[0]

    def longest_pause_s(self, marks_s: Sequence[float]) -> float:
        """The longest time without a mark of progress while reads were waited for.

        The stalled read does not count.
        """
        pauses_s = [0.0]
        for begin_s, end_s in _united(self._slept_s):
            inside_s = [at_s for at_s in marks_s if begin_s < at_s < end_s]
            pauses_s += map(self._outside_s, pairwise([begin_s, *inside_s, end_s]))
        return max(pauses_s)

    def _outside_s(self, pause_s: tuple[float, float]) -> float:
        begin_s, end_s = pause_s
        overlap_s = min(end_s, self._stalled_s[1]) - max(begin_s, self._stalled_s[0])
        return end_s - begin_s - max(0.0, overlap_s)


def _united(times_s: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Times that overlap as one."""
    united: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(times_s):
        if united and begin_s <= united[-1][1]:
            united[-1] = (united[-1][0], max(end_s, united[-1][1]))
        else:
            united.append((begin_s, end_s))
    return united
