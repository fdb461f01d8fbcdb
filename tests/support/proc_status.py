"""What Linux says of a process's memory."""

import re
from pathlib import Path


def status_bytes(name: str, process: str = "self") -> int:
    """A size from a process's /proc/PID/status; 0 where it has no such line.

    Args:
        name: `RssAnon` (memory that is no file's), `VmData` (private writable mappings) and others.
        process: Its number, or `self`.

    Raises:
        OSError: There is no such process.
    """
    found = re.search(rf"(?m)^{name}:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) * 1024 if found else 0
