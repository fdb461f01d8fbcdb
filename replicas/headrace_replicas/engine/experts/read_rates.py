"""How fast this host's disk delivers experts: cold reads in the pattern that the engine makes.

An expert is read as the reader reads it: its ranges in the files, joined where they touch. How many
experts are read at once matters as much as the disk, because a schedule that finds one missing
expert at a time keeps one or two reads under way and waits for each. So several depths are
measured, and the fastest is what the disk gives.
"""

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob
from headrace_replicas.engine.experts.storage import SystemStorage

AT_ONCE: Final = (1, 4, 32)
"""Experts read by one call: one missing expert, those of a layer, those of a whole token."""

# Read for each depth: a second on a slow disk, still long enough to measure on a fast one.
_SAMPLE_BYTES: Final = 256 * 1024 * 1024
# Memory that one call fills; what a plan keeps free must hold it.
_BATCH_BYTES: Final = 128 * 1024 * 1024
# More pages than this in memory, and a read is not called cold.
_COLD_RATIO: Final = 0.02
# macOS only: what is read through such a descriptor is not kept in the page cache (fcntl(2)). What
# is there already is used all the same, so the pages are dropped too.
_NO_CACHE: Final = getattr(fcntl, "F_NOCACHE", None)

Expert = tuple[FileRange, ...]
"""Where the parts of one expert lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRate:
    """What one depth gave.

    Attributes:
        at_once: Experts read by one call.
        bytes_per_s: Bytes delivered a second.
        read_bytes: Bytes that were read.
        runs: Reads of the system that this took, after ranges that touch were joined.
        cached_ratio: Share of the pages that were in memory before; None where nobody tells.
    """

    at_once: int
    bytes_per_s: float
    read_bytes: int
    runs: int
    cached_ratio: float | None

    @property
    def run_bytes(self) -> float:
        """Mean length of a read of the system."""
        return self.read_bytes / self.runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """How fast experts come.

    Attributes:
        warm: From the page cache, at the fastest depth.
        cold: From the disk, for each depth; empty when that was not wanted.
        how: How the pages were dropped before.
    """

    warm: ReadRate
    cold: tuple[ReadRate, ...]
    how: str

    @property
    def ssd(self) -> ReadRate | None:
        """The fastest of the cold ones."""
        return max(self.cold, key=lambda rate: rate.bytes_per_s, default=None)

    @property
    def is_cold(self) -> bool:
        """Whether the cold ones are: False when pages are known to have stayed in memory."""
        return bool(self.cold) and (self.cached_ratio or 0.0) <= _COLD_RATIO

    @property
    def cached_ratio(self) -> float | None:
        """The largest share of pages that were in memory before a cold read; None where unknown."""
        known = [rate.cached_ratio for rate in self.cold]
        return max((ratio for ratio in known if ratio is not None), default=None)


def measure_reads(
    streamed: StreamedModel, *, workers: int, clock: Clock, pages: PageCache | None
) -> ReadRates:
    """Read experts of all layers at random, into memory of their own, through own descriptors.

    Args:
        streamed: Whose experts; its slots are left alone.
        workers: Reads under way at a time.
        clock: Time source.
        pages: Of the reader's files; None measures no cold reads.

    Raises:
        ExpertReadError: An expert could not be read.
    """
    experts = [
        tuple(stream.ranges(expert))
        for stream in streamed.streams
        for expert in range(stream.experts)
    ]
    files = streamed.reader.files
    cold: list[ReadRate] = []
    if pages is not None:
        uncached = _UncachedStorage()
        with closing(RangeReader(files, workers=workers, clock=clock, storage=uncached)) as reader:
            cold = [_cold_rate(reader, experts, at_once, pages) for at_once in AT_ONCE]
    with closing(RangeReader(files, workers=workers, clock=clock)) as reader:
        sample = _sample(experts, seed=0)
        _rate(reader, sample, AT_ONCE[-1])  # fills the page cache
        rates = [_rate(reader, sample, at_once) for at_once in AT_ONCE]
        warm = max(rates, key=lambda rate: rate.bytes_per_s)
    return ReadRates(warm=warm, cold=tuple(cold), how="" if pages is None else pages.how)


class _UncachedStorage(SystemStorage):
    """Files that leave nothing in the page cache, where the system lets one choose."""

    def open(self, file: Path) -> int:
        """See `Storage.open`."""
        fd = super().open(file)
        if _NO_CACHE is not None:
            fcntl.fcntl(fd, _NO_CACHE, 1)
        return fd


def _cold_rate(
    reader: RangeReader, experts: Sequence[Expert], at_once: int, pages: PageCache
) -> ReadRate:
    sample = _sample(experts, seed=at_once)
    pages.drop()
    cached_ratio = pages.resident_ratio(place for expert in sample for place in expert)
    return _rate(reader, sample, at_once, cached_ratio)


def _rate(
    reader: RangeReader, sample: Sequence[Expert], at_once: int, cached_ratio: float | None = None
) -> ReadRate:
    size = max(map(_size, sample))
    together = max(1, min(at_once, _BATCH_BYTES // size))
    buffer = memoryview(bytearray(together * size))
    before = reader.totals
    for begin in range(0, len(sample), together):
        reader.read(list(_jobs(sample[begin : begin + together], buffer)))
    after = reader.totals
    read_bytes = after.read_bytes - before.read_bytes
    return ReadRate(
        at_once=together,
        bytes_per_s=read_bytes / (after.busy_s - before.busy_s),
        read_bytes=read_bytes,
        runs=after.runs - before.runs,
        cached_ratio=cached_ratio,
    )


def _jobs(experts: Iterable[Expert], buffer: memoryview) -> Iterator[ReadJob]:
    filled = 0
    for place in (place for expert in experts for place in expert):
        target = buffer[filled : filled + place.size_bytes]
        filled += place.size_bytes
        yield ReadJob(place.file, place.offset, target)


def _sample(experts: Sequence[Expert], *, seed: int) -> list[Expert]:
    """Some experts in random order, each once."""
    order = np.random.default_rng(seed).permutation(len(experts))
    count = max(1, _SAMPLE_BYTES // max(map(_size, experts)))
    return [experts[number] for number in order[:count]]


def _size(expert: Expert) -> int:
    return sum(place.size_bytes for place in expert)
