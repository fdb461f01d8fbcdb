"""Arms the plan that the settings name, for one engine; without a plan there is nothing here."""

import logging
from dataclasses import dataclass

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.settings import InjectionSettings
from headrace_replicas.engine.experts.storage import Storage, SystemStorage
from headrace_replicas.injection.plan import read_plan
from headrace_replicas.injection.storage_faults import FaultyStorage

log = logging.getLogger("ray.serve.headrace.injection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Armament:
    """What an engine must suffer.

    Attributes:
        storage: Where experts are read from.
        summary: The faults, for people.
    """

    storage: Storage
    summary: str


def arm(
    settings: InjectionSettings, *, host: str, device: int, generation: int, clock: Clock
) -> Armament | None:
    """Arm what the plan means for this engine; None when that is nothing.

    Raises:
        SettingsError: The plan cannot be read or is none.
    """
    if settings.plan is None:
        return None
    plan = read_plan(settings.plan)
    faults = [
        (number, fault)
        for number, fault in enumerate(plan.faults)
        if fault.strikes_engine(host, device, generation)
    ]
    if not faults:
        log.warning("fault injection is armed by %s; no fault is for this engine", settings.plan)
        return None
    summary = "; ".join(str(fault) for _, fault in faults)
    log.warning("FAULT INJECTION IS ARMED by %s: %s", settings.plan, summary)
    storage = FaultyStorage(SystemStorage(), faults, seed=plan.seed, clock=clock)
    return Armament(storage=storage, summary=summary)
