"""Expert layers whose experts come from the SSD when the gate picks them.

By itself a layer works layer by layer: wait for the gate's choice, find the missing experts, read
them, and only then build the computation that needs them. No command buffer ever waits for a read;
what the device computes during a read are experts that were in their slots before it began. While
`speculation` runs a whole token through the model at once, a layer computes with what is there and
leaves its choice behind instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.pool import TensorPool
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob
from headrace_replicas.engine.experts.seam import ExpertLayer
from headrace_replicas.engine.experts.slots import Placement, SlotTable

Forward = Callable[[mx.array, mx.array], mx.array]


@dataclass(slots=True)
class StreamCounters:
    """What all layers of a model have done; only the engine thread writes.

    Attributes:
        hits: Needed experts that were in their slots.
        misses: Needed experts that had to be read.
        gate_wait_s: Seconds spent waiting for gates' choices.
        groups: Groups of experts that were computed apart: those that were there and those that
            had to be read, the latter in several groups where not all fit.
        speculated: Tokens (of a whole batch) that ran through the model at once.
        passes: Times that they did, until no expert was missing.
        wasted: Experts read for a pass that the accepted pass did not need.
    """

    hits: int = 0
    misses: int = 0
    gate_wait_s: float = 0.0
    groups: int = 0
    speculated: int = 0
    passes: int = 0
    wasted: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of needed experts that were there; 1 before any was needed."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0


class Unfinished:
    """The newest result that reads slots; it may be waiting to be computed.

    One for all layers of a model. Each call waits for the call before it, of whatever layer: so
    nothing that reads slots is waiting when they are overwritten, and no result stays in memory
    beyond the next call.
    """

    def __init__(self) -> None:
        self._result: mx.array | None = None

    def note(self, result: mx.array) -> mx.array:
        """Remember a result that reads slots, and hand it on."""
        self._result = result
        return result

    def wait(self, *others: mx.array) -> None:
        """Compute it, and the others with it: one wait, not two."""
        if self._result is not None:
            others += (self._result,)
            self._result = None
        mx.eval(others)


class Computing:
    """The groups of one call that are being computed, and the slots that they read."""

    def __init__(self) -> None:
        self.outputs: list[mx.array] = []
        self._reading: list[set[int]] = []

    def add(self, output: mx.array, slots: NDArray[np.uint32]) -> None:
        """Begin to compute a group."""
        mx.async_eval(output)  # type: ignore[no-untyped-call]  # MLX leaves it unannotated
        self.outputs.append(output)
        self._reading.append(set(slots.tolist()))

    def wait_for(self, slots: Iterable[int]) -> None:
        """Return when nothing that is being computed reads these slots any more."""
        wanted = set(slots)
        for output, reading in zip(self.outputs, self._reading, strict=True):
            if not wanted.isdisjoint(reading):
                mx.eval(output)


class ExpertStream:
    """The slots of one expert layer, and how a call fills them.

    Args:
        layer: The layer; its tensors are replaced by pools.
        pools: One for each of the layer's tensors.
        slots: Experts that fit.
        reader: Reads the shards.
        counters: Shared by all layers of the model.
        unfinished: Shared by all layers of the model.
        clock: Time source.
        on_progress: Called at each call of the layer and whenever bytes have arrived.
        note_uses: Called once for each call of the layer, with the distinct experts that it needs.

    Attributes:
        path: The layer, as mlx-lm names modules.
    """

    def __init__(
        self,
        *,
        layer: ExpertLayer,
        pools: Sequence[TensorPool],
        slots: int,
        reader: RangeReader,
        counters: StreamCounters,
        unfinished: Unfinished,
        clock: Clock,
        on_progress: Callable[[], None],
        note_uses: Callable[[list[int]], None],
    ) -> None:
        self.path = layer.path
        self._table = SlotTable(slots)
        self._slot_of = np.zeros(layer.experts, dtype=np.uint32)
        self._pools = tuple(pools)
        self._reader = reader
        self._counters = counters
        self._clock = clock
        self._on_progress = on_progress
        self._unfinished = unfinished
        self.note_uses = note_uses
        self._slots_on_device: mx.array | None = None
        self.chosen: mx.array | None = None
        self.speculating = False
        self.overlap = False

    @property
    def expert_bytes(self) -> int:
        """Bytes that bringing one expert reads."""
        return sum(pool.read_bytes for pool in self._pools)

    @property
    def experts(self) -> int:
        """How many experts the layer has."""
        return len(self._slot_of)

    def ranges(self, expert: int) -> list[FileRange]:
        """Where an expert's bytes lie; the files are counted as the reader counts them."""
        return [FileRange(*pool.place(expert), pool.read_bytes) for pool in self._pools]

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return sum(pool.slot_bytes for pool in self._pools)

    def resize(self, slots: int) -> None:
        """Change how many experts fit; the most used ones stay.

        To be called between two steps. One tensor is moved at a time, so that never more than one
        of the new pools exists beside its old one.

        Args:
            slots: At least as many as one token needs.
        """
        # The last step may have left a result that nobody asked for: it would keep the old pools.
        self._unfinished.wait()
        had = self._table.resize(slots)
        for pool in self._pools:
            pool.resize(slots, list(had.values()))
            self._on_progress()
        # While it speculates a layer looks up absent experts too: none may lead beyond the pool.
        self._slot_of[:] = 0
        self._slot_of[list(had)] = range(len(had))
        self._slots_on_device = None

    def run(self, forward: Forward, x: mx.array, indices: mx.array) -> mx.array:
        """Compute the layer for the chosen experts.

        Args:
            forward: mlx-lm's own layer, called with slots in place of expert ids.
            x: Hidden states, shape (..., width).
            indices: Chosen experts, shape (..., top_k).

        Returns:
            Shape (..., top_k, width), equal bit for bit to the resident layer's.

        Raises:
            ExpertReadError: An expert's bytes could not be read.
        """
        # Each layer is a mark, so that a long chunk of a large model is seen to move on.
        self._on_progress()
        if self.speculating:
            self._unfinished.wait()
            return self._with_what_is_there(forward, x, indices)
        began_s = self._clock.monotonic_s()
        self._unfinished.wait(indices)
        self.chosen = indices
        chosen = np.array(indices)
        self._counters.gate_wait_s += self._clock.monotonic_s() - began_s
        needed = np.unique(chosen).tolist()
        self.note_uses(needed)
        if len(needed) > self.capacity or (self.overlap and self.missing(needed)):
            return self._in_groups(forward, x, chosen, self._groups(needed, chosen))
        self._bring(needed)
        return self._unfinished.note(forward(x, mx.array(self._slot_of[chosen])))

    def refill(self, experts: Sequence[int]) -> Placement:
        """Give the slots to these experts before anybody asks for them; the last stay longest.

        Args:
            experts: Distinct, at most as many as there are slots.
        """
        # Whatever read the slots before must be computed before they are overwritten.
        self._unfinished.wait()
        return self._table.refill(experts)

    def _bring(
        self,
        needed: list[int],
        computing: Computing | None = None,
        earlier: Sequence[int] = (),
    ) -> None:
        """Bring what is missing, while what does not need it is computed."""
        placement = self.place(needed, earlier)
        self._counters.hits += placement.hits
        self._counters.misses += len(placement.loads)
        if not placement.loads:
            return
        if computing is not None:
            computing.wait_for(slot for _expert, slot in placement.loads)
        fill(self._reader, [(self, placement)])
        self._on_progress()

    def place(self, needed: list[int], earlier: Sequence[int] = ()) -> Placement:
        """Give needed experts their slots; who gets one anew must be read before it is used.

        Args:
            needed: Distinct experts.
            earlier: Where a call comes in groups, the group before this one.

        Raises:
            ValueError: More experts than slots.
        """
        return self._table.place(needed, earlier)

    def jobs(self, placement: Placement) -> list[ReadJob]:
        """What has to be read for a placement."""
        return [pool.job(expert, slot) for expert, slot in placement.loads for pool in self._pools]

    def arrived(self, placement: Placement) -> None:
        """The bytes of a placement are there: its experts can be used."""
        if not placement.loads:
            return
        for pool in self._pools:
            pool.finish()
        experts, slots = zip(*placement.loads, strict=True)
        self._slot_of[list(experts)] = slots
        self._slots_on_device = None

    def abandon(self, placement: Placement) -> None:
        """The bytes of a placement did not come; who sat in those slots is gone too."""
        self._table.drop(expert for expert, _slot in placement.loads)
        self._slots_on_device = None

    @property
    def capacity(self) -> int:
        """Experts that fit."""
        return self._table.slots

    def missing(self, needed: list[int]) -> list[int]:
        """Those that are not there."""
        return [expert for expert in needed if expert not in self._table]

    def _with_what_is_there(self, forward: Forward, x: mx.array, indices: mx.array) -> mx.array:
        """Compute without waiting for the choice; for an expert that is missing another stands in.

        With none missing this is the resident computation. With one missing the result is of no
        use, except that the later layers' choices are guessed from it: on the demo model as well
        as when the missing expert contributes nothing, which takes four more kernels a layer.
        """
        self.chosen = indices
        if self._slots_on_device is None:
            self._slots_on_device = mx.array(self._slot_of)
        return forward(x, self._slots_on_device[indices])

    def _groups(self, needed: list[int], chosen: NDArray[np.uint32]) -> list[list[int]]:
        """Needed experts in the order in which they are computed.

        Those that are there go first: they are computed while the first of the others are read,
        and before their slots are given away. Where not all fit, the others go in groups of half
        the slots, so that one group is read while another is computed; and those that the last
        tokens chose come last, because the tokens after them choose alike (first eight tokens
        after a prefill, a quarter of the experts in slots, demo model: hit ratio .456 for .414).
        """
        missing = self.missing(needed)
        there = [expert for expert in needed if expert in self._table]
        size = len(missing)
        if len(needed) > self.capacity:
            size = max(1, self.capacity // 2)
            last_use = np.zeros(len(self._slot_of), dtype=np.intp)
            last_use[chosen.reshape(-1)] = np.arange(chosen.size)
            missing.sort(key=last_use.__getitem__)
        groups = [missing[begin : begin + size] for begin in range(0, len(missing), size)]
        return [there, *groups] if there else groups

    def _in_groups(
        self, forward: Forward, x: mx.array, chosen: NDArray[np.uint32], groups: list[list[int]]
    ) -> mx.array:
        """Bring and compute one group of experts after the other; each expert is read once."""
        top_k = chosen.shape[-1]
        tokens = x.reshape(-1, x.shape[-1])
        flat = chosen.reshape(-1)
        computing = Computing()
        places: list[NDArray[np.intp]] = []
        for earlier, group in pairwise(([], *groups)):
            self._counters.groups += 1
            self._bring(group, computing, earlier)
            rows = np.flatnonzero(np.isin(flat, group))
            rows = rows[np.argsort(flat[rows], kind="stable")]
            slots = self._slot_of[flat[rows]]
            output = forward(tokens[mx.array(rows // top_k)], mx.array(slots[:, None]))
            computing.add(output.squeeze(1), slots)
            places.append(rows)
        back = np.argsort(np.concatenate(places))
        joined = mx.concatenate(computing.outputs)[mx.array(back)]
        return self._unfinished.note(joined.reshape(*chosen.shape, joined.shape[-1]))


def fill(reader: RangeReader, placed: Sequence[tuple[ExpertStream, Placement]]) -> None:
    """Bring what layers' placements lack, in one batch of reads.

    Raises:
        ExpertReadError: An expert's bytes could not be read; none of the batch has a slot then.
    """
    try:
        reader.read([job for stream, placement in placed for job in stream.jobs(placement)])
    except ExpertReadError:
        for stream, placement in placed:
            stream.abandon(placement)
        raise
    for stream, placement in placed:
        stream.arrived(placement)


def attach(layer: ExpertLayer, stream: ExpertStream) -> None:
    """Let a module's calls go through a stream; everything else of the module stays.

    The module's class is replaced by a subclass of it, so that whatever else a model keeps there
    (a norm, an activation) is found where it was.
    """
    kind = type(layer.module)

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        return stream.run(lambda *arguments: kind.__call__(self, *arguments), x, indices)

    layer.module.__class__ = type(f"Streamed{kind.__name__}", (kind,), {"__call__": call})
