"""Other processes that use the host's GPU: the usual trigger of faults on Macs.

macOS keeps the time that each process spent on the GPU in its IO registry, readable by everybody;
two looks give a share. Linux has nothing of the kind for all vendors, and nobody serves from it.
Tested against recorded output; not run on a Mac.
"""

import os
import plistlib
import re
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from xml.parsers.expat import ExpatError

from headrace_replicas.contract.clock import Clock
from headrace_replicas.mac_commands import output_of

_CREATOR: Final = re.compile(r"pid (\d+), (.*)")
# The window server draws for all; only when it draws a lot is it news.
_SMALL_RATIO: Final = 0.02
_SMALL_DRAWING_RATIO: Final = 0.20
_WINDOW_SERVER: Final = "WindowServer"
_SHOWN: Final = 3
_DEEPEST: Final = 16
_SHORTEST_S: Final = 0.5
# A look starts a program; a fault is told with who used the GPU in the seconds before it.
_PERIOD_S: Final = 5.0


class Neighbours(Protocol):
    """Tells who else uses the GPU."""

    def look(self) -> str:
        """Who has used it since the look before, for a person; empty when nobody did.

        What asks the system takes tens of milliseconds; `neighbours_here` gives what takes none.
        """
        ...


class NoNeighbours:
    """For hosts that do not tell."""

    def look(self) -> str:
        """See `Neighbours.look`."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What processes have used of a GPU.

    Attributes:
        at_s: Monotonic clock.
        busy_ns: Time on the GPU of each (process id, name).
    """

    at_s: float
    busy_ns: Mapping[tuple[int, str], int]


class MacNeighbours:
    """The neighbours on a Mac.

    Args:
        clock: Time source.
        own_pids: Processes that are no neighbours.
    """

    def __init__(self, clock: Clock, own_pids: Collection[int]) -> None:
        self._clock = clock
        self._own_pids = own_pids
        self._before = self._read()

    def look(self) -> str:
        """See `Neighbours.look`."""
        now = self._read()
        if now.at_s - self._before.at_s < _SHORTEST_S:
            return ""
        before, self._before = self._before, now
        return told(before, now, own_pids=self._own_pids)

    def _read(self) -> GpuUse:
        raw = output_of("/usr/sbin/ioreg", "-a", "-r", "-c", "IOAccelerator", "-l", "-w0")
        return GpuUse(at_s=self._clock.monotonic_s(), busy_ns=busy_ns_in(raw))


class WatchedNeighbours:
    """Looks now and then in a thread of its own, and tells at any time what was seen last.

    Args:
        neighbours: What looks.
        period_s: How often.
    """

    def __init__(self, neighbours: Neighbours, period_s: float = _PERIOD_S) -> None:
        self._neighbours = neighbours
        self._period_s = period_s
        self._seen = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headrace-neighbours", daemon=True)
        self._thread.start()

    def look(self) -> str:
        """See `Neighbours.look`; takes no time."""
        return self._seen

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._period_s):
            self._seen = self._neighbours.look()


def neighbours_here(clock: Clock) -> Neighbours:
    """What tells of the neighbours of this process on this host, at any time."""
    if sys.platform != "darwin":
        return NoNeighbours()
    return WatchedNeighbours(MacNeighbours(clock, {os.getpid()}))


def busy_ns_in(raw: bytes) -> dict[tuple[int, str], int]:
    """Time on the GPU of each (process id, name), in nanoseconds.

    Args:
        raw: The property list of `ioreg -a -r -c IOAccelerator -l`; anything else has none.
    """
    try:
        registry = plistlib.loads(raw, fmt=plistlib.FMT_XML)
    except (ExpatError, ValueError, TypeError, AttributeError, LookupError):
        return {}
    busy_ns: dict[tuple[int, str], int] = {}
    for client in _clients(registry, _DEEPEST):
        creator = _CREATOR.fullmatch(str(client["IOUserClientCreator"]))
        if creator is not None:
            who = (int(creator[1]), creator[2])
            busy_ns[who] = busy_ns.get(who, 0) + _used_ns(client.get("AppUsage"))
    return busy_ns


def _clients(entry: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """All entries of user clients, at any depth."""
    if depth == 0:
        return
    entries = entry if isinstance(entry, list) else [entry]
    for one in entries:
        if not isinstance(one, dict):
            continue
        if "IOUserClientCreator" in one:
            yield one
        yield from _clients(one.get("IORegistryEntryChildren", []), depth - 1)


def _used_ns(usage: Any) -> int:
    if not isinstance(usage, list):
        return 0
    times = (one.get("accumulatedGPUTime") for one in usage if isinstance(one, dict))
    return sum(time for time in times if isinstance(time, int))


def told(before: GpuUse, now: GpuUse, *, own_pids: Collection[int]) -> str:
    """Who used the GPU between two looks, as sentences; most first, empty when nobody did."""
    seconds = now.at_s - before.at_s
    if seconds <= 0:
        return ""
    shares = {
        who: max(0, busy_ns - before.busy_ns.get(who, busy_ns)) / 1e9 / seconds
        for who, busy_ns in now.busy_ns.items()
        if who[0] not in own_pids
    }
    shown = sorted(
        (pair for pair in shares.items() if pair[1] >= _least(pair[0][1])),
        key=lambda pair: (-pair[1], pair[0]),
    )[:_SHOWN]
    said = [f"{name} (pid {pid}) used {share:.0%}" for (pid, name), share in shown]
    text = ", ".join(said).replace("%", " %")
    return f"{text} of the GPU in the last {seconds:.0f} s" if text else ""


def _least(name: str) -> float:
    return _SMALL_DRAWING_RATIO if name == _WINDOW_SERVER else _SMALL_RATIO
