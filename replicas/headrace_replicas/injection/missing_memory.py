"""Makes memory of an engine that ended look as if it had not come back."""

from collections.abc import Callable

from headrace_replicas.contract.settings import InjectionSettings
from headrace_replicas.injection.plan import StrandedMemory, read_plan


def missing_bytes(settings: InjectionSettings, host: str) -> Callable[[int, int], int]:
    """What seems to be missing on a device of a host, for the engine of a generation.

    Args:
        settings: The plan; without one nothing is missing.
        host: The host's label.

    Raises:
        SettingsError: The plan cannot be read or is none.
    """
    plan = None if settings.plan is None else read_plan(settings.plan)
    faults = [] if plan is None else [o for o in plan.faults if isinstance(o, StrandedMemory)]

    def missing(device: int, generation: int) -> int:
        meant = [
            fault.meant_for(host=host, device=device, generation=generation)
            for fault in faults
            if fault.strikes_engine(host, device, generation)
        ]
        return sum(fault.stranded_bytes for fault in meant if fault.is_there)

    return missing
