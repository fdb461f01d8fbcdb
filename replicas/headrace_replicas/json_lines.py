"""Append-only files of JSON objects, one a line, that many processes write and none can break."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_replicas.engine.durable_files import sync, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """One such file.

    Attributes:
        path: Its folder need not be there.
        keep: So many of the newest lines stay when it grows beyond `limit_bytes`.
        limit_bytes: See `keep`.
    """

    path: Path
    keep: int = 200
    limit_bytes: int = 256 * 1024

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line, and return when it has reached the disk.

        Raises:
            OSError: It could not be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record).encode() + b"\n"
        with _locked(self.path, fcntl.LOCK_SH), self.path.open("a+b") as file:
            # A crash may have cut the last line; what follows must not become part of it.
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line
            file.write(line)
            file.flush()
            sync(file.fileno())
        if end > self.limit_bytes:
            self._shorten()

    def read(self) -> Iterator[dict[str, Any]]:
        """The objects, oldest first; lines that are none are passed over."""
        try:
            raw = self.path.read_bytes()
        except OSError:
            return
        for line in raw.splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record

    def _shorten(self) -> None:
        with _locked(self.path, fcntl.LOCK_EX) as alone:
            if alone:
                lines = self.path.read_bytes().splitlines(keepends=True)[-self.keep :]
                write_whole(self.path, b"".join(lines))


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[bool]:
    """Whether the lock could be had at once: nobody waits here for a process that was stopped."""
    descriptor = os.open(
        path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    )
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError:  # held by others, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
