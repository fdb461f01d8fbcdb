"""Injects a plan's faults of storage between the reader and the operating system's files."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.experts.storage import Storage
from headrace_replicas.injection.plan import (
    AnyStorageFault,
    ReadError,
    ShortRead,
    SlowRead,
    StalledRead,
    TruncatedFile,
)
from headrace_replicas.injection.strikes import FaultCount, draw_of, strike

log = logging.getLogger("ray.serve.headrace.injection")

# Strikes of a fault that are logged one by one. Some kinds may strike every read there is.
_TOLD: Final = {"slow_read": 1, "short_read": 1, "truncated_file": 1}
_TOLD_OF_OTHERS: Final = 20


@dataclass(slots=True)
class _Armed:
    """A fault, what it has done, and until when its link is taken (`slow_read`)."""

    number: int
    fault: AnyStorageFault
    count: FaultCount = field(default_factory=FaultCount)
    link_free_s: float = 0.0


class FaultyStorage:
    """A storage whose reads meet with the faults of a plan.

    Args:
        inner: Where the bytes really come from.
        faults: Those that are meant for this engine, by their number in the plan.
        seed: The plan's.
        clock: Time source.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        inner: Storage,
        faults: Sequence[tuple[int, AnyStorageFault]],
        *,
        seed: int,
        clock: Clock,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._inner = inner
        self._faults = [_Armed(number, fault) for number, fault in faults]
        self._seed = seed
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}

    def open(self, file: Path) -> int:
        """See `Storage.open`."""
        fd = self._inner.open(file)
        self._paths[fd] = file
        return fd

    def read(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """See `Storage.read`; the faults that strike apply in the plan's order."""
        path = self._paths[fd]
        for armed, number in self._struck(path, offset, sum(map(len, targets))):
            if number <= _TOLD.get(armed.fault.kind, _TOLD_OF_OTHERS):
                log.warning("injected %s into a read of %s at byte %d", armed.fault, path, offset)
            targets = self._suffer(armed, targets, offset)
        return self._inner.read(fd, targets, offset) if targets else 0

    def read_cached(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:  # noqa: ARG002  the seam's signature
        """Nothing: every byte comes by `read`, where the faults strike."""
        return 0

    def stat(self, fd: int) -> os.stat_result:
        """See `Storage.stat`."""
        return self._inner.stat(fd)

    def close(self, fd: int) -> None:
        """See `Storage.close`."""
        del self._paths[fd]
        self._inner.close(fd)

    def _struck(self, path: Path, offset: int, length: int) -> list[tuple[_Armed, int]]:
        """The faults that strike this read, and how many times each has struck by now."""
        found: list[tuple[_Armed, int]] = []
        with self._lock:
            for armed in self._faults:
                fault = armed.fault
                if not fault.strikes_part(path, offset, length):
                    continue
                if not fault.is_there:
                    continue
                draw = draw_of(self._seed, armed.number, armed.count.occasions + 1)
                armed.count, struck = strike(fault, armed.count, draw=draw)
                if struck:
                    found.append((armed, armed.count.strikes))
        return found

    def _suffer(
        self, armed: _Armed, targets: Sequence[memoryview], offset: int
    ) -> Sequence[memoryview]:
        """Let a fault act; what is left to read.

        Raises:
            OSError: The fault is one.
        """
        length = sum(map(len, targets))
        match armed.fault:
            case SlowRead(bytes_per_s=bytes_per_s):
                self._sleep(self._queue(armed, length / bytes_per_s))
            case StalledRead(stall_s=stall_s):
                self._sleep(stall_s)
            case ReadError(errno=name):
                number = getattr(errno, name)
                raise OSError(number, os.strerror(number))
            case ShortRead():
                return _shortened(targets, max(1, length // 2))
            case TruncatedFile(size_bytes=size_bytes):
                return _shortened(targets, max(0, min(length, size_bytes - offset)))
        return targets

    def _queue(self, armed: _Armed, seconds: float) -> float:
        """Take the link for some seconds after all who took it before; how long that will be."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            armed.link_free_s = max(now_s, armed.link_free_s) + seconds
            return armed.link_free_s - now_s


def _shortened(targets: Sequence[memoryview], length: int) -> Sequence[memoryview]:
    """The first bytes of what was asked for."""
    kept: list[memoryview] = []
    for target in targets:
        if length <= 0:
            break
        kept.append(target[:length])
        length -= len(target)
    return kept
