"""Starts the watchdog of this process."""

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.last_words import stacks_path
from headrace_replicas.watchdog import STACKS_SIGNAL

Watchdog = subprocess.Popen[bytes]
"""The process, as who started it holds it."""


def dump_stacks_to(folder: Path, generation: int) -> None:
    """Have all stacks written to `stacks.<generation>` when the watchdog asks or a crash happens.

    C code writes them, so that it works with Python's lock held.

    Args:
        folder: The device's folder.
        generation: Of this engine.

    Raises:
        OSError: The file cannot be made.
    """
    # Left open for life: faulthandler keeps the bare descriptor.
    descriptor = os.open(
        stacks_path(folder, generation),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o600,
    )
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
    faulthandler.enable(file=descriptor, all_threads=True)


def spawn_watchdog(file: Path, settings: FaultSettings) -> Watchdog:
    """Start a process that watches this one through its flight record.

    Args:
        file: The flight record.
        settings: The limits.

    Returns:
        The process; it ends after this one, or when the record says that this one ends.

    Raises:
        OSError: It cannot be started.
    """
    return subprocess.Popen(  # noqa: S603  our own module and our own values
        [
            sys.executable,
            "-P",  # whatever lies in this folder is no module
            "-m",
            "headrace_replicas.watchdog",
            f"--file={file}",
            f"--pid={os.getpid()}",
            f"--floor-s={settings.hang_floor_s}",
            f"--first-s={settings.hang_first_s}",
            f"--reading-s={settings.hang_reading_s}",
            f"--grace-s={settings.hang_grace_s}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # What is sent to the engine's group (a closed terminal, Ctrl-C) is not meant for it.
        start_new_session=True,
    )
