"""Which boot of the host this is; the macOS half has not run on a Mac."""

import sys
from pathlib import Path

from headrace_replicas.mac_commands import output_of


def read_boot_id() -> str:
    """An id that every boot has anew; empty when the system does not tell."""
    if sys.platform == "darwin":
        return output_of("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid").decode().strip()
    return linux_boot_id(Path("/"))


def linux_boot_id(root: Path) -> str:
    """As `read_boot_id`, from the file system below `root`."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
