"""What a process left behind: read by its successor, by operators and by the watchdog.

Stdlib only. Nothing here trusts what it reads: a file may be cut, damaged or of another version,
and then there are no last words, which is an answer too.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.contract.flight import Phase
from headrace_replicas.flight_layout import (
    BEAT,
    BEAT_AT,
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
    View,
    read_slot,
)

NAME: Final = "last_words"
# What is read of a stack dump or of stderr; the last lines tell most.
_TAIL_BYTES: Final = 16 * 1024
_SHOWN_IDS: Final = 5
# Who dies later than this after a fault has survived it: something else was the end.
_FATAL_S: Final = 60.0
_SHOWN_TEXT: Final = 500
_KINDS: Final = {kind.value: kind for kind in FaultKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a watchdog killed a process.

    Attributes:
        pid: Of the process.
        started_s: Wall-clock second of its start.
        phase: What it was doing.
        silence_s: How long it made no progress.
        allowed_s: How long it might have gone without.
        stopped: Whether not even its heartbeat went on.
        stacks: File with its stacks; empty when it could not write them any more.
        at_s: Wall-clock second.
    """

    pid: int
    started_s: float
    phase: str
    silence_s: float
    allowed_s: float
    stopped: bool
    stacks: str
    at_s: float

    def __str__(self) -> str:
        what = "nothing of it moved, not even its heartbeat" if self.stopped else "no progress"
        where = (
            f"; its stacks are in {self.stacks}" if self.stacks else "; it could not dump stacks"
        )
        return (
            f"the watchdog killed it after {self.silence_s:.1f} s in {self.phase} ({what}; "
            f"{self.allowed_s:.1f} s were allowed){where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """The record of one engine process, complete or not.

    Attributes:
        pid: Of the process.
        generation: Of the engine on its device.
        started_s: Wall-clock second of its start.
        started_ns: The same on the monotonic clock.
        boot_id: Of the host's boot that it ran in.
        phase: What it did last.
        busy: Whether the device could hang in that phase.
        marks: Marks of progress.
        progress_ns: Monotonic clock at the newest of them, 0 before the first.
        beats: Heartbeats.
        beat_ns: Monotonic clock at the newest of them.
        worked: Whether the device had completed work for it.
        in_flight: Ids of requests that were running, the first few dozen.
        in_flight_count: How many there were.
        detail: Where in the phase it was.
        fault: The newest fault.
        ended: How it ended by its own account; None when it did not say.
        status: The exit status that it announced; None as above.
        verdict: Why a watchdog killed it; None when none did.
        crash: The first line that Python wrote when a fatal signal ended it; empty without one.
        stderr_tail: The last lines that it wrote to a file as its stderr; empty when it had none.
    """

    pid: int
    generation: int
    started_s: float
    started_ns: int
    boot_id: str
    phase: Phase
    busy: bool
    marks: int
    progress_ns: int
    beats: int
    beat_ns: int
    worked: bool
    in_flight: tuple[str, ...] = ()
    in_flight_count: int = 0
    detail: str = ""
    fault: FaultReport | None = None
    ended: str | None = None
    status: int | None = None
    verdict: Verdict | None = None
    crash: str = ""
    stderr_tail: str = ""

    @property
    def orderly(self) -> bool:
        """Whether it left in order: by its own account, with status 0."""
        return self.ended is not None and self.status == 0

    @property
    def lived_s(self) -> float:
        """From its start to its last sign of life."""
        return max(0, self.progress_ns - self.started_ns, self.beat_ns - self.started_ns) / 1e9

    @property
    def fatal_fault(self) -> FaultReport | None:
        """The newest fault, unless the process lived on well after it."""
        if self.fault is None or self.ended is not None:
            return self.fault
        lived_on_s = self.started_s + self.lived_s - self.fault.at_s
        return self.fault if lived_on_s < _FATAL_S else None

    @property
    def crash_text(self) -> str:
        """What C++ wrote on stderr when it ended the process; empty when it did not crash."""
        lines = self.stderr_tail.splitlines() if self.crash else []
        return "\n".join(line for line in lines if "terminat" in line or "what():" in line)

    def story(self) -> str:
        """How it ended, as one sentence for a person."""
        return f"Process {self.pid} (generation {self.generation}): {self._end()}; {self._then()}."

    def _end(self) -> str:
        if self.ended is not None:
            how = f"{self.ended} (exit status {self.status})"
            fault = None if self.status == 0 else self.fatal_fault
            told = fault is None or fault.raw_text in self.ended
            return how if told else f"{how} after {_shown_fault(fault)}"
        if self.verdict is not None:
            return str(self.verdict)
        where = f"{self.phase}, {self.detail}" if self.detail else self.phase
        if self.crash:
            said = "; ".join([self.crash, *self.crash_text.splitlines()[-2:]])
            return f"it crashed in {where} ({said[:_SHOWN_TEXT]})"
        if self.fatal_fault is not None:
            return f"it died in {where} after {_shown_fault(self.fatal_fault)}"
        return f"it died without a word while in {where}"

    def _then(self) -> str:
        gpu = "its GPU had worked" if self.worked else "its GPU had never completed any work"
        if not self.in_flight_count:
            return f"nothing was in flight; {gpu}"
        rest = self.in_flight_count - len(self.in_flight[:_SHOWN_IDS])
        more = f" and {rest} more" if rest > 0 else ""
        return f"in flight: {', '.join(self.in_flight[:_SHOWN_IDS])}{more}; {gpu}"


def _shown_fault(fault: FaultReport | None) -> str:
    return "" if fault is None else f"{fault.kind}: {fault.raw_text[:_SHOWN_TEXT]}"


def read_last_words(path: Path) -> LastWords | None:
    """What the process of a file has to say, also while it runs.

    Args:
        path: `last_words`, or one that was kept aside.

    Returns:
        None when there is no such file, or nothing in it that can be believed.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES)
    except OSError:
        return None
    words = words_in(raw)
    return None if words is None else _with_traces(words, path.parent, raw)


