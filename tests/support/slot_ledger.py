"""Keeps account of slots, bytes and computations, and says when one ran ahead of its bytes.

Laws that it checks, for each slot of each layer:
1. No evaluation is submitted whose graph uses a slot for which bytes are still to come: nothing on
   the device ever waits for a read.
2. No bytes are written to a slot before the computations that use it are done.

What it is told: bytes that a slot was promised and those that came, graphs that were built over
slots, which of them an evaluation took along, and that an evaluation was waited for.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Slot = tuple[int, int]
"""Layer and slot, both counted from 0."""


@dataclass(slots=True)
class LedgerTotals:
    """What has been checked; a check that nothing went through proves nothing.

    Attributes:
        promised_bytes: Bytes that slots were to get.
        came_bytes: Bytes that they got.
        graphs: Graphs built over slots.
        submitted: Those that an evaluation took along.
        evaluations: Evaluations.
        reads_beside: Reads that began while something was being computed.
    """

    promised_bytes: int = 0
    came_bytes: int = 0
    graphs: int = 0
    submitted: int = 0
    evaluations: int = 0
    reads_beside: int = 0


@dataclass(slots=True)
class SlotLedger:
    """The account; any thread may write to it.

    Attributes:
        violations: Sentences, one for each breach of a law.
        totals: What has been checked.
    """

    violations: list[str] = field(default_factory=list)
    totals: LedgerTotals = field(default_factory=LedgerTotals)
    _owed: dict[Slot, int] = field(default_factory=dict)
    _built: dict[int, frozenset[Slot]] = field(default_factory=dict)
    _running: dict[int, frozenset[Slot]] = field(default_factory=dict)
    _newest: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def promised(self, slot: Slot, count: int) -> None:
        """A slot was given to another expert: so many bytes are to come."""
        with self._lock:
            self._owed[slot] = self._owed.get(slot, 0) + count
            self.totals.promised_bytes += count

    def read_begins(self, slots: Iterable[Slot]) -> None:
        """Bytes are about to be written to these slots."""
        with self._lock:
            self.totals.reads_beside += bool(self._running)
            for slot in sorted(set(slots)):
                users = [*self._built.values(), *self._running.values()]
                if any(slot in used for used in users):
                    self.violations.append(f"slot {slot} is overwritten before its use is over")

    def read_ends(self, came: Iterable[tuple[Slot, int]]) -> None:
        """A read is over, and brought these bytes."""
        with self._lock:
            for slot, count in came:
                self.totals.came_bytes += count
                self._owed[slot] -= count
                if not self._owed[slot]:
                    del self._owed[slot]

    def built(self, slots: Iterable[Slot]) -> int:
        """A graph that uses these slots was built; its number."""
        with self._lock:
            self.totals.graphs += 1
            self._built[self.totals.graphs] = frozenset(slots)
            return self.totals.graphs

    @property
    def not_submitted(self) -> tuple[int, ...]:
        """Graphs that no evaluation has taken along."""
        with self._lock:
            return tuple(self._built)

    def evaluation_begins(self) -> Mapping[Slot, int]:
        """What is to come at this moment, for `evaluation_took`."""
        with self._lock:
            self.totals.evaluations += 1
            return dict(self._owed)

    def evaluation_took(self, graphs: Iterable[int], owed: Mapping[Slot, int]) -> int:
        """An evaluation was submitted with these graphs; `owed` is from its begin.

        Returns:
            The newest graph that any evaluation has taken along.
        """
        with self._lock:
            for number in graphs:
                used = self._built.pop(number)
                self._running[number] = used
                self.totals.submitted += 1
                self.violations += [
                    f"an evaluation uses slot {slot}, and {owed[slot]} bytes are to come"
                    for slot in sorted(used & owed.keys())
                ]
                self._newest = max(self._newest, number)
            return self._newest

    def evaluation_ends(self, newest: int) -> None:
        """An evaluation was waited for: graphs up to this one are done, in a stream's order."""
        with self._lock:
            for number in [one for one in self._running if one <= newest]:
                del self._running[number]
