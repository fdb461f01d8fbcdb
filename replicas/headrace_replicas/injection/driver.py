"""The injected driver's memory: how many timeouts of a host it has forgiven.

It lies outside of the process, in the host's state folder, because a restart does not reset it: in
public traces a box whose processes were restarted after each timeout was refused all the same.
"""

import fcntl
import json
import os
from pathlib import Path

from headrace_replicas.device_claim import host_folder


class Driver:
    """Counts the timeouts of one host.

    Args:
        state_dir: The host's state folder.
        host: The host's label.
        forgiven: Timeouts that it forgives; None forgives all.
    """

    def __init__(self, state_dir: Path, host: str, forgiven: int | None) -> None:
        self._path = host_folder(state_dir, host) / "injected_driver.json"
        self._forgiven = forgiven

    def timed_out(self) -> bool:
        """Count one more timeout; whether the process that had it is ignored from now on."""
        if self._forgiven is None:
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            count = 1 + (json.loads(text)["timeouts"] if text else 0)
            file.truncate(0)
            file.write(json.dumps({"timeouts": count}))
            file.flush()
            os.fsync(file.fileno())
        return count >= self._forgiven
