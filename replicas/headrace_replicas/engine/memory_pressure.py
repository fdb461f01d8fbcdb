"""Reads how this host fares with its memory, while an engine runs.

Linux: what is available (as `memory_host` counts it, so that pages of files count as left), how
much was swapped (/proc/vmstat) and how long processes have waited for memory (/proc/pressure, where
the kernel keeps it). Swapping and waiting are those of the whole host, also inside a container.
macOS: what is available, and the kernel's own level of pressure. That half was written from
documentation and has not run on a Mac.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace_replicas.engine.footprint import HostPressure, PressureLevel
from headrace_replicas.engine.memory_host import (
    MACOS_NAMES,
    kernel_text,
    linux_memory,
    macos_memory,
    sysctl_values,
)

# The numbers of the `DISPATCH_MEMORYPRESSURE_*` levels (sys/event.h, dispatch/source.h).
_LEVEL: Final = "kern.memorystatus_vm_pressure_level"
_WARN: Final = 2
_CRITICAL: Final = 4


def read_pressure() -> HostPressure:
    """How this host fares now.

    Raises:
        MemoryPlanError: The system does not tell.
    """
    if sys.platform == "darwin":
        return macos_pressure(sysctl_values(*MACOS_NAMES, _LEVEL))
    return linux_pressure(Path("/"), page_bytes=os.sysconf("SC_PAGESIZE"))


def linux_pressure(root: Path, *, page_bytes: int) -> HostPressure:
    """How a Linux host fares.

    Args:
        root: The file system's root, with `proc` and `sys` below it.
        page_bytes: Size of a page, in which the kernel counts what is swapped.

    Raises:
        MemoryPlanError: There is no /proc/meminfo, or it lacks what is needed.
    """
    memory = linux_memory(root)
    pages = re.findall(r"(?m)^pswp(?:in|out) (\d+)$", kernel_text(root / "proc/vmstat"))
    waited = re.search(r"(?m)^some .*total=(\d+)$", kernel_text(root / "proc/pressure/memory"))
    return HostPressure(
        available_bytes=memory.limit_bytes,
        source=memory.source,
        swapped_bytes=sum(map(int, pages)) * page_bytes,
        stalled_s=int(waited[1]) / 1e6 if waited else 0.0,
    )


def macos_pressure(values: Mapping[str, int]) -> HostPressure:
    """How a Mac fares.

    What the GPU may wire is no part of it: that bounds the engine's own memory, which was planned,
    and other programs do not take any of it.

    Args:
        values: As for `memory_host.macos_memory`, and `kern.memorystatus_vm_pressure_level`.
    """
    memory = macos_memory(values, on_gpu=False)
    return HostPressure(
        available_bytes=memory.limit_bytes, source=memory.source, level=_level(values[_LEVEL])
    )


def _level(number: int) -> PressureLevel:
    if number >= _CRITICAL:
        return "critical"
    return "warn" if number >= _WARN else "normal"
