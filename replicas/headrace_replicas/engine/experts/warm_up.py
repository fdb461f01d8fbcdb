"""Brings experts that have no slot into the operating system's page cache, while nobody asks.

A miss is then read at memory speed. What is read goes into a small buffer and is let go: the copy
that counts is the system's, which takes it back when a program wants the memory. Plain reads on
files of its own, because they can be paced, work on every system, and leave the files that
requests read from alone.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, assert_never

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.popularity import Popularity, ranked
from headrace_replicas.engine.experts.storage import SystemStorage
from headrace_replicas.engine.experts.warm_up_plan import (
    CHUNK_BYTES,
    Finished,
    Read,
    Wait,
    course,
    step,
)

log = logging.getLogger("ray.serve.headrace.experts")

Outcome = Literal["under way", "complete", "stopped", "failed"]

_GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpProgress:
    """How far a warm-up is.

    Attributes:
        done_bytes: Read so far.
        planned_bytes: To be read in all.
        outcome: Whether it goes on, and how it ended.
    """

    done_bytes: int = 0
    planned_bytes: int = 0
    outcome: Outcome = "under way"


class WarmUp:
    """One warm-up; a thread of its own runs it.

    Args:
        files: The files that experts lie in.
        ranges: What to read, in this order.
        bytes_per_s: At most so fast; above 0.
        is_busy: Whether a request runs now, or experts are read for one.
        clock: Time source.

    Attributes:
        progress: How far it is; replaced as a whole.
    """

    def __init__(
        self,
        files: Sequence[Path],
        ranges: Sequence[FileRange],
        *,
        bytes_per_s: float,
        is_busy: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._files = files
        self._ranges = ranges
        self._bytes_per_s = bytes_per_s
        self._is_busy = is_busy
        self._clock = clock
        self._storage = SystemStorage()
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self.progress = WarmUpProgress(planned_bytes=sum(one.size_bytes for one in ranges))

    def run(self, pause: Callable[[float], bool]) -> None:
        """Read until everything is read, somebody says stop, or a read fails.

        Args:
            pause: Waits so many seconds; True means stop. Called with 0 between two reads.
        """
        began_s = self._clock.monotonic_s()
        log.info(
            "warm-up: %.2f GB of experts into the page cache, at most %.2f GB/s",
            self.progress.planned_bytes / _GB,
            self._bytes_per_s / _GB,
        )
        with ExitStack() as opened:
            try:
                outcome = self._read_all(pause, opened)
            except OSError as error:
                outcome = "failed"
                log.warning("warm-up: given up: %s", error)
        self.progress = replace(self.progress, outcome=outcome)
        log.info(
            "warm-up: %s, %.2f of %.2f GB in %.1f s",
            outcome,
            self.progress.done_bytes / _GB,
            self.progress.planned_bytes / _GB,
            self._clock.monotonic_s() - began_s,
        )

    def _read_all(self, pause: Callable[[float], bool], opened: ExitStack) -> Outcome:
        """Carry out step by step.

        Raises:
            OSError: A file cannot be opened or read, or is shorter than it was; named.
        """
        descriptors: dict[int, int] = {}
        now = course(self._ranges, self._bytes_per_s, self._clock.monotonic_s())
        while True:
            now, action = step(now, now_s=self._clock.monotonic_s(), is_busy=self._is_busy())
            match action:
                case Read(one):
                    if one.file not in descriptors:
                        fd = self._storage.open(self._files[one.file])
                        opened.callback(self._storage.close, fd)
                        descriptors[one.file] = fd
                    self._read(descriptors[one.file], one)
                    self.progress = replace(self.progress, done_bytes=now.done_bytes)
                    seconds = 0.0
                case Wait(seconds):
                    pass
                case Finished():
                    return "complete"
                case _:
                    assert_never(action)
            if pause(seconds):
                return "stopped"

    def _read(self, descriptor: int, one: FileRange) -> None:
        done = 0
        while done < one.size_bytes:
            try:
                count = self._storage.read(
                    descriptor, [self._buffer[: one.size_bytes - done]], one.offset + done
                )
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._files[one.file])) from error
            if not count:
                raise OSError(f"{self._files[one.file]} ends at byte {one.offset + done}")
            done += count


def without_slots(streamed: StreamedModel, popularity: Popularity) -> list[list[FileRange]]:
    """The file ranges of each expert that has no slot now: the hottest first, then as they lie.

    Args:
        streamed: What streams the experts; nothing may be under way.
        popularity: What is known of them.
    """
    streams = {stream.path: stream for stream in streamed.streams}
    missing = {path: set(one.missing(list(range(one.experts)))) for path, one in streams.items()}
    hot: list[list[FileRange]] = []
    cold: list[list[FileRange]] = []
    for path, expert in ranked(popularity):
        if expert in missing.get(path, ()):
            is_known = popularity.layers[path][expert] > 0
            (hot if is_known else cold).append(streams[path].ranges(expert))
    return [*hot, *sorted(cold, key=lambda ranges: (ranges[0].file, ranges[0].offset))]
