"""A small process of its own that kills an engine which hangs, even with Python's lock held.

It looks into the engine's flight record, which is memory shared with a file, so that the engine
need not answer. Stdlib only: it must be light, and nothing that can hang an engine may be in it.

Run as `python -m headrace_replicas.watchdog`; `watchdog_process.spawn_watchdog` does.
"""

import argparse
import errno
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from headrace_replicas.engine.durable_files import write_whole
from headrace_replicas.flight_layout import (
    BEAT,
    BEAT_AT,
    FILE_BYTES,
    FLAGS,
    FLAGS_AT,
    MARK,
    MARK_AT,
    PHASES,
)
from headrace_replicas.hang_watch import (
    AskForStacks,
    FlightReading,
    HangLimits,
    Kill,
    Leave,
    Wait,
    begin_watch,
    watch,
)
from headrace_replicas.last_words import (
    LastWords,
    Verdict,
    stacks_path,
    verdict_path,
    words_in,
)

STACKS_SIGNAL: Final = signal.SIGURG
"""Asks an engine for its stacks. Ray, MLX and uvloop do not use it, and a process that has not
registered for it ignores it."""

_LOOK_S: Final = 0.05


class Subject:
    """The process that is watched; another one that was given its id later is never touched.

    Linux (from 5.3) holds a descriptor of the process. Elsewhere the watchdog must be its child: an
    orphan has another parent.

    Args:
        pid: Of a process that lives.

    Raises:
        ProcessLookupError: It does not.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = _descriptor(pid)

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        if self._pidfd is None:
            return os.getppid() != self._pid
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            if sys.platform == "linux" and self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif not self.gone:
                os.kill(self._pid, number)


def _descriptor(pid: int) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch until the process is gone or was killed; 2 when there is nothing to watch."""
    given = _parsed(arguments)
    try:
        subject = Subject(given.pid)
        view = _view(given.file)
    except OSError as error:
        _say(f"nothing to watch: {error}")
        return 2
    words = words_in(view)
    if words is None or words.pid != given.pid:
        _say(f"{given.file} is not the record of process {given.pid}")
        return 2
    limits = HangLimits(
        floor_s=given.floor_s,
        first_s=given.first_s,
        reading_s=given.reading_s,
        grace_s=given.grace_s,
    )
    _watch_over(subject, view, words, given.file.parent, limits)
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace_replicas.watchdog", description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--pid", type=int, required=True)
    for limit in ("floor", "first", "reading", "grace"):
        parser.add_argument(f"--{limit}-s", type=float, required=True)
    return parser.parse_args(arguments)


def _view(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), FILE_BYTES, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(f"{path} is cut off") from error


def reading_in(view: mmap.mmap) -> FlightReading:
    """What a flight record says now."""
    phase, busy, _, ended = FLAGS.unpack_from(view, FLAGS_AT)
    return FlightReading(
        phase=PHASES[phase],
        busy=bool(busy),
        marks=MARK.unpack_from(view, MARK_AT)[0],
        beats=BEAT.unpack_from(view, BEAT_AT)[1],
        ended=bool(ended),
    )


def _watch_over(
    subject: Subject, view: mmap.mmap, words: LastWords, folder: Path, limits: HangLimits
) -> None:
    state = begin_watch(reading_in(view), time.monotonic())
    while not subject.gone:
        state, step = watch(state, reading_in(view), time.monotonic(), limits)
        match step:
            case Wait():
                pass
            case AskForStacks():
                _say(f"process {words.pid} makes no progress: asking for its stacks")
                subject.send(STACKS_SIGNAL)
            case Kill():
                _kill(subject, step, words, folder)
                return
            case Leave():
                return
        time.sleep(_LOOK_S)


def _kill(subject: Subject, step: Kill, words: LastWords, folder: Path) -> None:
    stacks = stacks_path(folder, words.generation)
    verdict = Verdict(
        pid=words.pid,
        started_s=words.started_s,
        phase=step.phase,
        silence_s=step.silence_s,
        allowed_s=step.allowed_s,
        stopped=step.stopped,
        stacks=str(stacks) if _size(stacks) else "",
        at_s=time.time(),
    )
    _say(f"process {words.pid}: {verdict}")
    try:
        write_whole(verdict_path(folder, words.generation), json.dumps(asdict(verdict)).encode())
    except OSError as error:
        _say(f"the verdict cannot be written: {error}")
    subject.send(signal.SIGKILL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _say(line: str) -> None:
    # The engine's stderr may be gone with the engine.
    with suppress(OSError):
        sys.stderr.write(f"headrace watchdog: {line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
