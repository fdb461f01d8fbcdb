"""What the reads of a model have met with: which ones wait, which files fail, and how often.

Workers and the engine thread note what they do; anybody may ask for a report, also while the
engine thread waits for a read that does not come back.

Laws: `troubles` of successive reports never falls; a report's text names a file, and is empty only
while there was no trouble; a file that changed stays lost.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# A read that waits this long is told of. One call asks for 1 MiB at most, which a volume of
# 5 MB/s shared by 12 readers brings within 2.5 s.
SLOW_READ_S: Final = 2.5
# Failures of a file count together for so long: a network volume may have a bad day a week.
_WINDOW_S: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """The state of a model's files, as its reads have found them.

    Attributes:
        trouble: The newest trouble as a sentence that names the file; empty when there was none.
        troubles: How many there were: batches of reads that failed, and reads that waited long.
        lost: Whether this process should not go on with its files: one has changed, or failed
            again and again.
    """

    trouble: str = ""
    troubles: int = 0
    lost: bool = False


# (file, offset or None for a look at the file itself, when it began): a call under way.
_Call = tuple[int, int | None, float]


class _Failures:
    """Of one file."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._newest_s: deque[float] = deque(maxlen=limit)

    def add(self, now_s: float) -> bool:
        """One more; whether that makes as many within the window as the limit allows."""
        self.count += 1
        self._newest_s.append(now_s)
        full = len(self._newest_s) == self._newest_s.maxlen
        return full and now_s - self._newest_s[0] <= _WINDOW_S


class ReadHealth:
    """Shared by a reader's threads.

    `began` and `ended` run with every call to the system, so they take no lock: each thread writes
    to its own entry of a dictionary, and to replace an entry is one step.

    Args:
        files: The reader's files.
        failures: Failed batches of one file, within a quarter of an hour, after which it is lost.
    """

    def __init__(self, files: Sequence[Path], *, failures: int) -> None:
        self._files = tuple(files)
        self._limit = failures
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._arrived: dict[int, int] = {}
        self._failures: dict[int, _Failures] = {}
        self._ended_troubles = 0
        self._told_troubles = 0
        self._newest = ""
        self._lost = False

    @property
    def arrived_bytes(self) -> int:
        """Bytes that have come so far."""
        return sum(list(self._arrived.values()))

    def began(self, file: int, offset: int | None, now_s: float) -> None:
        """The calling thread asks the system for bytes of a file, or for what the file is."""
        self._calls[threading.get_ident()] = (file, offset, now_s)

    def ended(self, count: int, now_s: float) -> None:
        """The calling thread's call came back with so many bytes, or with an error."""
        thread = threading.get_ident()
        self._arrived[thread] = self._arrived.get(thread, 0) + count
        call = self._calls[thread]
        waited_s = now_s - call[2]
        if waited_s < SLOW_READ_S:
            del self._calls[thread]
            return
        with self._lock:  # a report counts it as a call under way or as an ended one, never as none
            del self._calls[thread]
            self._ended_troubles += 1
            self._newest = f"{self._what(call)} took {waited_s:.1f} s"

    def failed(self, file: int, text: str, *, changed: bool, now_s: float) -> None:
        """A batch of reads ended with an error on a file.

        Args:
            file: Index into the reader's files.
            text: The error's.
            changed: Whether the file is another than the one opened, so that no later read of this
                process can be right.
            now_s: Monotonic seconds.
        """
        with self._lock:
            failures = self._failures.setdefault(file, _Failures(self._limit))
            again = failures.add(now_s)
            self._lost = self._lost or changed or again
            self._ended_troubles += 1
            self._newest = text if failures.count == 1 else f"{text} (failure {failures.count})"

    def report(self, now_s: float) -> ReadReport:
        """What there is to tell at this moment."""
        with self._lock:
            slow = [call for call in list(self._calls.values()) if now_s - call[2] >= SLOW_READ_S]
            # A call may end between a look at the clock and this one at the calls.
            troubles = max(self._told_troubles, self._ended_troubles + len(slow))
            self._told_troubles = troubles
            return ReadReport(
                trouble=self._waits(slow, now_s) if slow else self._newest,
                troubles=troubles,
                lost=self._lost,
            )

    def _waits(self, slow: Sequence[_Call], now_s: float) -> str:
        oldest = min(slow, key=lambda call: call[2])
        others = f", and {len(slow) - 1} more wait" if len(slow) > 1 else ""
        waited_s = now_s - oldest[2]
        return f"{self._what(oldest)} has not come back for {waited_s:.1f} s{others}"

    def _what(self, call: _Call) -> str:
        number, offset, _began_s = call
        file = self._files[number]
        return f"a look at {file}" if offset is None else f"a read of {file} at byte {offset}"
