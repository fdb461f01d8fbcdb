"""Reads how much memory this host can give to an engine.

Linux: the smallest of what the kernel calls available and of what each memory cgroup above this
process has left. Pages of files count as left in both: the kernel takes them back when a process
asks for memory. macOS: the GPU's limit for wired memory, and what is available now. The macOS half
was written from documentation and recorded values and has not run on a Mac.
"""

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.footprint import HostMemory

_MIB: Final = 2**20
_GIB: Final = 2**30
# Without `iogpu.wired_limit_mb` Metal recommends two thirds of the memory on a Mac with 32 GB
# (21845 MB, printed by engines built on ggml) and three quarters from 36 GB on; with 128 GB newer
# systems were seen to give 84 %, which is not counted on.
_SMALL_MAC_BYTES: Final = 36 * _GIB

# What `macos_memory` is made of.
MACOS_NAMES: Final = ("hw.memsize", "kern.memorystatus_level", "iogpu.wired_limit_mb")

# What `sysctlbyname` of libc does: name, where to write, its length, and nothing to set.
Sysctl = Callable[[bytes, object, object, None, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CgroupFiles:
    """How one version of cgroups names what is needed."""

    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, ...]


_V2: Final = _CgroupFiles(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    file_pages=("inactive_file", "active_file"),
)
_V1: Final = _CgroupFiles(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    file_pages=("total_inactive_file", "total_active_file"),
)


def read_host(*, on_gpu: bool) -> HostMemory:
    """What this host can give now.

    Args:
        on_gpu: Whether the engine computes on the GPU; a Mac limits what that may wire.

    Raises:
        MemoryPlanError: The system does not tell.
    """
    if sys.platform == "darwin":
        return macos_memory(sysctl_values(*MACOS_NAMES), on_gpu=on_gpu)
    return linux_memory(Path("/"))


def linux_memory(root: Path) -> HostMemory:
    """What a Linux host can give.

    Args:
        root: The file system's root, with `proc` and `sys` below it.

    Raises:
        MemoryPlanError: There is no /proc/meminfo, or it lacks what is needed.
    """
    meminfo = _meminfo(root / "proc/meminfo")
    free = HostMemory(
        limit_bytes=meminfo["MemAvailable"],
        total_bytes=meminfo["MemTotal"],
        source="available memory (MemAvailable)",
        remedy="Or end other programs on this host.",
    )
    rooms = [
        HostMemory(
            limit_bytes=room_bytes,
            total_bytes=meminfo["MemTotal"],
            source=f"what memory cgroup {name} has left",
            remedy=f"Or raise the memory limit of cgroup {name}.",
        )
        for name, room_bytes in _cgroup_rooms(root)
    ]
    return min((free, *rooms), key=lambda memory: memory.limit_bytes)


def macos_memory(values: Mapping[str, int], *, on_gpu: bool) -> HostMemory:
    """What a Mac can give.

    Args:
        values: `hw.memsize` (bytes), `kern.memorystatus_level` (percent available) and
            `iogpu.wired_limit_mb` (0 for the system's own choice), as sysctl names them.
        on_gpu: Whether the engine computes on the GPU.
    """
    total_bytes = values["hw.memsize"]
    available = HostMemory(
        limit_bytes=total_bytes * values["kern.memorystatus_level"] // 100,
        total_bytes=total_bytes,
        source=f"available memory ({values['kern.memorystatus_level']} % of "
        f"{total_bytes // _GIB} GiB, kern.memorystatus_level)",
        remedy="Or quit other programs on this Mac.",
    )
    if not on_gpu:
        return available
    wired_mb = values.get("iogpu.wired_limit_mb", 0)
    parts = (2, 3) if total_bytes < _SMALL_MAC_BYTES else (3, 4)
    own_choice = total_bytes * parts[0] // parts[1]
    wired = HostMemory(
        limit_bytes=wired_mb * _MIB or own_choice,
        total_bytes=total_bytes,
        source="what the GPU may wire (iogpu.wired_limit_mb"
        f"{'' if wired_mb else f', unset: {parts[0]}/{parts[1]} of the memory'})",
        remedy="Or let the GPU wire more until the next boot: "
        "sudo sysctl iogpu.wired_limit_mb=<MiB>.",
    )
    return min(wired, available, key=lambda memory: memory.limit_bytes)


def read_sysctl(name: str, call: Sysctl) -> int | None:
    """One whole number of the kernel's state, or None when it has no such name.

    Args:
        name: As `sysctl` prints it.
        call: `sysctlbyname` of libc. No program is started: this runs in the engine's process.
    """
    # Numbers of 4 and of 8 bytes both fit, because Macs are little-endian.
    value, length = ctypes.c_uint64(0), ctypes.c_size_t(8)
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(length), None, 0)
    return None if failed else value.value


