"""The files that experts are read from: how they are opened, read, and told from other files.

A file that is served may be replaced, rewritten, cut or taken away under the engine. Its identity
as it was opened is kept, and compared after reads: bytes of a file that has changed since are never
used. `Storage` is a seam, so that tests and the fault injector can stand between the reader and the
operating system.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

# What an error number says of a volume, and what helps.
_MEANINGS: Final = {
    errno.EIO: (
        "the disk or its connection fails",
        "Check the cable and the disk, and serve a copy on another one",
    ),
    errno.ENXIO: ("its volume was taken away", "Attach the volume again"),
    errno.ENODEV: ("its volume was taken away", "Attach the volume again"),
    errno.ENOTCONN: ("its volume's server is gone", "Bring the server back, or serve a local copy"),
    errno.ESTALE: (
        "the file is no longer on its network volume",
        "Put the checkpoint back, or serve a local copy",
    ),
    errno.ETIMEDOUT: (
        "its volume's server does not answer",
        "Bring the server back, or serve a local copy",
    ),
}
# The flag of preadv2(2) for reads that must not wait for the disk; 0 where there is none.
_NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_ANY_OTHER: Final = ("the read failed", "Check the volume that it is on")


class Storage(Protocol):
    """Where a reader gets its bytes from. Any thread may call it."""

    def open(self, file: Path) -> int:
        """A descriptor for reading.

        Raises:
            OSError: It cannot be opened.
        """
        ...

    def read(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """As `os.preadv`: fill the targets one after the other, and say how many bytes came.

        Raises:
            OSError: Nothing could be read.
        """
        ...

    def read_cached(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """As `read`, and at once: only bytes that are in memory already come.

        Returns:
            How many came; 0 when none are there, or the system does not say.
        """
        ...

    def stat(self, fd: int) -> os.stat_result:
        """As `os.fstat`: what the open file is now.

        Raises:
            OSError: The volume does not say.
        """
        ...

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        ...


class SystemStorage:
    """The operating system's files."""

    def open(self, file: Path) -> int:
        """See `Storage.open`."""
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            # Experts are chosen by the gate: read-ahead would fetch its neighbours for nothing.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def read(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """See `Storage.read`."""
        return os.preadv(fd, targets, offset)

    def read_cached(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """See `Storage.read_cached`; Linux says, macOS does not."""
        if not _NO_WAIT:
            return 0
        try:
            return os.preadv(fd, targets, offset, _NO_WAIT)
        except OSError:  # not there, or unknown to this file system; `read` meets what else it is
            return 0

    def stat(self, fd: int) -> os.stat_result:
        """See `Storage.stat`."""
        return os.fstat(fd)

    def close(self, fd: int) -> None:
        """See `Storage.close`."""
        os.close(fd)


def change(opened: os.stat_result, now: os.stat_result) -> str:
    """What has happened to a file since it was opened, as the end of a sentence; empty if nothing.

    A file that lost its name is unchanged: its bytes stay as long as it is open. A write through a
    memory map may reach the file's time late; any other changes it before a reader sees the bytes.
    """
    if (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
        return "is another file now"
    if now.st_size != opened.st_size:
        verb = "cut" if now.st_size < opened.st_size else "extended"
        return f"was {verb} from {opened.st_size} to {now.st_size} bytes"
    if now.st_mtime_ns != opened.st_mtime_ns:
        return "was written to"
    return ""


def lost_its_name(opened: os.stat_result, now: os.stat_result) -> bool:
    """Whether the file was deleted, or another one was renamed into its place."""
    return now.st_nlink < opened.st_nlink


def failed_read(file: Path, offset: int | None, error: OSError) -> str:
    """What to tell a person of a call that the system refused; without an offset it was no read."""
    meaning, remedy = _MEANINGS.get(error.errno or 0, _ANY_OTHER)
    where = "" if offset is None else f" at byte {offset}"
    return f"{file} cannot be read{where}: {error.strerror} ({meaning}). {remedy}."


def changed_file(file: Path, what: str) -> str:
    """What to tell a person of a file that changed under the engine; `what` is from `change`."""
    return (
        f"{file} {what} while it was served, so that its bytes are not used any more. Put a new "
        "version beside the old one and rename it into place; this engine must start again."
    )
