"""The processor time of an engine's own threads, which other programs do not lengthen.

On a machine that does other things too, wall-clock time is mostly theirs. What a token takes when
nobody disturbs is the work of the threads that take turns (Python's and MLX's) and the waits for
reads between them; so the two are added up, the work from here and the waits from the engine.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from unittest.mock import patch

from headrace_replicas.engine.experts.reader import RangeReader

_THREADS: Final = Path("/proc/self/task")
_READERS: Final = "headrace-reader"


class WorkClock:
    """Processor time of all threads that are there now, but for those that read experts.

    What a thread spends while it waits for reads (handing them out) does not count either: their
    wall-clock time is known. Elsewhere than on Linux the readers' time is part of it.
    """

    def __init__(self) -> None:
        readers = {
            thread.native_id for thread in threading.enumerate() if thread.name.startswith(_READERS)
        }
        numbers = os.listdir(_THREADS) if sys.platform == "linux" else []  # noqa: PTH208 - names
        self._files = [
            os.open(_THREADS / number / "schedstat", os.O_RDONLY)
            for number in numbers
            if int(number) not in readers
        ]
        self._in_reads_s = 0.0
        self._watch = patch.object(RangeReader, "read", self._watched(RangeReader.read))

    def seconds(self) -> float:
        """Only differences mean something."""
        if not self._files:
            return time.process_time() - self._in_reads_s
        # "nanoseconds run, nanoseconds waited for a processor, times run"
        spent_ns = sum(int(os.pread(file, 80, 0).split()[0]) for file in self._files)
        return spent_ns / 1e9 - self._in_reads_s

    def _watched(self, read: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return read(*arguments)
            finally:
                self._in_reads_s += time.thread_time() - began_s

        return call

    def __enter__(self) -> "WorkClock":
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.stop()
        for file in self._files:
            os.close(file)
