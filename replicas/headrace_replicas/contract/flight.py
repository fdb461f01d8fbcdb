"""What an engine notes while it runs, so that others can tell how it ended.

Notes must survive the process and must be readable while it hangs with Python's lock held, so they
go to memory that is shared with a file. The engine only knows this interface.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from headrace_replicas.contract.faults import FaultReport

Phase = Literal["load", "idle", "prefill", "decode", "read", "teardown"]
"""What an engine is doing: `read` waits for storage, where nothing on the device can hang; `idle`
has nothing to do and need not progress."""


class FlightRecorder(Protocol):
    """Takes notes of one engine process; called from its engine thread, often and cheaply."""

    def enter(self, phase: Phase, *, in_flight: Sequence[str] = (), detail: str = "") -> None:
        """Note what begins now; that is progress too.

        Args:
            phase: What the engine does from now on.
            in_flight: Ids of the requests that run.
            detail: Where in it, for a person: a chunk, a layer.
        """
        ...

    def progressed(self, detail: str = "") -> None:
        """Note that the phase moves on; an empty detail keeps the last one."""
        ...

    def worked(self) -> None:
        """Note that the device has completed work for this process; once is enough."""
        ...

    def faulted(self, report: FaultReport) -> None:
        """Note a fault, in full, before anything is done about it."""
        ...

    def ended(self, how: str, status: int) -> None:
        """Note that the process ends itself now, and with which exit status."""
        ...


class NoRecorder:
    """For engines that nobody watches: tools, benches, tests."""

    def enter(self, phase: Phase, *, in_flight: Sequence[str] = (), detail: str = "") -> None:
        """See `FlightRecorder.enter`."""

    def progressed(self, detail: str = "") -> None:
        """See `FlightRecorder.progressed`."""

    def worked(self) -> None:
        """See `FlightRecorder.worked`."""

    def faulted(self, report: FaultReport) -> None:
        """See `FlightRecorder.faulted`."""

    def ended(self, how: str, status: int) -> None:
        """See `FlightRecorder.ended`."""
