"""How few experts could have been read, had the future been known.

Belady's MIN (IBM Systems Journal 5(2), 1966) for calls that need several experts at once: what is
needed last among those that this call does not need makes way. The slots may have held the best
experts at the start, so this is less than any policy can do, whatever was decoded before.

Pure. Laws: never more than any policy reads for the same uses; more slots never give more.
"""

from collections.abc import Collection, Sequence


def least_misses(uses: Sequence[Collection[int]], slots: int) -> int:
    """The fewest experts of one layer that must be read while these uses happen.

    Args:
        uses: The experts that each call needs, in order; distinct within a call.
        slots: Experts that fit at a time.

    Raises:
        ValueError: A call needs more experts than there are slots.
    """
    following = _next_uses(uses)
    next_use: dict[int, int] = {}
    misses = 0
    for number, needed in enumerate(uses):
        if len(needed) > slots:
            raise ValueError(f"{len(needed)} experts at once, {slots} slots")
        for expert in needed:
            if expert not in next_use and len(next_use) == slots:
                idle = (held for held in next_use if held not in needed)
                del next_use[max(idle, key=next_use.__getitem__)]
                misses += 1
            next_use[expert] = following[number][expert]
    return misses


def _next_uses(uses: Sequence[Collection[int]]) -> list[dict[int, int]]:
    """For each call and expert, the number of the next call that needs it; past the end if none."""
    upcoming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for number in range(len(uses) - 1, -1, -1):
        found.append({expert: upcoming.get(expert, len(uses)) for expert in uses[number]})
        upcoming.update(dict.fromkeys(uses[number], number))
    return found[::-1]
