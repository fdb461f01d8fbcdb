"""What is kept of a whole host: its quarantine, and its faults, over all engines."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.device_claim import host_folder
from headrace_replicas.engine.durable_files import write_whole
from headrace_replicas.faults import FaultWindow
from headrace_replicas.json_lines import JsonLines

log = logging.getLogger("ray.serve.headrace.host_files")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuarantine:
    """Why no engine may start on a host.

    Attributes:
        reason: For a person, with what to do.
        since_s: Wall-clock second.
        until_s: Wall-clock second of its end; None for until a reboot or an operator ends it.
        boot_id: Of the boot that it belongs to; another boot ends it.
    """

    reason: str
    since_s: float
    until_s: float | None
    boot_id: str

    def holds(self, *, now_s: float, boot_id: str) -> bool:
        """Whether it still stands."""
        return boot_id == self.boot_id and (self.until_s is None or now_s < self.until_s)


class QuarantineFile:
    """`quarantine.json` of a host.

    Args:
        state_dir: The host's state folder.
        host: The host's label.
    """

    def __init__(self, state_dir: Path, host: str) -> None:
        self._path = host_folder(state_dir, host) / "quarantine.json"

    def read(self, *, now_s: float, boot_id: str) -> HostQuarantine | None:
        """The quarantine that stands; one that time or a reboot has ended is none."""
        found = self._read()
        if found is None or not found.holds(now_s=now_s, boot_id=boot_id):
            return None
        return found

    def impose(self, quarantine: HostQuarantine) -> None:
        """Write it down; one that was there before is replaced.

        Raises:
            OSError: It could not be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, json.dumps(asdict(quarantine)).encode())

    def lift(self) -> bool:
        """Remove it; whether there was one."""
        there = self._path.exists()
        self._path.unlink(missing_ok=True)
        return there

    def _read(self) -> HostQuarantine | None:
        try:
            record: Mapping[str, Any] = json.loads(self._path.read_bytes())
            until_s = record["until_s"]
            return HostQuarantine(
                reason=str(record["reason"]),
                since_s=float(record["since_s"]),
                until_s=None if until_s is None else float(until_s),
                boot_id=str(record["boot_id"]),
            )
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


class FaultWindowFile:
    """`faults.jsonl` of a host: which faults its engines had; all of them write it.

    Args:
        state_dir: The host's state folder.
        host: The host's label.
        length_s: Older faults do not count.
    """

    def __init__(self, state_dir: Path, host: str, *, length_s: float) -> None:
        self._lines = JsonLines(path=host_folder(state_dir, host) / "faults.jsonl")
        self._length_s = length_s
        self._unwritten: tuple[tuple[FaultKind, float], ...] = ()

    def add(self, kind: FaultKind, at_s: float) -> FaultWindow:
        """Note a fault; the window with it, when the disk has it.

        What the disk does not take counts in this process alone: an engine must come to its answer
        to a fault all the same.
        """
        try:
            self._lines.append({"kind": kind.value, "at_s": at_s})
        except OSError as error:
            log.error("a fault of this host is not on record: %s", error)  # noqa: TRY400
            self._unwritten = (*self._unwritten, (kind, at_s))
        return self.read()

    def read(self) -> FaultWindow:
        """All faults that are on record; the window itself counts those that are recent enough."""
        faults = sorted([*self._faults(), *self._unwritten], key=lambda pair: pair[1])
        return FaultWindow(faults=tuple(faults), length_s=self._length_s)

    def _faults(self) -> Iterator[tuple[FaultKind, float]]:
        for record in self._lines.read():
            try:
                yield FaultKind(record["kind"]), float(record["at_s"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
