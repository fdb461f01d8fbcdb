"""Writes files that are whole after a crash or a power cut, or not there at all."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# macOS only: there fsync alone leaves the bytes in the drive's own cache (fcntl(2)).
_FULL_SYNC: Final = getattr(fcntl, "F_FULLFSYNC", None)
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


def sync(descriptor: int) -> None:
    """Return when everything written to an open file has reached the disk.

    Raises:
        OSError: It could not be written.
    """
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
        except OSError:
            pass  # a file system of another kind than Apple's; fsync is what it has
        else:
            return
    os.fsync(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Put a file into place at once: whoever looks sees the old content or all of the new.

    Raises:
        OSError: It could not be written; the old content is still there.
    """
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder have reached the disk.

    Raises:
        OSError: They could not be written.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder against other processes that ask; ends with the process at the latest.

    Yields:
        Whether it is held; False when somebody else holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        # A network file system without locks: nobody else can be seen, and nobody is refused.
    return True
