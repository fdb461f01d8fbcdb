"""How much memory a host gives: Linux from folders like the kernel's, macOS from recordings."""

import ctypes
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.footprint import HostMemory
from headrace_replicas.engine.memory_host import (
    linux_memory,
    macos_memory,
    read_host,
    read_sysctl,
)

MIB = 2**20
GIB = 2**30

MEMINFO = """MemTotal:       24684084 kB
MemFree:        19107220 kB
MemAvailable:   19932804 kB
Buffers:           37980 kB
Cached:           985396 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""
AVAILABLE = 19_932_804 * 1024

# A container of Kubernetes under cgroup v2: 8 GiB allowed, 6 used, 3.5 of those pages of files.
V2_STAT = f"""anon {5 * GIB // 2}
file {4 * GIB}
kernel 41283584
shmem {GIB // 2}
inactive_anon 2684354560
active_anon 536870912
inactive_file {3 * GIB}
active_file {GIB // 2}
"""
# The same under v1, whose own numbers leave out what its children use.
V1_STAT = f"""cache 4096
inactive_file 4096
active_file 0
hierarchical_memory_limit {8 * GIB}
total_cache {4 * GIB}
total_inactive_file {3 * GIB}
total_active_file {GIB // 2}
"""
UNLIMITED_V1 = "9223372036854771712\n"

# As `sysctl hw.memsize kern.memorystatus_level iogpu.wired_limit_mb` prints them.
MAC_STUDIO_64 = """hw.memsize: 68719476736
kern.memorystatus_level: 93
iogpu.wired_limit_mb: 0
"""
MAC_BOOK_16_BUSY = """hw.memsize: 17179869184
kern.memorystatus_level: 41
iogpu.wired_limit_mb: 0
"""
MAC_STUDIO_64_RAISED = """hw.memsize: 68719476736
kern.memorystatus_level: 93
iogpu.wired_limit_mb: 57344
"""
MAC_OLD_SYSTEM = """hw.memsize: 68719476736
kern.memorystatus_level: 93
"""


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def linux(root: Path, files: Mapping[str, str]) -> HostMemory:
    return linux_memory(write(root, {"proc/meminfo": MEMINFO} | dict(files)))


def v2(folder: str, limit: str, usage: int, stat: str = V2_STAT) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.high": "max\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{usage}\n",
        f"sys/fs/cgroup/{folder}memory.stat": stat,
    }


def v1(folder: str, limit: str, usage: int, stat: str = V1_STAT) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": limit,
        f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{usage}\n",
        f"sys/fs/cgroup/memory/{folder}memory.stat": stat,
    }


def sysctl_values(printed: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(?m)^(\S+): (\d+)$", printed)}


def test_without_cgroups_what_the_kernel_calls_available_counts(tmp_path: Path) -> None:
    """Free memory and the pages of files that can be taken back, not free memory alone."""
    memory = linux(tmp_path, {})
    assert (memory.limit_bytes, memory.total_bytes) == (AVAILABLE, 24_684_084 * 1024)
    assert "MemAvailable" in memory.source


def test_a_v2_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    """Pages of files count as free: the kernel takes them back. Shared memory does not."""
    files = {"proc/self/cgroup": "0::/\n"} | v2("", str(8 * GIB), 6 * GIB)
    memory = linux(tmp_path, files)
    assert memory.limit_bytes == 8 * GIB - (6 * GIB - 3 * GIB - GIB // 2)
    assert "/sys/fs/cgroup" in memory.source
    assert "/sys/fs/cgroup" in memory.remedy


def test_a_v1_container_counts_its_children_too(tmp_path: Path) -> None:
    """Both the usage and the pages of files are those of the whole subtree."""
    files = {"proc/self/cgroup": "9:cpu:/\n4:cpuset,memory:/job\n"} | v1(
        "job/", f"{8 * GIB}\n", 6 * GIB
    )
    assert linux(tmp_path, files).limit_bytes == 8 * GIB - (6 * GIB - 3 * GIB - GIB // 2)


@pytest.mark.parametrize("path", ["/", "/process_api/9b7b"])
def test_an_unlimited_cgroup_does_not_count(tmp_path: Path, path: str) -> None:
    """v1 writes the largest number, v2 `max`; the root of v2 has no limit file at all."""
    listing = f"4:memory:{path}\n0::{path}\n"
    files = {"proc/self/cgroup": listing} | v1("", UNLIMITED_V1, 6 * GIB)
    files |= v1(f"{path.lstrip('/')}/", UNLIMITED_V1, 6 * GIB)
    files |= v2("unified/", "max", 6 * GIB)
    assert linux(tmp_path, files).limit_bytes == AVAILABLE


def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    """A service without a limit of its own shares that of its slice."""
    files = {"proc/self/cgroup": "0::/user.slice/headrace.service\n"}
    files |= v2("user.slice/headrace.service/", "max", GIB, "inactive_file 0\n")
    files |= v2("user.slice/", str(4 * GIB), 3 * GIB, "inactive_file 0\nactive_file 0\n")
    memory = linux(tmp_path, files)
    assert memory.limit_bytes == GIB
    assert memory.source.endswith("/sys/fs/cgroup/user.slice has left")


def test_a_throttling_limit_counts_as_one(tmp_path: Path) -> None:
    """Above memory.high the kernel slows the process down instead of ending it."""
    files = {"proc/self/cgroup": "0::/\n"} | v2("", str(8 * GIB), GIB, "")
    files["sys/fs/cgroup/memory.high"] = f"{5 * GIB}\n"
    assert linux(tmp_path, files).limit_bytes == 4 * GIB


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../outside"])
def test_a_path_that_this_container_cannot_see_falls_back_to_its_mount(
    tmp_path: Path, path: str
) -> None:
    """Without a cgroup namespace the listing names the host's path, and the mount is our own."""
    files = {"proc/self/cgroup": f"4:memory:{path}\n"} | v1("", f"{2 * GIB}\n", GIB, "")
    assert linux(tmp_path, files).limit_bytes == GIB


def test_a_cgroup_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    """Never less than nothing."""
    files = {"proc/self/cgroup": "0::/\n"} | v2("", str(GIB), 2 * GIB, "")
    assert linux(tmp_path, files).limit_bytes == 0


def test_the_host_counts_when_it_has_less_than_the_cgroup_allows(tmp_path: Path) -> None:
    """A limit is no promise."""
    files = {"proc/self/cgroup": "0::/\n"} | v2("", str(1024 * GIB), 0)
    assert linux(tmp_path, files).limit_bytes == AVAILABLE


def test_a_host_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    """No number is made up."""
    with pytest.raises(MemoryPlanError, match="meminfo cannot be read"):
        linux_memory(tmp_path)
    write(tmp_path, {"proc/meminfo": "MemTotal:       24684084 kB\n"})
    with pytest.raises(MemoryPlanError, match="lacks MemAvailable"):
        linux_memory(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_host_tells() -> None:
    """A number between nothing and all of the memory."""
    memory = read_host(on_gpu=False)
    assert 0 < memory.limit_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("printed", "limit_bytes", "says"),
    [
        (MAC_STUDIO_64, 48 * GIB, "unset: 3/4 of the memory"),
        (MAC_STUDIO_64_RAISED, 56 * GIB, "iogpu.wired_limit_mb)"),
        (MAC_OLD_SYSTEM, 48 * GIB, "unset: 3/4 of the memory"),
        (MAC_BOOK_16_BUSY, 16 * GIB * 41 // 100, "41 % of 16 GiB, kern.memorystatus_level"),
    ],
)
def test_a_mac_gives_what_the_gpu_may_wire_and_what_is_available(
    printed: str, limit_bytes: int, says: str
) -> None:
    """The smaller of both, and the words say which."""
    memory = macos_memory(sysctl_values(printed), on_gpu=True)
    assert memory.limit_bytes == limit_bytes
    assert says in memory.source
    assert memory.remedy


def test_a_small_mac_lets_the_gpu_wire_two_thirds() -> None:
    """21845 MiB of 32 GiB, as Metal recommends there."""
    values = {"hw.memsize": 32 * GIB, "kern.memorystatus_level": 90}
    assert macos_memory(values, on_gpu=True).limit_bytes // MIB == 21_845


def test_the_cpu_of_a_mac_is_not_bound_by_the_gpus_limit() -> None:
    """All that is available counts."""
    memory = macos_memory(sysctl_values(MAC_STUDIO_64), on_gpu=False)
    assert memory.limit_bytes == 64 * GIB * 93 // 100


def test_a_wired_limit_beyond_what_is_available_does_not_help() -> None:
    """Memory that other programs hold cannot be wired."""
    values = sysctl_values(MAC_STUDIO_64_RAISED) | {"kern.memorystatus_level": 50}
    assert macos_memory(values, on_gpu=True).limit_bytes == 32 * GIB


PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
    ctypes.c_size_t,
)


@pytest.mark.skipif(sys.byteorder != "little", reason="as on every Mac")
@pytest.mark.parametrize(("kind", "number"), [(ctypes.c_uint64, 2**36), (ctypes.c_int32, 93)])
def test_numbers_of_both_widths_are_read(
    kind: type[ctypes.c_uint64 | ctypes.c_int32], number: int
) -> None:
    """The kernel writes 8 bytes for sizes and 4 for levels, into the same place."""

    def sysctlbyname(
        name: bytes, place: int, length: "ctypes._Pointer[ctypes.c_size_t]", _new: int, _size: int
    ) -> int:
        if name != b"hw.memsize":
            return -1
        value = kind(number)
        length[0] = ctypes.sizeof(kind)
        ctypes.memmove(place, ctypes.byref(value), ctypes.sizeof(kind))
        return 0

    call = PROTOTYPE(sysctlbyname)
    assert read_sysctl("hw.memsize", call) == number
    assert read_sysctl("hw.unknown", call) is None
