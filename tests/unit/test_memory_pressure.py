"""How a host fares with its memory: Linux from folders like the kernel's, macOS from recordings."""

import sys
from pathlib import Path

import pytest

from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.footprint import PressureLevel
from headrace_replicas.engine.memory_pressure import (
    linux_pressure,
    macos_pressure,
    read_pressure,
)

GIB = 2**30
PAGE = 16_384

VMSTAT = """nr_free_pages 4771805
pgpgin 1843281
pswpin 12
pswpout 30
pswpoutput_like 9999
"""
PRESSURE = """some avg10=1.53 avg60=0.87 avg300=0.20 total=2500000
full avg10=0.00 avg60=0.00 avg300=0.00 total=1400000
"""
# As `sysctl` prints them on a Mac.
MAC = {"hw.memsize": 64 * GIB, "kern.memorystatus_level": 40, "iogpu.wired_limit_mb": 0}
LEVEL = "kern.memorystatus_vm_pressure_level"


def linux(root: Path, **files: str) -> Path:
    """A root folder; `proc__vmstat` means proc/vmstat."""
    for name, text in files.items():
        place = root / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def meminfo(*, free_kib: int, cached_kib: int, available_kib: int) -> str:
    return (
        f"MemTotal:       24684084 kB\nMemFree:        {free_kib} kB\n"
        f"MemAvailable:   {available_kib} kB\nCached:         {cached_kib} kB\n"
    )


CALM = meminfo(free_kib=16_000_000, cached_kib=4_000_000, available_kib=20_000_000)


def test_linux_tells_what_is_available_swapped_and_waited_for(tmp_path: Path) -> None:
    """Pages in both directions, and the time in which some process waited."""
    root = linux(tmp_path, proc__meminfo=CALM, proc__vmstat=VMSTAT, proc__pressure__memory=PRESSURE)
    pressure = linux_pressure(root, page_bytes=PAGE)
    assert pressure.available_bytes == 20_000_000 * 1024
    assert pressure.swapped_bytes == 42 * PAGE
    assert pressure.stalled_s == 2.5
    assert pressure.level == "normal"
    assert "MemAvailable" in pressure.source


def test_a_kernel_that_keeps_neither_swap_nor_waiting_still_tells_what_is_available(
    tmp_path: Path,
) -> None:
    pressure = linux_pressure(linux(tmp_path, proc__meminfo=CALM), page_bytes=PAGE)
    assert (pressure.swapped_bytes, pressure.stalled_s) == (0, 0.0)


def test_pages_of_files_that_the_engine_has_read_are_no_shortage(tmp_path: Path) -> None:
    """Neither on the host nor against the limit of a cgroup."""
    before = linux_pressure(
        linux(
            tmp_path / "before",
            proc__meminfo=CALM,
            proc__self__cgroup="0::/\n",
            **v2(usage=4 * GIB, files=GIB),
        ),
        page_bytes=PAGE,
    )
    read = meminfo(free_kib=2_000_000, cached_kib=18_000_000, available_kib=20_000_000)
    after = linux_pressure(
        linux(
            tmp_path / "after",
            proc__meminfo=read,
            proc__self__cgroup="0::/\n",
            **v2(usage=8 * GIB, files=5 * GIB),
        ),
        page_bytes=PAGE,
    )
    assert before == after
    assert after.available_bytes == 5 * GIB


def v2(*, usage: int, files: int) -> dict[str, str]:
    """A cgroup with a limit of 8 GiB."""
    return {
        "sys__fs__cgroup__memory.max": f"{8 * GIB}\n",
        "sys__fs__cgroup__memory.current": f"{usage}\n",
        "sys__fs__cgroup__memory.stat": f"inactive_file {files}\nactive_file 0\n",
    }


def test_a_host_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    """No number is made up."""
    with pytest.raises(MemoryPlanError, match="meminfo cannot be read"):
        linux_pressure(tmp_path, page_bytes=PAGE)


@pytest.mark.parametrize(("number", "level"), [(1, "normal"), (2, "warn"), (4, "critical")])
def test_a_mac_tells_what_is_available_and_its_own_level(number: int, level: PressureLevel) -> None:
    """What the GPU may wire is no part of it: nobody else takes from that."""
    pressure = macos_pressure(MAC | {LEVEL: number})
    assert pressure.level == level
    assert pressure.available_bytes == 64 * GIB * 40 // 100
    assert "kern.memorystatus_level" in pressure.source


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_host_tells() -> None:
    first, second = read_pressure(), read_pressure()
    assert first.available_bytes > 0
    assert 0 <= first.swapped_bytes <= second.swapped_bytes
    assert 0 <= first.stalled_s <= second.stalled_s
