"""Computes SHA-256 over named parts of files, many files at a time, in bounded memory.

SHA-256, because the processors of Macs compute it in hardware and because Hugging Face's hub
publishes it for every weight file, so that one number can be compared with both.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Memory of one worker: what it reads at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named part of a file.

    Attributes:
        name: What it holds.
        start: First byte, counted from the start of the file.
        end: One past the last byte.
    """

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """What is to be read of one file.

    Attributes:
        path: The file.
        spans: One after the other, without holes, by position.
        whole: Whether the digest of all spans together is wanted too.
    """

    path: Path
    spans: tuple[Span, ...]
    whole: bool

    @property
    def size_bytes(self) -> int:
        """Bytes that will be read."""
        return self.spans[-1].end - self.spans[0].start if self.spans else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigests:
    """What was found in one file.

    Attributes:
        spans: Digest of each span, hex; those that could not be read are not there.
        whole: Digest of all spans together, hex; None if not wanted or not all could be read.
        problem: Why reading ended early, or None.
    """

    spans: Mapping[str, str]
    whole: str | None
    problem: str | None


class _ReadError(Exception):
    """A span could not be read to its end; the text says where and why."""


def digest_files(
    plans: Sequence[FilePlan], *, workers: int, on_bytes: Callable[[int], None]
) -> list[FileDigests]:
    """Read what the plans say, several of them at a time, and give one result for each.

    An unreadable sector is a result, not an error: the other files are read all the same.

    Args:
        plans: What to read; the longest are begun first.
        workers: Files read at a time, each with `CHUNK_BYTES` of memory.
        on_bytes: Called from the workers' threads with the number of bytes just read.
    """
    stop = threading.Event()
    order = sorted(range(len(plans)), key=lambda number: -plans[number].size_bytes)
    with ThreadPoolExecutor(workers, thread_name_prefix="headrace-digest") as threads:
        try:
            pending = {n: threads.submit(_digest, plans[n], stop, on_bytes) for n in order}
            return [pending[number].result() for number in range(len(plans))]
        finally:
            stop.set()  # somebody pressed Ctrl-C: nobody needs the rest


def _digest(plan: FilePlan, stop: threading.Event, on_bytes: Callable[[int], None]) -> FileDigests:
    whole = hashlib.sha256()
    digests: dict[str, str] = {}
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(plan.size_bytes, 1))))
    try:
        with FileIO(plan.path) as file:
            for span in plan.spans:
                part = hashlib.sha256()
                for piece in _pieces(file, span, buffer):
                    if stop.is_set():
                        return FileDigests(spans=digests, whole=None, problem="interrupted")
                    part.update(piece)
                    if plan.whole:
                        whole.update(piece)
                    on_bytes(len(piece))
                digests[span.name] = part.hexdigest()
    except OSError as error:
        return FileDigests(spans=digests, whole=None, problem=f"cannot be read: {error.strerror}")
    except _ReadError as error:
        return FileDigests(spans=digests, whole=None, problem=str(error))
    return FileDigests(spans=digests, whole=whole.hexdigest() if plan.whole else None, problem=None)


def _pieces(file: FileIO, span: Span, buffer: memoryview) -> Iterator[memoryview]:
    position = span.start
    file.seek(position)
    while position < span.end:
        try:
            count = file.readinto(buffer[: span.end - position])
        except OSError as error:
            raise _ReadError(f"cannot be read at byte {position}: {error.strerror}") from error
        if not count:
            raise _ReadError(f"ends at byte {position}, {span.end - position} bytes too early")
        yield buffer[:count]
        position += count