def words_in(view: View) -> LastWords | None:
    """The record in the bytes of a file, without what lies beside the file."""
    if len(view) < FILE_BYTES:
        return None
    magic, version, pid, generation, started_s, started_ns, boot_id = WHO.unpack_from(view, WHO_AT)
    phase, busy, worked, _ = FLAGS.unpack_from(view, FLAGS_AT)
    if magic != MAGIC or version != VERSION or phase >= len(PHASES):
        return None
    marks, progress_ns = MARK.unpack_from(view, MARK_AT)
    beats, beat_ns = BEAT.unpack_from(view, BEAT_AT)
    running, end = _object(view, IN_FLIGHT), _object(view, END)
    ids = running.get("ids")
    status = end.get("status")
    return LastWords(
        pid=pid,
        generation=generation,
        started_s=started_s,
        started_ns=started_ns,
        boot_id=boot_id.rstrip(b"\0").decode(errors="replace"),
        phase=PHASES[phase],
        busy=bool(busy),
        marks=marks,
        progress_ns=progress_ns,
        beats=beats,
        beat_ns=beat_ns,
        worked=bool(worked),
        in_flight=tuple(map(str, ids)) if isinstance(ids, list) else (),
        in_flight_count=_whole(running.get("count")),
        detail=(read_slot(view, DETAIL) or b"").decode(errors="replace"),
        fault=_fault_of(_object(view, FAULT)),
        ended=str(end["how"]) if "how" in end else None,
        status=status if isinstance(status, int) else None,
    )


def _object(view: View, slot: Slot) -> dict[str, object]:
    try:
        found = json.loads(read_slot(view, slot) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _fault_of(record: dict[str, object]) -> FaultReport | None:
    at_s = record.get("at_s")
    if not record or not isinstance(at_s, int | float):
        return None
    kind = str(record.get("kind"))
    return FaultReport(
        kind=_KINDS.get(kind, FaultKind.OTHER),
        raw_text=str(record.get("raw_text", "")),
        phase=str(record.get("phase", "")),
        in_flight=_whole(record.get("in_flight")),
        gpu_work_done_before=record.get("gpu_work_done_before") is True,
        at_s=float(at_s),
    )


def stacks_path(folder: Path, generation: int) -> Path:
    """Where an engine's stacks go, when it is asked for them or crashes."""
    return folder / f"stacks.{generation}"


def verdict_path(folder: Path, generation: int) -> Path:
    """Where a watchdog says why it killed an engine."""
    return folder / f"verdict.{generation}"


def _with_traces(words: LastWords, folder: Path, raw: bytes) -> LastWords:
    """The record with what lies beside it: verdict, crash, stderr."""
    origin = _object(raw, ORIGIN)
    return replace(
        words,
        verdict=_verdict(verdict_path(folder, words.generation), words),
        crash=_crash(stacks_path(folder, words.generation)),
        stderr_tail=_tail(Path(str(origin.get("stderr", ""))), _whole(origin.get("stderr_from"))),
    )


def _verdict(path: Path, words: LastWords) -> Verdict | None:
    try:
        record = json.loads(path.read_bytes())
        verdict = Verdict(**record)
    except (OSError, ValueError, TypeError):
        return None
    is_of_this_process = (verdict.pid, verdict.started_s) == (words.pid, words.started_s)
    return verdict if is_of_this_process else None


def _crash(stacks: Path) -> str:
    lines = _tail(stacks, 0).splitlines()
    return next((line for line in lines if line.startswith("Fatal Python error: ")), "")


def _tail(path: Path, start: int) -> str:
    """The end of a text file, nothing of it before `start`; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
