"""One engine process per device: a lock for life, and the device's generation counter.

Ray starts a replacement as soon as the old replica is stopping, not when its process is gone.
The lock closes that gap: the kernel releases it when the old process has really ended.
"""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import HostBusyError

_POLL_S = 0.1
# The flight record has room for a number of 32 bits.
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """A device held by this process until it ends.

    Attributes:
        device: Index of the device on its host.
        generation: How often an engine was started on it, this start included.
        lock_fd: The descriptor that holds the lock; the kernel drops it with the process.
    """

    device: int
    generation: int
    lock_fd: int


def host_folder(state_dir: Path, host: str) -> Path:
    """Where a host keeps its state."""
    return state_dir / "hosts" / host


def device_folder(state_dir: Path, host: str, device: int) -> Path:
    """Where the lock and the last words of a device lie."""
    return host_folder(state_dir, host) / "devices" / str(device)


def claim_device(
    state_dir: Path, host: str, devices: int, wait_s: float, clock: Clock
) -> DeviceClaim:
    """Take the first free device, waiting for a process that is still ending.

    Args:
        state_dir: The host's state folder.
        host: The host's label.
        devices: Number of devices on the host.
        wait_s: Seconds to wait for one to become free.
        clock: Time source.

    Raises:
        HostBusyError: Every device stayed taken.
    """
    give_up_s = clock.monotonic_s() + wait_s
    while True:
        for device in range(devices):
            held = try_hold(state_dir, host, device)
            if held is not None:
                return held.claim()
        if clock.monotonic_s() >= give_up_s:
            raise HostBusyError(
                f"all {devices} devices of host {host} are held by other engine processes after "
                f"{wait_s:.0f} s; the process ids are in {state_dir}/hosts/{host}/devices/*/"
                "engine.lock"
            )
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """A device whose lock this process holds, before an engine is started on it.

    Attributes:
        device: Index of the device on its host.
        folder: Its folder.
        lock_fd: The descriptor that holds the lock.
    """

    device: int
    folder: Path
    lock_fd: int

    @property
    def next_generation(self) -> int:
        """Of the engine that would be started on it now."""
        return _count(self.folder / "generation") + 1

    def claim(self) -> DeviceClaim:
        """Count a start on it, and keep it for life."""
        generation = _count_up(self.folder / "generation")
        os.ftruncate(self.lock_fd, 0)
        os.pwrite(self.lock_fd, f"{os.getpid()}\n".encode(), 0)
        return DeviceClaim(device=self.device, generation=generation, lock_fd=self.lock_fd)

    def let_go(self) -> None:
        """Give it back: no engine is started on it now."""
        os.close(self.lock_fd)


def try_hold(state_dir: Path, host: str, device: int) -> HeldDevice | None:
    """Hold a device; None when another process does, or one that is still ending."""
    folder = device_folder(state_dir, host, device)
    folder.mkdir(parents=True, exist_ok=True)
    lock_fd = os.open(folder / "engine.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return HeldDevice(device=device, folder=folder, lock_fd=lock_fd)


def _count_up(path: Path) -> int:
    """Raise the counter in a file by one, so that a crash leaves the old or the new number."""
    generation = _count(path) + 1
    fresh = path.with_suffix(".new")
    fresh.write_text(f"{generation}\n")
    fresh.replace(path)
    return generation


def _count(path: Path) -> int:
    """The number in a file; 0 where there is none that a counter can have come to."""
    text = path.read_bytes().strip() if path.exists() else b""
    is_number = text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else 0
