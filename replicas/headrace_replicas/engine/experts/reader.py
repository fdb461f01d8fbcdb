"""Reads byte ranges of checkpoint files into memory, many at a time and never lazily.

`preadv` into the destination itself is the fastest way found to bring a missing expert into MLX's
memory (3 to 14 times faster than building arrays and assigning slices), and it runs without
Python's lock. A memory map is 4 to 12 times slower, and a page that cannot be read kills the
process instead of raising.

Laws: when `read` returns, every byte came from a file that was at that moment the file that was
opened; when it raises, nothing is being read any more.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.experts.read_health import ReadHealth
from headrace_replicas.engine.experts.storage import (
    Storage,
    SystemStorage,
    change,
    changed_file,
    failed_read,
    lost_its_name,
)

log = logging.getLogger("ray.serve.headrace.experts")

# Ranges that touch are read by one call up to this length: enough to hide what a call costs, short
# enough that the last worker to finish does not keep the others waiting.
_RUN_LIMIT_BYTES: Final = 4 * 1024 * 1024
# Shorter runs than this cost more in calls than they gain by being read side by side.
_RUN_FLOOR_BYTES: Final = 256 * 1024
# POSIX calls it IOV_MAX; Linux and macOS both allow 1024 targets a call.
_TARGETS_LIMIT: Final = 1024
# One call asks for no more than this, so that arrivals are seen on a slow volume too: 12 readers
# that share 50 MB/s have something to show every quarter of a second.
_CALL_LIMIT_BYTES: Final = 1024 * 1024
# Batches up to this length are first copied out of the page cache by the caller itself, as far as
# they are there: handing nine ranges of an expert to threads took 251 us for 47 (0.08 MB) and 521
# for 168 (0.44 MB); with 2.76 MB there was no difference (tests/bench/limits.py).
_OWN_COPY_LIMIT_BYTES: Final = 2 * 1024 * 1024
# While reads are under way the caller looks this often whether something has arrived.
_LOOK_S: Final = 0.05
# Failed batches of reads of one file after which it is reported lost, if nobody says otherwise.
READ_FAILURES: Final = 3


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One contiguous range of a file and where it goes.

    Attributes:
        file: Index into the reader's files.
        offset: First byte in the file.
        target: Writable bytes; its length is the number of bytes to read.
    """

    file: int
    offset: int
    target: memoryview


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Ranges of a file that touch, read by one call.

    Attributes:
        file: Index into the reader's files.
        offset: First byte in the file.
        targets: Where the bytes go, one after the other; none is empty.
    """

    file: int
    offset: int
    targets: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTotals:
    """What a reader has done since it was opened.

    Attributes:
        jobs: Ranges read.
        runs: Ranges left after those that touch were joined.
        read_bytes: Bytes read.
        busy_s: Seconds during which somebody waited for reads.
    """

    jobs: int = 0
    runs: int = 0
    read_bytes: int = 0
    busy_s: float = 0.0


class _UnreadableError(Exception):
    """A batch of reads cannot be completed.

    Attributes:
        file: Index into the reader's files.
        text: For a person.
        changed: Whether the file is not the one that was opened any more.
    """

    def __init__(self, file: int, text: str, *, changed: bool = False) -> None:
        super().__init__(file, text, changed)
        self.file = file
        self.text = text
        self.changed = changed


@dataclass(slots=True)
class _OpenFile:
    fd: int
    opened: os.stat_result


class RangeReader:
    """Open files and the threads that read them.

    Args:
        files: The files, opened now and kept open.
        workers: Reads under way at a time; 8 to 16 keep an SSD busy.
        clock: Time source.
        storage: Where the bytes come from; None takes the operating system's files.
        on_arrival: Called now and then while bytes arrive, on the thread that called `read`.
        failures: Failed batches of one file within a quarter of an hour after which `health`
            reports it lost.

    Attributes:
        files: As given; jobs name them by their index.
        health: What the reads have met with; any thread may ask it.
        on_wait: Called with True when `read` begins to wait for storage and with False when it
            ends; for whoever watches.

    Raises:
        ExpertReadError: A file cannot be opened.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        workers: int,
        clock: Clock,
        storage: Storage | None = None,
        on_arrival: Callable[[], None] = lambda: None,
        failures: int = READ_FAILURES,
    ) -> None:
        self._storage: Storage = storage or SystemStorage()
        self.files = tuple(files)
        self._opened = [_open(self._storage, file) for file in files]
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="headrace-reader")
        self._clock = clock
        self._on_arrival = on_arrival
        self.on_wait: Callable[[bool], None] = lambda _waiting: None
        self._lock = threading.Lock()
        self.health = ReadHealth(files, failures=failures)
        self.totals = ReadTotals()
        self.active = False

    def read(self, jobs: Sequence[ReadJob]) -> None:
        """Carry out all jobs and return when every byte is there.

        Raises:
            ExpertReadError: A range could not be read whole, or its file is not the one that was
                opened any more; the other jobs have ended too.
        """
        if not jobs:
            return
        began_s = self._clock.monotonic_s()
        self.active = True
        self.on_wait(True)
        runs = self._runs(jobs)
        try:
            self._carry_out(runs)
            for file in sorted({run.file for run in runs}):
                self._confirm(file)
        except _UnreadableError as error:
            raise self._noted(error) from error
        finally:
            self.active = False
            self.on_wait(False)
            self._count(jobs, len(runs), self._clock.monotonic_s() - began_s)

    def _runs(self, jobs: Sequence[ReadJob]) -> list[ReadRun]:
        return join_adjacent(jobs, workers=self._workers)

    def _carry_out(self, runs: Sequence[ReadRun]) -> None:
        if sum(len(target) for run in runs for target in run.targets) <= _OWN_COPY_LIMIT_BYTES:
            runs = [left for run in runs if (left := self._copy_cached(run)).targets]
        if len(runs) == 1:
            self._one(runs[0], self._on_arrival)
            return
        calls = [self._threads.submit(self._one, run, lambda: None) for run in runs]
        pending, seen = set(calls), self.health.arrived_bytes
        while pending:
            pending = wait(pending, timeout=_LOOK_S).not_done
            arrived = self.health.arrived_bytes
            if arrived != seen:
                seen = arrived
                self._on_arrival()
        for call in calls:
            call.result()

    def _copy_cached(self, run: ReadRun) -> ReadRun:
        """Take what the page cache has of a run; what is left of it has to wait for the disk."""
        count = 0
        self.health.began(run.file, run.offset, self._clock.monotonic_s())
        try:
            count = self._storage.read_cached(self._opened[run.file].fd, run.targets, run.offset)
        finally:
            self.health.ended(count, self._clock.monotonic_s())
        return ReadRun(run.file, run.offset + count, _after(run.targets, count))

    def _one(self, run: ReadRun, on_arrival: Callable[[], None]) -> None:
        targets, offset = run.targets, run.offset
        while targets:
            count = self._call(run.file, _first(targets, _CALL_LIMIT_BYTES), offset)
            if count == 0:
                path, missing = self.files[run.file], sum(map(len, targets))
                raise _UnreadableError(
                    run.file,
                    f"{path} ends at byte {offset}, and {missing} more bytes were expected. "
                    "Download the checkpoint again.",
                )
            targets, offset = _after(targets, count), offset + count
            on_arrival()

    def _call(self, file: int, targets: tuple[memoryview, ...], offset: int) -> int:
        count = 0
        self.health.began(file, offset, self._clock.monotonic_s())
        try:
            count = self._storage.read(self._opened[file].fd, targets, offset)
        except OSError as error:
            text = failed_read(self.files[file], offset, error)
            raise _UnreadableError(file, text) from error
        finally:
            self.health.ended(count, self._clock.monotonic_s())
        return count

    def _confirm(self, file: int) -> None:
        """Make sure that a file is the one that was opened; some 2 microseconds.

        Raises:
            _UnreadableError: It is not, or nobody can tell.
        """
        held, path = self._opened[file], self.files[file]
        self.health.began(file, None, self._clock.monotonic_s())
        try:
            now = self._storage.stat(held.fd)
        except OSError as error:
            raise _UnreadableError(file, failed_read(path, None, error)) from error
        finally:
            self.health.ended(0, self._clock.monotonic_s())
        what = change(held.opened, now)
        if what:
            raise _UnreadableError(file, changed_file(path, what), changed=True)
        if lost_its_name(held.opened, now):
            held.opened = now
            log.warning(
                "%s was deleted or replaced while it was served. This engine goes on with the "
                "bytes that it has opened; the next start reads what is there then.",
                path,
            )

    def _noted(self, error: _UnreadableError) -> ExpertReadError:
        """The error that callers get, once it is in `health`.

        What happened to the file explains more than the read that it broke.
        """
        if not error.changed:
            try:
                self._confirm(error.file)
            except _UnreadableError as why:
                error = why if why.changed else error
        now_s = self._clock.monotonic_s()
        self.health.failed(error.file, error.text, changed=error.changed, now_s=now_s)
        return ExpertReadError(error.text)

    def _count(self, jobs: Sequence[ReadJob], runs: int, seconds: float) -> None:
        with self._lock:
            self.totals = ReadTotals(
                jobs=self.totals.jobs + len(jobs),
                runs=self.totals.runs + runs,
                read_bytes=self.totals.read_bytes + sum(len(job.target) for job in jobs),
                busy_s=self.totals.busy_s + seconds,
            )

    def close(self) -> None:
        """End the threads and close the files."""
        self._threads.shutdown()
        for file in self._opened:
            self._storage.close(file.fd)


