"""Takes an engine's notes in memory that is shared with a file, so that they survive any death.

The kernel keeps what a killed process wrote into a shared mapping. Faults and endings are also
pushed to the disk, in case the host goes down next.
"""

import json
import mmap
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.faults import FaultReport
from headrace_replicas.contract.flight import Phase
from headrace_replicas.flight_layout import (
    BEAT,
    BEAT_AT,
    BUSY_PHASES,
    DETAIL,
    END,
    FAULT,
    FILE_BYTES,
    FLAGS,
    FLAGS_AT,
    IN_FLIGHT,
    MAGIC,
    MARK,
    MARK_AT,
    ORIGIN,
    PHASES,
    VERSION,
    WHO,
    WHO_AT,
    Slot,
    write_slot,
)
from headrace_replicas.last_words import (
    NAME,
    LastWords,
    read_last_words,
    stacks_path,
    verdict_path,
)

# Records of earlier processes that are kept.
_KEPT: Final = 8
_BEAT_S: Final = 0.5
_MOST_IDS: Final = 64
_ID_LENGTH: Final = 80
_PHASE_NUMBER: Final = {phase: number for number, phase in enumerate(PHASES)}
_mark = MARK.pack_into
_now_ns = time.monotonic_ns


class FlightFile:
    """A `FlightRecorder` over `last_words` in a device's folder.

    The record of the process before is kept aside as `last_words.<generation>`.

    Args:
        folder: The device's folder; this process holds the device.
        generation: Of this engine.
        boot_id: Of the host's boot.
        clock: Time source.

    Raises:
        OSError: The file cannot be made.

    Attributes:
        path: The file.
        started_s: Wall-clock second of the start.
        predecessor: What the process before left; None when there was none.
    """

    def __init__(self, folder: Path, *, generation: int, boot_id: str, clock: Clock) -> None:
        self.path = folder / NAME
        self.started_s = clock.now_s()
        self.predecessor: LastWords | None = read_last_words(self.path)
        self._generation = generation
        self._marks = 0
        self._in_flight: tuple[str, ...] = ()
        self._detail = ""
        self._phase: Phase = "idle"
        self._worked = False
        self._ending = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        _set_aside(self.path, self.predecessor, generation)
        self._view = self._fresh_view(boot_id)
        self._heart = threading.Thread(target=self._beat, name="headrace-heartbeat", daemon=True)
        self._heart.start()

    def _fresh_view(self, boot_id: str) -> mmap.mmap:
        first = bytearray(FILE_BYTES)
        WHO.pack_into(
            first,
            WHO_AT,
            MAGIC,
            VERSION,
            os.getpid(),
            self._generation,
            self.started_s,
            _now_ns(),
            boot_id.encode()[:64],
        )
        FLAGS.pack_into(first, FLAGS_AT, _PHASE_NUMBER[self._phase], 0, 0, 0)
        BEAT.pack_into(first, BEAT_AT, _now_ns(), 0)
        MARK.pack_into(first, MARK_AT, 0, _now_ns())
        write_slot(first, ORIGIN, json.dumps(_stderr_file()).encode())
        fresh = self.path.with_name(f"{NAME}.new")
        # All bytes are written now: a mapped page without room on the disk would kill the process.
        with fresh.open("w+b") as file:
            file.write(first)
            file.flush()
            os.fsync(file.fileno())
            view = mmap.mmap(file.fileno(), FILE_BYTES)
        fresh.replace(self.path)
        return view

    def enter(self, phase: Phase, *, in_flight: Sequence[str] = (), detail: str = "") -> None:
        """See `FlightRecorder.enter`."""
        running = tuple(in_flight)
        with self._lock:
            if running != self._in_flight:
                self._in_flight = running
                write_slot(self._view, IN_FLIGHT, _ids_text(running))
            self._note_detail(detail)
            if phase != self._phase:
                self._phase = phase
                self._note_flags()
        self.progressed()

    def progressed(self, detail: str = "") -> None:
        """See `FlightRecorder.progressed`."""
        if detail and detail != self._detail:
            with self._lock:
                self._note_detail(detail)
        self._marks += 1
        _mark(self._view, MARK_AT, self._marks, _now_ns())

    def worked(self) -> None:
        """See `FlightRecorder.worked`."""
        if self._worked:
            return
        with self._lock:
            self._worked = True
            self._note_flags()

    def faulted(self, report: FaultReport) -> None:
        """See `FlightRecorder.faulted`."""
        with self._lock:
            write_slot(self._view, FAULT, _fitting(asdict(report), "raw_text", FAULT))
            self._push()

    def ended(self, how: str, status: int) -> None:
        """See `FlightRecorder.ended`; the first account stands."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
            write_slot(self._view, END, _fitting({"how": how, "status": status}, "how", END))
            self._note_flags()
            self._push()

    def close(self) -> None:
        """Take no more notes: for processes that outlive their engine, as tests do."""
        self._closing.set()
        self._heart.join()
        self._view.close()

    def _note_detail(self, detail: str) -> None:
        if detail != self._detail:
            self._detail = detail
            write_slot(self._view, DETAIL, detail.encode())

    def _note_flags(self) -> None:
        FLAGS.pack_into(
            self._view,
            FLAGS_AT,
            _PHASE_NUMBER[self._phase],
            self._phase in BUSY_PHASES,
            self._worked,
            self._ending,
        )

    def _push(self) -> None:
        # A disk that fails must not keep an engine from what it does about its fault.
        with suppress(OSError):
            self._view.flush()

    def _beat(self) -> None:
        beats = 0
        while not self._closing.wait(_BEAT_S):
            beats += 1
            BEAT.pack_into(self._view, BEAT_AT, _now_ns(), beats)


def _ids_text(running: Sequence[str]) -> bytes:
    shown = [one[:_ID_LENGTH] for one in running[:_MOST_IDS]]
    return _fitting({"count": len(running), "ids": shown}, "ids", IN_FLIGHT)


def _fitting(record: dict[str, object], field: str, slot: Slot) -> bytes:
    """A record as JSON, its longest field cut until all of it fits."""
    text = json.dumps(record).encode()
    while len(text) > slot.room_bytes:
        value = record[field]
        kept = value[: len(value) // 2] if isinstance(value, str | list) else ""
        record = {**record, field: kept}
        text = json.dumps(record).encode()
    return text


def _stderr_file() -> dict[str, object]:
    """Where this process's stderr goes when that is a file of its own, and how long it is by now.

    An abort inside MLX writes its reason there, after all Python code has ended.
    """
    try:
        status = os.fstat(2)
        if not stat.S_ISREG(status.st_mode):
            return {}
        return {"stderr": _path_of(2), "stderr_from": status.st_size}
    except OSError:
        return {}


def _path_of(descriptor: int) -> str:
    """The name of an open file; the macOS half has not run on a Mac."""
    if sys.platform == "darwin":
        import fcntl  # noqa: PLC0415  F_GETPATH is macOS's own

        name = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
        return os.fsdecode(name.rstrip(b"\0"))
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _set_aside(path: Path, before: LastWords | None, generation: int) -> None:
    """Keep the newest records of earlier processes, and make room for a new one."""
    folder = path.parent
    if before is not None:
        path.replace(folder / f"{NAME}.{before.generation}")
    # A counter that began again must not find the traces of another process.
    for stale in (stacks_path(folder, generation), verdict_path(folder, generation)):
        stale.unlink(missing_ok=True)
    for old in _numbered(folder, NAME)[:-_KEPT]:
        for file in (f"{NAME}.{old}", f"stacks.{old}", f"verdict.{old}"):
            (folder / file).unlink(missing_ok=True)


def _numbered(folder: Path, name: str) -> list[int]:
    """The generations of the files of a name, rising."""
    suffixes = (file.name.removeprefix(f"{name}.") for file in folder.glob(f"{name}.*"))
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
