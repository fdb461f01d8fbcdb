"""A host's memory as a start looks at it: did what the last engine held come back?

Linux: what is available to processes. macOS: the same, and what is wired, because a GPU driver that
keeps a dead process's memory keeps it wired. The macOS half is tested against recorded output and
has not run on a Mac.
"""

import re
import sys
from collections.abc import Callable

from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.memory_host import read_host
from headrace_replicas.mac_commands import output_of
from headrace_replicas.start_gate import MemoryReading

MemoryReader = Callable[[], MemoryReading]
"""How a start learns of the host's memory; a test or an injector hands in another one."""


def read_memory() -> MemoryReading:
    """The host's memory now.

    Raises:
        MemoryPlanError: The system does not tell.
    """
    available_bytes = read_host(on_gpu=False).limit_bytes
    if sys.platform != "darwin":
        return MemoryReading(available_bytes=available_bytes)
    wired_bytes = wired_bytes_in(output_of("/usr/bin/vm_stat").decode(errors="replace"))
    return MemoryReading(available_bytes=available_bytes, wired_bytes=wired_bytes)


def wired_bytes_in(text: str) -> int:
    """What is wired.

    Args:
        text: As `vm_stat` prints it, in pages whose size its first line names.

    Raises:
        MemoryPlanError: It does not say.
    """
    page = re.search(r"page size of (\d+) bytes", text)
    wired = re.search(r"(?m)^Pages wired down:\s+(\d+)\.?$", text)
    if page is None or wired is None:
        raise MemoryPlanError(
            "vm_stat does not tell how much memory is wired, so that nobody can see whether the "
            "last engine's came back. Does /usr/bin/vm_stat run?"
        )
    return int(page[1]) * int(wired[1])
