"""Starts the watchdog of this process, and keeps it."""

import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.last_words import stacks_path
from headrace_replicas.watchdog import STACKS_SIGNAL

log = logging.getLogger("ray.serve.headrace.watchdog_process")

# A watchdog that cannot live is tried again this often, and no more.
_AGAIN_S: Final = 5.0


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


class Watchdog:
    """The watchdog of this process; one that is killed is followed by another.

    Args:
        file: The flight record.
        settings: The limits.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, file: Path, settings: FaultSettings) -> None:
        self._file = file
        self._settings = settings
        self._process = spawn_watchdog(file, settings)
        # Waits in the kernel for as long as the watchdog lives.
        self._keeper = threading.Thread(target=self._keep, name="headrace-watchdog", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the watchdog's process."""
        return self._process.pid

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended in order: nothing is left to watch."""
        self._keeper.join(timeout_s)
        return not self._keeper.is_alive()

    def _keep(self) -> None:
        while (status := self._process.wait()) != 0:
            log.error("the watchdog ended with %d; the engine is not watched for now", status)
            time.sleep(_AGAIN_S)
            try:
                self._process = spawn_watchdog(self._file, self._settings)
            except OSError as error:
                # The one that ended is waited for again, which returns at once.
                log.error("the watchdog cannot be started: %s", error)  # noqa: TRY400


def spawn_watchdog(file: Path, settings: FaultSettings) -> "subprocess.Popen[bytes]":
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
