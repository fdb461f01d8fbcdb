"""A memory cgroup for a test: a limit that the kernel enforces, page cache included.

The group is made below this process's own (version 1) or below the nearest ancestor that lets its
children limit memory (version 2, where a group with processes cannot do that itself). It limits
only what is started in it, has no swap, and is removed afterwards.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REMEDY: Final = (
    "Run it where this process may make one: as root on Linux (sudo make memory-limit), in a "
    "container that may (docker run --privileged --cgroupns=host), or without root under "
    "systemd with cgroup version 2 (systemd-run --user --scope make memory-limit)."
)


class NoMemoryCgroupError(Exception):
    """No memory cgroup can be made here; the message says why, and where one can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupVersion:
    """How one version of cgroups names what a test needs.

    Attributes:
        limit: Memory, pages of files included.
        swap: Memory and swap together in version 1, swap alone in version 2; missing where the
            kernel counts no swap.
        swap_includes_memory: Which of the two.
        peak: The most that was charged at a time, page cache included.
        anonymous: The line of memory.stat that counts memory that is no file's.
        events: Where the kernel counts processes that it killed.
    """

    limit: str
    swap: str
    swap_includes_memory: bool
    peak: str
    anonymous: str
    events: str


V1: Final = CgroupVersion(
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    swap_includes_memory=True,
    peak="memory.max_usage_in_bytes",
    anonymous="rss",
    events="memory.oom_control",
)
V2: Final = CgroupVersion(
    limit="memory.max",
    swap="memory.swap.max",
    swap_includes_memory=False,
    peak="memory.peak",
    anonymous="anon",
    events="memory.events",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCgroup:
    """A group that exists.

    Attributes:
        folder: Where the kernel shows it.
        version: How its files are called.
        limit_bytes: What it may be charged.
    """

    folder: Path
    version: CgroupVersion
    limit_bytes: int

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that runs another one inside the group, from its first byte on."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.folder / "cgroup.procs"), *command]

    def anonymous_bytes(self) -> int:
        """Memory now that is no file's: it cannot be taken back."""
        return _line(self.folder / "memory.stat", self.version.anonymous)

    def peak_bytes(self) -> int:
        """The most that was charged at a time, pages of files included."""
        return int((self.folder / self.version.peak).read_text())

    def killed(self) -> int:
        """Processes that the kernel ended because the group had no memory left."""
        return _line(self.folder / self.version.events, "oom_kill")


@contextmanager
def memory_cgroup(limit_bytes: int, *, root: Path = Path("/")) -> Iterator[MemoryCgroup]:
    """Make a group, and remove it when what ran in it has ended.

    Args:
        limit_bytes: What it may be charged, page cache included.
        root: The file system's root, with `proc` and `sys` below it.

    Raises:
        NoMemoryCgroupError: None can be made here.
    """
    parent, version = parent_for_limits(root)
    folder = parent / f"headrace-memory-limit-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoMemoryCgroupError(
            f"{parent} does not let this process make a memory cgroup ({error.strerror}). {REMEDY}"
        ) from error
    try:
        _limit(folder, version, limit_bytes)
        yield MemoryCgroup(folder=folder, version=version, limit_bytes=limit_bytes)
    finally:
        folder.rmdir()


def _limit(folder: Path, version: CgroupVersion, limit_bytes: int) -> None:
    swap = folder / version.swap
    try:
        (folder / version.limit).write_text(str(limit_bytes))
        if swap.exists():
            swap.write_text(str(limit_bytes if version.swap_includes_memory else 0))
    except OSError as error:
        raise NoMemoryCgroupError(
            f"{folder} takes no memory limit ({error.strerror}). {REMEDY}"
        ) from error


def parent_for_limits(root: Path) -> tuple[Path, CgroupVersion]:
    """Where a group with a memory limit of its own can be made.

    Args:
        root: The file system's root, with `proc` and `sys` below it.

    Raises:
        NoMemoryCgroupError: Nowhere.
    """
    listing = root / "proc/self/cgroup"
    if not listing.exists():
        raise NoMemoryCgroupError(f"{sys.platform} has no memory cgroups. {REMEDY}")
    mounts = root / "sys/fs/cgroup"
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = path.lstrip("/")
        if "memory" in controllers.split(","):
            return _existing(mounts / "memory", own), V1
        if controllers == "" and (mounts / "cgroup.controllers").exists():
            return _delegating(mounts, own), V2
    raise NoMemoryCgroupError(f"no cgroup here limits memory: {listing} names none. {REMEDY}")


def _existing(mount: Path, own: str) -> Path:
    """This process's group; inside a container that shows only its own, the mount itself."""
    for folder in (mount / own, mount):
        if (folder / "memory.limit_in_bytes").exists():
            return folder
    raise NoMemoryCgroupError(f"{mount} is not mounted here. {REMEDY}")


def _delegating(mount: Path, own: str) -> Path:
    folder = mount / own
    while True:
        shared = folder / "cgroup.subtree_control"
        if shared.exists() and "memory" in shared.read_text().split():
            return folder
        if folder == mount:
            break
        folder = folder.parent
    raise NoMemoryCgroupError(
        f"no cgroup above this process gives its children the memory controller "
        f"(cgroup.subtree_control below {mount}). {REMEDY}"
    )


def _line(path: Path, name: str) -> int:
    found = re.search(rf"(?m)^{name} (\d+)$", path.read_text())
    if found is None:
        raise ValueError(f"{path} has no line {name!r}")
    return int(found[1])
