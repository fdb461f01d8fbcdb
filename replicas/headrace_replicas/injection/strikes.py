"""When an injected fault strikes; pure.

The n-th occasion of a fault gets the same answer in each run with the same seed, whatever thread
it comes on.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from headrace_replicas.injection.plan import Fault

_DRAWS: Final = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCount:
    """What a fault has seen and done so far.

    Attributes:
        occasions: Reads, or calls to the device, since it was there to strike.
        strikes: Those that it struck.
    """

    occasions: int = 0
    strikes: int = 0


def strike(fault: Fault, count: FaultCount, *, draw: float) -> tuple[FaultCount, bool]:
    """Whether a fault strikes its next occasion.

    Args:
        fault: The fault.
        count: Its count before.
        draw: 0 to 1, compared with the fault's ratio.

    Returns:
        Its count after, and the answer.
    """
    occasions = count.occasions + 1
    spent = fault.times is not None and count.strikes >= fault.times
    struck = occasions >= fault.first and not spent and draw < fault.ratio
    return FaultCount(occasions=occasions, strikes=count.strikes + struck), struck


def draw_of(seed: int, fault: int, occasion: int) -> float:
    """The draw for an occasion of a fault; 0 to 1, not 1 itself.

    Args:
        seed: Of the plan.
        fault: Number of the fault in the plan.
        occasion: Number of its occasion.
    """
    digest = blake2b(f"{seed}/{fault}/{occasion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / _DRAWS
