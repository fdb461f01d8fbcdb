"""Which expert sits in which slot of one layer, and who leaves when another one comes.

Pure bookkeeping. Laws: two experts never share a slot; an expert that a call needs is never evicted
by that call; what was used longest ago leaves first (LRU), also when slots become fewer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def place(self, needed: Iterable[int]) -> Placement:
        """Give every needed expert a slot.

        Args:
            needed: Distinct experts, at most as many as there are slots.

        Raises:
            ValueError: More experts than slots.
        """
        missing: list[int] = []
        hits = 0
        for expert in needed:
            if expert in self._slot_of:
                self._slot_of.move_to_end(expert)
                hits += 1
            else:
                missing.append(expert)
        if hits + len(missing) > self.slots:
            raise ValueError(f"{hits + len(missing)} experts at once, {self.slots} slots")
        # The needed ones that were there are the youngest now, so the oldest are free to go.
        return Placement(loads=tuple(self._admit(expert) for expert in missing), hits=hits)

    def _admit(self, expert: int) -> tuple[int, int]:
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._slot_of[expert] = slot
        return expert, slot

    def resize(self, slots: int) -> dict[int, int]:
        """Change the number of slots; those used longest ago leave when they become too few.

        Args:
            slots: How many there are from now on, at least 1.

        Returns:
            The slot that each expert which stays has had. They are in the slots 0, 1, ... now, in
            this order.
        """
        while len(self._slot_of) > slots:
            self._slot_of.popitem(last=False)
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
