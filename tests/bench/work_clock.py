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
from typing import Final

_THREADS: Final = Path("/proc/self/task")
_READERS: Final = "headrace-reader"


class WorkClock:
    """Processor time of all threads that are there now, but for those that read experts.

    Elsewhere than on Linux it is that of the whole process.
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

    def seconds(self) -> float:
        """Only differences mean something."""
        if not self._files:
            return time.process_time()
        # "nanoseconds run, nanoseconds waited for a processor, times run"
        return sum(int(os.pread(file, 80, 0).split()[0]) for file in self._files) / 1e9

    def __enter__(self) -> "WorkClock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files:
            os.close(file)
