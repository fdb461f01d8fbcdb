"""Decides what a warm-up of the page cache reads next, and when.

Pure. Laws: no read begins while a request runs; in any stretch of time no more is read than the
rate allows and one burst; every planned byte is read once, in the planned order; no more is planned
than fits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.memory_plan import MemoryPlan

# Bytes that a read takes at most: a request that begins waits for one of them, which is less than
# a millisecond on an SSD.
CHUNK_BYTES: Final = 1024**2
# Reads that may follow one another at once when the thread woke up late.
_BURST_CHUNKS: Final = 4
# How soon a warm-up goes on after a request.
_BUSY_S: Final = 0.1
# The shortest wait: a system sleeps no less, and a rounded remainder is no reason to.
_TICK_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A token bucket: what may be read grows with time up to a burst, and shrinks by what is read.

    Attributes:
        bytes_per_s: How fast it grows.
        burst_bytes: Where it stops growing.
        level_bytes: What may be read at `at_s`.
        at_s: Monotonic seconds.
    """

    bytes_per_s: float
    burst_bytes: int
    level_bytes: float
    at_s: float

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """Seconds until so many bytes may be read; 0 when they may now."""
        return max(0.0, (size_bytes - self._level_at(now_s)) / self.bytes_per_s)

    def without(self, size_bytes: int, now_s: float) -> "Bucket":
        """The bucket once so many bytes are read."""
        return replace(self, level_bytes=self._level_at(now_s) - size_bytes, at_s=now_s)

    def _level_at(self, now_s: float) -> float:
        grown = self.level_bytes + (now_s - self.at_s) * self.bytes_per_s
        return min(grown, float(self.burst_bytes))


@dataclass(frozen=True, slots=True)
class Read:
    """Read this now."""

    range: FileRange


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to read."""


Action = Read | Wait | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where a warm-up stands.

    Attributes:
        ranges: What is read, in this order; none is empty.
        next_range: Index of the range at hand.
        inside_bytes: Bytes of it that are read.
        done_bytes: Bytes of all ranges that are read.
        bucket: Keeps the rate.
    """

    ranges: Sequence[FileRange]
    bucket: Bucket
    next_range: int = 0
    inside_bytes: int = 0
    done_bytes: int = 0


def course(ranges: Sequence[FileRange], bytes_per_s: float, now_s: float) -> Course:
    """A warm-up that is about to begin.

    Args:
        ranges: What to read, in this order.
        bytes_per_s: At most so fast; above 0.
        now_s: Monotonic seconds.
    """
    burst_bytes = _BURST_CHUNKS * CHUNK_BYTES
    return Course(
        ranges=ranges,
        bucket=Bucket(
            bytes_per_s=bytes_per_s, burst_bytes=burst_bytes, level_bytes=CHUNK_BYTES, at_s=now_s
        ),
    )


def step(now: Course, *, now_s: float, is_busy: bool) -> tuple[Course, Action]:
    """What to do now.

    Args:
        now: Where the warm-up stands.
        now_s: Monotonic seconds.
        is_busy: Whether a request runs, or experts are being read for one.

    Returns:
        Where it stands once the action has been carried out, and the action.
    """
    if now.next_range == len(now.ranges):
        return now, Finished()
    if is_busy:
        return now, Wait(_BUSY_S)
    whole = now.ranges[now.next_range]
    size = min(CHUNK_BYTES, whole.size_bytes - now.inside_bytes)
    wait_s = now.bucket.wait_s(size, now_s)
    if wait_s > 0:
        return now, Wait(max(wait_s, _TICK_S))
    read = FileRange(whole.file, whole.offset + now.inside_bytes, size)
    inside = now.inside_bytes + size
    is_read = inside == whole.size_bytes
    after = replace(
        now,
        next_range=now.next_range + is_read,
        inside_bytes=0 if is_read else inside,
        done_bytes=now.done_bytes + size,
        bucket=now.bucket.without(size, now_s),
    )
    return after, Read(read)


def within(experts: Iterable[Sequence[FileRange]], room_bytes: int) -> list[FileRange]:
    """The ranges of as many experts as fit, in the given order, joined where they touch.

    Args:
        experts: The ranges of each; the first expert that does not fit ends the list.
        room_bytes: For all of them.
    """
    taken: list[FileRange] = []
    for ranges in experts:
        room_bytes -= sum(one.size_bytes for one in ranges)
        if room_bytes < 0:
            break
        for one in ranges:
            last = taken[-1] if taken else None
            if last is not None and _end(last) == (one.file, one.offset):
                taken[-1] = replace(last, size_bytes=last.size_bytes + one.size_bytes)
            elif one.size_bytes:
                taken.append(one)
    return taken


def _end(one: FileRange) -> tuple[int, int]:
    return one.file, one.offset + one.size_bytes


def room_bytes(plan: MemoryPlan, available_bytes: int) -> int:
    """Memory that pages of files may take once the model is loaded.

    Args:
        plan: What the engine takes, and what it will still take (KV cache, headroom).
        available_bytes: What the host could give to a process now.
    """
    planned = plan.limit_bytes - plan.total_bytes
    now = available_bytes - plan.kv_bytes - plan.headroom_bytes
    return max(0, min(planned, now))
