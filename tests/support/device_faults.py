"""Faults of the device for tests that run an engine in their own process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from headrace_replicas.contract.faults import FaultReport
from headrace_replicas.contract.flight import NoRecorder, Phase
from headrace_replicas.injection.device_faults import FaultyDevice
from headrace_replicas.injection.driver import Driver
from headrace_replicas.injection.plan import AnyDeviceFault


class ProcessEnded(BaseException):
    """Stands for the end of the process, where a test needs to go on."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def end_process(status: int) -> NoReturn:
    """End the thread that calls it, as `os._exit` ends the process."""
    raise ProcessEnded(status)


class Notes(NoRecorder):
    """A recorder that keeps what it is told.

    Attributes:
        phases: One after the other, repeats left out.
        reports: The faults.
        how: How the process said that it ends, and with which status; None while it did not.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.reports: list[FaultReport] = []
        self.how: tuple[str, int] | None = None

    def enter(self, phase: Phase, *, in_flight: object = (), detail: str = "") -> None:  # noqa: ARG002  the recorder's signature
        """See `FlightRecorder.enter`."""
        if self.phases[-1:] != [phase]:
            self.phases.append(phase)

    def faulted(self, report: FaultReport) -> None:
        """See `FlightRecorder.faulted`."""
        self.reports.append(report)

    def ended(self, how: str, status: int) -> None:
        """See `FlightRecorder.ended`."""
        self.how = (how, status)


@contextmanager
def faulty_device(
    state_dir: Path, *faults: AnyDeviceFault, forgiven_timeouts: int | None = None
) -> Iterator[FaultyDevice]:
    """MLX with these faults before it; nothing sleeps but what a test waits for."""
    device = FaultyDevice(
        list(enumerate(faults)),
        seed=0,
        driver=Driver(state_dir, "here", forgiven_timeouts),
        sleep=lambda _s: None,
        end_process=end_process,
    )
    device.stand_before()
    try:
        yield device
    finally:
        device.step_aside()