def sysctl_values(*names: str) -> dict[str, int]:
    """Numbers of a Mac's kernel.

    Args:
        names: As `sysctl` prints them; those that only newer systems have may be missing.

    Raises:
        MemoryPlanError: The system does not tell one that every system has.
    """
    call = ctypes.CDLL(None).sysctlbyname
    call.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    call.restype = ctypes.c_int
    values: dict[str, int] = {}
    for name in names:
        value = read_sysctl(name, call)
        if value is not None:
            values[name] = value
        elif name != "iogpu.wired_limit_mb":  # older systems do not have it
            raise MemoryPlanError(f"macOS does not tell {name}, so that no memory can be planned")
    return values


def _meminfo(path: Path) -> dict[str, int]:
    try:
        text = path.read_text("ascii")
    except OSError as error:
        raise MemoryPlanError(
            f"{path} cannot be read: {error.strerror}. Is /proc there?"
        ) from error
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"(?m)^(\w+): +(\d+) kB$", text)}
    missing = {"MemTotal", "MemAvailable"} - found.keys()
    if missing:
        raise MemoryPlanError(f"{path} lacks {', '.join(sorted(missing))}: no Linux that runs MLX")
    return found


def _cgroup_rooms(root: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes left) of each memory cgroup with a limit, from this process's upwards."""
    for mount, path, files in _cgroups_of_process(root):
        # Inside a container the path may be the host's, and the mount its own cgroup.
        folder = mount / path.lstrip("/")
        while True:
            room_bytes = _room_bytes(folder, files)
            if room_bytes is not None:
                yield f"/{folder.relative_to(root)}", room_bytes
            if folder == mount:
                break
            folder = folder.parent


def _cgroups_of_process(root: Path) -> Iterator[tuple[Path, str, _CgroupFiles]]:
    """(mount, path, file names) of the hierarchies that may limit this process's memory."""
    listing = root / "proc/self/cgroup"
    if not listing.exists():
        return
    mounts = root / "sys/fs/cgroup"
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ".." in path.split("/"):  # outside of this process's own view
            path = "/"
        if controllers == "":
            yield mounts, path, _V2
        elif "memory" in controllers.split(","):
            yield mounts / "memory", path, _V1


def _room_bytes(folder: Path, files: _CgroupFiles) -> int | None:
    limits = [number for name in files.limits if (number := _number(folder / name)) is not None]
    usage = _number(folder / files.usage)
    if not limits or usage is None:
        return None
    status = dict(re.findall(r"(?m)^(\w+) (\d+)$", kernel_text(folder / "memory.stat")))
    file_pages = sum(int(status.get(name, 0)) for name in files.file_pages)
    return max(min(limits) - max(usage - file_pages, 0), 0)


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no such file, or it says `max`."""
    text = kernel_text(path).strip()
    return int(text) if text.isdecimal() else None


def kernel_text(path: Path) -> str:
    """What the kernel says in a file; empty when it keeps no such file."""
    try:
        return path.read_text("ascii")
    except OSError:  # no such file in this version, or the cgroup is gone
        return ""