def join_adjacent(jobs: Iterable[ReadJob], *, workers: int) -> list[ReadRun]:
    """One run for ranges of a file that touch, but no fewer runs than keep all workers busy.

    Laws: every byte that was asked for is in exactly one run, in the target that asked for it; no
    job is split.

    Args:
        jobs: In any order; they do not share targets.
        workers: Reads under way at a time.
    """
    order = sorted((job for job in jobs if job.target), key=lambda job: (job.file, job.offset))
    share = sum(len(job.target) for job in order) // workers
    limit = min(_RUN_LIMIT_BYTES, max(_RUN_FLOOR_BYTES, share))
    groups: list[list[ReadJob]] = []
    length = 0
    for job in order:
        length += len(job.target)
        if groups and length <= limit and _continues(groups[-1], job):
            groups[-1].append(job)
        else:
            groups.append([job])
            length = len(job.target)
    return [
        ReadRun(group[0].file, group[0].offset, tuple(job.target for job in group))
        for group in groups
    ]


def _continues(group: Sequence[ReadJob], job: ReadJob) -> bool:
    last = group[-1]
    end = (last.file, last.offset + len(last.target))
    return len(group) < _TARGETS_LIMIT and end == (job.file, job.offset)


def _first(targets: tuple[memoryview, ...], limit: int) -> tuple[memoryview, ...]:
    """As many of the bytes to fill as one call asks for, at least one."""
    length = 0
    for number, target in enumerate(targets):
        length += len(target)
        if length > limit:
            cut = target[: len(target) - (length - limit)]
            return (*targets[:number], cut) if cut else targets[:number]
    return targets


def _after(targets: tuple[memoryview, ...], count: int) -> tuple[memoryview, ...]:
    """What is left to fill once `count` bytes have arrived."""
    for number, target in enumerate(targets):
        if count < len(target):
            return (target[count:], *targets[number + 1 :])
        count -= len(target)
    return ()


def _open(storage: Storage, file: Path) -> _OpenFile:
    try:
        fd = storage.open(file)
        return _OpenFile(fd, storage.stat(fd))
    except OSError as error:
        raise ExpertReadError(f"{file} cannot be opened: {error.strerror}") from error
