"""What the controller keeps of a place without a ready engine, and of a replica's speed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_replicas.contract.fleet import HostReported, Incident

Place = tuple[str, int]
"""A host's label and the index of a device on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How far a load has come since it was first heard of.

    Attributes:
        generation: Of the engine that loads.
        first_bytes: Bytes that were there at the first report.
        first_s: When that came.
    """

    generation: int
    first_bytes: int
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What was last heard of a place where no engine is ready.

    Attributes:
        report: The newest.
        heard_s: When it came, on the controller's clock.
        load: The load that goes on there, if any.
        held: The incident of the hold on it, if any.
        slow: The incident of the slow load there, if any.
    """

    report: HostReported
    heard_s: float
    load: Load | None = None
    held: Incident | None = None
    slow: Incident | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A replica's rate of output tokens, as it is used to be.

    Attributes:
        usual: Tokens a second by size class of the batch; a larger batch makes more.
        learned_s: Busy seconds that each of these was learned from.
        slow_s: Busy seconds of the slow spell that goes on; 0 when none does.
        incident: The newest incident of slowness.
    """

    usual: Mapping[int, float] = field(default_factory=dict)
    learned_s: Mapping[int, float] = field(default_factory=dict)
    slow_s: float = 0.0
    incident: Incident | None = None


def is_open(incident: Incident | None) -> bool:
    """Whether there is an incident, and it is not over."""
    return incident is not None and incident.closed_s is None
