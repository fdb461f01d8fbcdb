"""Incidents on disk: one JSON object a line, the last line of an id is its newest state.

The log is bounded: a file that is full becomes `incidents.1.jsonl`, that one `incidents.2.jsonl`,
and the oldest goes. What is still open is carried over into the new file, so that the newest file
alone tells what is open, and no open incident is ever forgotten.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, Final

from headrace_replicas.contract.fleet import Cause, Incident
from headrace_replicas.device_claim import host_folder

# An incident takes a few hundred bytes to some kilobytes a state, so a file holds thousands.
FILE_BYTES: Final = 16 * 1024 * 1024
FILES_COUNT: Final = 4

_NAME: Final = "incidents"


class IncidentLog:
    """Appends incident states to `<state_dir>/hosts/<host>/incidents.jsonl`, each flushed to disk.

    Args:
        state_dir: The host's state folder.
        host: The label of the host that writes.
        file_bytes: A file is not made longer than this, unless one state alone is.
        files_count: So many files are kept, the newest included.
    """

    def __init__(
        self,
        state_dir: Path,
        host: str,
        *,
        file_bytes: int = FILE_BYTES,
        files_count: int = FILES_COUNT,
    ) -> None:
        self._folder = host_folder(state_dir, host)
        self._file_bytes = file_bytes
        self._files_count = files_count
        self._lock = threading.Lock()

    def exists(self) -> bool:
        """Whether anything was ever written."""
        return any(self._file(number).exists() for number in range(self._files_count))

    def write(self, incident: Incident) -> None:
        """Append one state and wait until the disk has it."""
        line = _line(incident)
        with self._lock:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._is_full(len(line)):
                self._rotate()
            elif self._lacks_its_newest():
                self._begin_file()
            _append(self._file(0), [line])

    def read(self) -> tuple[Incident, ...]:
        """The newest state of each incident, oldest incident first.

        A line that a crash cut off is passed over: its incident's earlier state stands.
        """
        with self._lock:
            return self._read(range(self._files_count))

    def left_open(self) -> tuple[Incident, ...]:
        """The incidents that are not closed, oldest first."""
        with self._lock:
            # A crash between two renames leaves no newest file; then the one before it has them.
            newest = 1 if self._lacks_its_newest() else 0
            return tuple(one for one in self._read([newest]) if one.closed_s is None)

    def _file(self, number: int) -> Path:
        name = f"{_NAME}.{number}.jsonl" if number else f"{_NAME}.jsonl"
        return self._folder / name

    def _read(self, numbers: Iterable[int]) -> tuple[Incident, ...]:
        newest: dict[str, Incident] = {}
        for number in sorted(numbers, reverse=True):
            for incident in _states_in(self._file(number)):
                newest[incident.id] = incident
        return tuple(sorted(newest.values(), key=lambda incident: incident.opened_s))

    def _is_full(self, more_bytes: int) -> bool:
        file = self._file(0)
        held = file.stat().st_size if file.exists() else 0
        return held > 0 and held + more_bytes > self._file_bytes

    def _lacks_its_newest(self) -> bool:
        return not self._file(0).exists() and self._file(1).exists()

    def _rotate(self) -> None:
        """Begin a new file with what is open, and let the oldest go."""
        for number in range(self._files_count - 1, 0, -1):
            older = self._file(number - 1)
            if older.exists():
                older.replace(self._file(number))
        self._begin_file()

    def _begin_file(self) -> None:
        """Make a newest file of what is open in the one before; it appears when it is whole."""
        fresh = self._folder / f"{_NAME}.next"
        fresh.unlink(missing_ok=True)
        still_open = [one for one in self._read([1]) if one.closed_s is None]
        _append(fresh, [_line(one) for one in still_open])
        fresh.replace(self._file(0))


def hosts_in(state_dir: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Those of these hosts whose incidents are on this machine."""
    return tuple(name for name in names if IncidentLog(state_dir, name).exists())


def _line(incident: Incident) -> bytes:
    return (json.dumps(asdict(incident), ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _append(file: Path, lines: Iterable[bytes]) -> None:
    with file.open("ab+") as log:
        if log.seek(0, os.SEEK_END) > 0:
            log.seek(-1, os.SEEK_END)
            if log.read(1) != b"\n":
                log.write(b"\n")  # a crash cut the last line off; the next must not hang on to it
        log.writelines(lines)
        log.flush()
        os.fsync(log.fileno())


def _states_in(file: Path) -> Iterator[Incident]:
    try:
        log = file.open("rb")
    except FileNotFoundError:
        return
    with log:
        for line in log:
            try:
                yield incident_of(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue


def incident_of(record: Mapping[str, Any]) -> Incident:
    """An incident from its JSON form.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: The record is not an incident.
    """
    fields = dict(record)
    if not isinstance(fields["id"], str) or not isfinite(fields["opened_s"]):
        raise ValueError(f"no incident has this id and time: {fields['id']}, {fields['opened_s']}")
    fields["cause"] = Cause(fields["cause"])
    fields["evidence"] = tuple(fields["evidence"])
    fields["timeline"] = tuple((float(at_s), str(what)) for at_s, what in fields["timeline"])
    return Incident(**fields)
