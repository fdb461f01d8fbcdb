"""Arms the plan that the settings name, for one engine; without a plan there is nothing here."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.experts.storage import Storage, SystemStorage
from headrace_replicas.injection.device_faults import FaultyDevice
from headrace_replicas.injection.driver import Driver
from headrace_replicas.injection.plan import (
    DeviceFault,
    GpuNeighbour,
    SlowTeardown,
    StorageFault,
    read_plan,
)
from headrace_replicas.injection.storage_faults import FaultyStorage

log = logging.getLogger("ray.serve.headrace.injection")

_TEARDOWN_STEP_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Armament:
    """What an engine must suffer.

    Attributes:
        storage: Where experts are read from; None for the operating system's files.
        device: What stands before MLX; None when no fault is the device's.
        teardowns: What makes leaving in order take longer.
        summary: The faults, for people.
        guests: Processes that seem to use the GPU.
    """

    storage: Storage | None
    device: FaultyDevice | None
    teardowns: tuple[SlowTeardown, ...]
    summary: str
    guests: tuple[GpuNeighbour, ...] = ()

    def neighbours(self) -> str:
        """What a look at the GPU's users tells."""
        return "; ".join(one.says for one in self.guests if one.is_there)

    def tear_down(self, progressed: Callable[[], object]) -> None:
        """Take the time that leaving takes; it progresses all the while."""
        takes_s = sum(one.takes_s for one in self.teardowns if one.is_there)
        for _ in range(round(takes_s / _TEARDOWN_STEP_S)):
            time.sleep(_TEARDOWN_STEP_S)
            progressed()


def arm(
    settings: Settings, *, host: str, device: int, generation: int, clock: Clock
) -> Armament | None:
    """Arm what the plan means for this engine; None when that is nothing.

    Args:
        settings: The plan, and the state folder.
        host: The host's label.
        device: Index of the device on its host.
        generation: Which start of an engine on its device this is.
        clock: Time source.

    Raises:
        SettingsError: The plan cannot be read or is none.
    """
    path = settings.injection.plan
    if path is None:
        return None
    plan = read_plan(path)
    faults = [
        (number, fault.meant_for(host=host, device=device, generation=generation))
        for number, fault in enumerate(plan.faults)
        if fault.strikes_engine(host, device, generation)
    ]
    if not faults:
        log.warning("fault injection is armed by %s; no fault is for this engine", path)
        return None
    summary = "; ".join(str(fault) for _, fault in faults)
    log.warning("FAULT INJECTION IS ARMED by %s: %s", path, summary)
    of_storage = [(n, one) for n, one in faults if isinstance(one, StorageFault)]
    of_device = [(n, one) for n, one in faults if isinstance(one, DeviceFault)]
    driver = Driver(Path(settings.state_dir), host, plan.forgiven_timeouts)
    faulty = FaultyDevice(of_device, seed=plan.seed, driver=driver, sleep=time.sleep)
    return Armament(
        storage=FaultyStorage(SystemStorage(), of_storage, seed=plan.seed, clock=clock)
        if of_storage
        else None,
        device=faulty if of_device else None,
        teardowns=tuple(one for _, one in faults if isinstance(one, SlowTeardown)),
        summary=summary,
        guests=tuple(one for _, one in faults if isinstance(one, GpuNeighbour)),
    )
