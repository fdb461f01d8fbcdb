"""Which expert sits in which slot of one layer, and who leaves when another one comes.

Pure bookkeeping. Laws: two experts never share a slot; an expert that a call needs is never evicted
by that call as long as all fit; of the others the one with the least decayed count of uses leaves
first, and of equal ones the one that was used longest ago; also when slots become fewer.

The count is LRFU's (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used
and least frequently used policies", IEEE Transactions on Computers 50(12), 2001): a use counts 1
and halves with every `half_life_calls` calls; experts that left keep their count. With a half-life
of one call or less it is LRU, with an endless one LFU.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

# On the demo model's routing every half-life from 4 to 64 calls beats LRU by 2.6 to 3.5 points
# where a quarter of the experts has slots (tests/bench/eviction.py); this is the best of them.
HALF_LIFE_CALLS: Final = 16.0
# Counts are kept in units that grow instead of halving all of them at each call; this is where the
# unit starts anew, far from the largest float.
_UNIT_LIMIT: Final = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a call has to do before it can compute.

    Attributes:
        loads: (expert, slot) pairs whose bytes must be read.
        hits: Needed experts that were there.
    """

    loads: tuple[tuple[int, int], ...]
    hits: int


class SlotTable:
    """The slots of one layer.

    Args:
        slots: How many there are, at least 1.
        half_life_calls: Calls after which a use counts half.
    """

    def __init__(self, slots: int, half_life_calls: float = HALF_LIFE_CALLS) -> None:
        self.slots = slots
        # In the order of last use, oldest first.
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))
        self._uses: dict[int, float] = {}
        self._unit = 1.0
        self._growth = 2.0 ** (1.0 / half_life_calls)

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def place(self, needed: Iterable[int], earlier: Collection[int] = ()) -> Placement:
        """Give every needed expert a slot.

        Args:
            needed: Distinct experts, at most as many as there are slots.
            earlier: Where a call comes in groups, the group before this one. Its experts may still
                be computing: they leave only when no others can, and it is one call that counts.

        Raises:
            ValueError: More experts than slots.
        """
        missing: list[int] = []
        there: list[int] = []
        for expert in needed:
            (there if expert in self._slot_of else missing).append(expert)
        if len(there) + len(missing) > self.slots:
            raise ValueError(f"{len(there) + len(missing)} experts at once, {self.slots} slots")
        for expert in there:
            self._slot_of.move_to_end(expert)
        if not earlier:
            self._next_call()
        for expert in (*there, *missing):
            self._uses[expert] = self._uses.get(expert, 0.0) + self._unit
        self._make_room(len(missing), len(there), earlier)
        return Placement(loads=tuple(self._admit(expert) for expert in missing), hits=len(there))

    def refill(self, experts: Sequence[int]) -> Placement:
        """Forget all uses and start over with these experts; the last of them stay longest.

        Args:
            experts: Distinct, at most as many as there are slots.

        Raises:
            ValueError: More experts than slots.
        """
        self._uses = dict.fromkeys(self._slot_of, 0.0)
        placement = self.place(experts)
        for expert in experts:
            self.place([expert])
        return placement

    def _next_call(self) -> None:
        """All counts halve with time: the unit of new ones grows instead."""
        self._unit *= self._growth
        if self._unit > _UNIT_LIMIT:
            self._uses = {expert: uses / self._unit for expert, uses in self._uses.items()}
            self._unit = 1.0

    def _make_room(self, count: int, kept: int, earlier: Collection[int]) -> None:
        """Free as many slots as are needed; the youngest `kept` experts stay."""
        lacking = count - len(self._free)
        if lacking <= 0:
            return
        others = islice(self._slot_of, len(self._slot_of) - kept)
        # Both sorts are stable: of equal ones the oldest come first.
        order = sorted(others, key=self._uses.__getitem__)
        if earlier:
            order.sort(key=earlier.__contains__)
        for expert in order[:lacking]:
            self._free.append(self._slot_of.pop(expert))

    def _admit(self, expert: int) -> tuple[int, int]:
        slot = self._slot_of[expert] = self._free.pop()
        return expert, slot

    def resize(self, slots: int) -> dict[int, int]:
        """Change the number of slots; the least used leave when they become too few.

        Args:
            slots: How many there are from now on, at least 1.

        Returns:
            The slot that each expert which stays has had. They are in the slots 0, 1, ... now, in
            this order.
        """
        surplus = max(0, len(self._slot_of) - slots)
        for expert in sorted(self._slot_of, key=self._uses.__getitem__)[:surplus]:
            del self._slot_of[expert]
        had = dict(self._slot_of)
        for slot, expert in enumerate(had):
            self._slot_of[expert] = slot
        self._free = list(range(slots - 1, len(had) - 1, -1))
        self.slots = slots
        return had

    def drop(self, experts: Iterable[int]) -> None:
        """Forget experts whose bytes could not be read; their slots are free again."""
        for expert in experts:
            self._free.append(self._slot_of.pop(expert))

    def slots_of(self, experts: Sequence[int]) -> list[int]:
        """The slots of experts that are there."""
        return [self._slot_of[expert] for expert in experts]
