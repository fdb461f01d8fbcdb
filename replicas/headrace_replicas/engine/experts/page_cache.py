"""Empties the system's cache of some files' pages, and looks into it: for measuring cold reads.

Linux drops clean pages by `posix_fadvise(DONTNEED)`. macOS has no such call; there
`msync(MS_INVALIDATE)` on a shared mapping drops the clean pages behind it, which is how fio does it
(commit 41880b9b, from Apple's engineers). Both leave pages alone that were written and have not
reached the disk, so the files are synced first. The macOS half has not run on a Mac.

`mincore` tells on both systems which pages are there. Linux answers it truly only for files that
the caller owns or may write, and says "all of them" of others.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.durable_files import sync
from headrace_replicas.engine.experts.file_range import FileRange

# <sys/mman.h>, on macOS and on Linux alike.
_MS_INVALIDATE: Final = 2
# So much is mapped at a time; a whole multiple of every page size.
_MAPPED_BYTES: Final = 2**30


class PageCache:
    """What the system keeps in memory of some files.

    Args:
        files: The files; they are opened now, and synced so that all their pages can be dropped.

    Raises:
        ExpertReadError: A file cannot be opened.
        OSError: A file's pages could not be written to the disk.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._fds: list[int] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            for file in files:
                self._fds.append(_open(file))
                sync(self._fds[-1])
        except BaseException:
            self.close()
            raise
        self._tells = all(_may_look(fd, file) for fd, file in zip(self._fds, files, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def how(self) -> str:
        """How pages are dropped here, for a person."""
        if sys.platform == "darwin":
            return "msync(MS_INVALIDATE), and read with F_NOCACHE"
        return "posix_fadvise(DONTNEED)"

    def drop(self) -> None:
        """Ask the system to forget the files' pages; whether it did is told by `resident_ratio`."""
        for fd in self._fds:
            if sys.platform == "darwin":
                self._invalidate(fd)
            else:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def resident_ratio(self, ranges: Iterable[FileRange]) -> float | None:
        """Share of the pages of these ranges that are in the cache; None where nobody tells."""
        if not self._tells:
            return None
        pages = resident = 0
        for one in ranges:
            vector = self._residency(one)
            if vector is None:
                return None
            pages += len(vector)
            resident += sum(byte & 1 for byte in vector)
        return resident / pages if pages else None

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _residency(self, place: FileRange) -> Sequence[int] | None:
        """One byte for each page of a range; its lowest bit says whether the page is there."""
        begin = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = place.offset + place.size_bytes - begin
        vector = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        try:
            with _mapping(self._fds[place.file], begin, length) as mapping:
                failed = self._libc.mincore(_address(mapping), ctypes.c_size_t(length), vector)
        except OSError:  # a file system whose files cannot be mapped
            return None
        return None if failed else bytes(vector)

    def _invalidate(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        for begin in range(0, size, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, size - begin)
            with _mapping(fd, begin, length) as mapping:
                # What cannot be invalidated stays, which `resident_ratio` tells.
                self._libc.msync(_address(mapping), ctypes.c_size_t(length), _MS_INVALIDATE)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ExpertReadError(f"{file} cannot be opened: {error.strerror}") from error


def _may_look(fd: int, file: Path) -> bool:
    """Whether mincore tells the truth about a file."""
    if sys.platform == "darwin":
        return True
    return os.fstat(fd).st_uid == os.geteuid() or os.access(file, os.W_OK)


def _mapping(fd: int, begin: int, length: int) -> mmap.mmap:
    return mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin)


def _address(mapping: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
