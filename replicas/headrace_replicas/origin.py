"""What the host gives an engine that starts on it, and what of it outlives the engine."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.contract.flight import FlightRecorder, NoRecorder
from headrace_replicas.faults import FaultWindow


class FaultWindows(Protocol):
    """The faults of a host's engines, which outlive each of them."""

    def read(self) -> FaultWindow:
        """The window as it stands."""
        ...

    def add(self, kind: FaultKind, at_s: float) -> FaultWindow:
        """The window with one more fault, which is on disk before this returns."""
        ...


class WindowInMemory:
    """A window that ends with its process; for tools and tests.

    Args:
        length_s: Seconds for which a fault counts.
    """

    def __init__(self, length_s: float) -> None:
        self._window = FaultWindow(length_s=length_s)

    def read(self) -> FaultWindow:
        """See `FaultWindows.read`."""
        return self._window

    def add(self, kind: FaultKind, at_s: float) -> FaultWindow:
        """See `FaultWindows.add`."""
        self._window = self._window.with_fault(kind, at_s)
        return self._window


def _nobody_hears(_done_bytes: int, _total_bytes: int) -> None:
    """For engines whose load nobody follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a replica was given by the host that it starts on.

    Attributes:
        recorder: Takes notes that survive the process.
        windows: The host's faults; None keeps them for this process alone.
        predecessor: How the process before it on its device ended; empty when in order.
        predecessor_generation: That one's; 0 without one.
        neighbours: Tells who else was seen to use the GPU, for a person; takes no time.
        end_process: Ends this process at once.
        load_goes_on: Hears how many bytes of the weights are in memory, and of how many; on the
            engine thread, which it must not hold up.
    """

    recorder: FlightRecorder = field(default_factory=NoRecorder)
    windows: FaultWindows | None = None
    predecessor: str = ""
    predecessor_generation: int = 0
    neighbours: Callable[[], str] = str
    end_process: Callable[[int], NoReturn] = os._exit
    load_goes_on: Callable[[int, int], object] = _nobody_hears
