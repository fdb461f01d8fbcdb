"""Expert layers whose experts come from the SSD when the gate picks them.

By itself a layer works layer by layer: wait for the gate's choice, find the missing experts, read
them while nothing is queued on the device, and only then build the expert computation. No command
buffer ever waits for a read. While `speculation` runs a whole token through the model at once, a
layer computes with what is there and leaves its choice behind instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.backend import mx
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
        waves: Passes over groups of experts, where a call needed more than there are slots.
        speculated: Tokens (of a whole batch) that ran through the model at once.
        passes: Times that they did, until no expert was missing.
        wasted: Experts read for a pass that the accepted pass did not need.
    """

    hits: int = 0
    misses: int = 0
    gate_wait_s: float = 0.0
    waves: int = 0
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
        on_progress: Called whenever bytes have arrived.
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
    ) -> None:
        self._table = SlotTable(slots)
        self._slot_of = np.zeros(layer.experts, dtype=np.uint32)
        self._pools = tuple(pools)
        self._reader = reader
        self._counters = counters
        self._clock = clock
        self._on_progress = on_progress
        self._unfinished = unfinished
        self._on_device: tuple[mx.array, mx.array] | None = None
        self.chosen: mx.array | None = None
        self.speculating = False

    @property
    def expert_bytes(self) -> int:
        """Bytes that bringing one expert reads."""
        return sum(pool.read_bytes for pool in self._pools)

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
        if self.speculating:
            self._unfinished.wait()
            return self._with_what_is_there(forward, x, indices)
        began_s = self._clock.monotonic_s()
        self._unfinished.wait(indices)
        chosen = np.array(indices)
        self._counters.gate_wait_s += self._clock.monotonic_s() - began_s
        needed = np.unique(chosen).tolist()
        if len(needed) > self._table.slots:
            return self._in_waves(forward, x, chosen, needed)
        self._bring(needed)
        return self._unfinished.note(forward(x, mx.array(self._slot_of[chosen])))

    def preload(self, experts: Iterable[int]) -> None:
        """Bring experts before anybody asks for them, as many as fit."""
        self._bring(list(experts)[: self._table.slots])

    def _bring(self, needed: list[int]) -> None:
        placement = self.place(needed)
        if not placement.loads:
            return
        # Whatever read the slots before must be computed before they are overwritten.
        self._unfinished.wait()
        try:
            self._reader.read(self.jobs(placement))
        except ExpertReadError:
            self.abandon(placement)
            raise
        self.arrived(placement)
        self._on_progress()

    def place(self, needed: list[int]) -> Placement:
        """Give needed experts their slots; who gets one anew must be read before it is used.

        Raises:
            ValueError: More experts than slots.
        """
        placement = self._table.place(needed)
        self._counters.hits += placement.hits
        self._counters.misses += len(placement.loads)
        return placement

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
        self._on_device = None

    def abandon(self, placement: Placement) -> None:
        """The bytes of a placement did not come; who sat in those slots is gone too."""
        self._table.drop(expert for expert, _slot in placement.loads)
        self._on_device = None

    @property
    def capacity(self) -> int:
        """Experts that fit."""
        return self._table.slots

    def missing(self, needed: list[int]) -> list[int]:
        """Those that are not there."""
        return [expert for expert in needed if expert not in self._table]

    def _with_what_is_there(self, forward: Forward, x: mx.array, indices: mx.array) -> mx.array:
        """Compute without waiting for the choice; an expert that is missing contributes nothing.

        With none missing this is the resident computation: selecting an element changes no bit.
        """
        self.chosen = indices
        if self._on_device is None:
            present = np.array([expert in self._table for expert in range(len(self._slot_of))])
            self._on_device = (mx.array(self._slot_of), mx.array(present))
        slot_of, is_there = self._on_device
        output = forward(x, slot_of[indices])
        return mx.where(is_there[indices][..., None], output, mx.zeros_like(output))

    def _in_waves(
        self, forward: Forward, x: mx.array, chosen: NDArray[np.uint32], needed: list[int]
    ) -> mx.array:
        """More experts than slots: group by group, so that each expert is read once.

        Experts that are there go first, before their slots are given away.
        """
        top_k = chosen.shape[-1]
        tokens = x.reshape(-1, x.shape[-1])
        flat = chosen.reshape(-1)
        order = sorted(needed, key=lambda expert: expert not in self._table)
        outputs: list[mx.array] = []
        places: list[NDArray[np.intp]] = []
        for begin in range(0, len(order), self._table.slots):
            wave = order[begin : begin + self._table.slots]
            self._counters.waves += 1
            self._bring(wave)
            rows = np.flatnonzero(np.isin(flat, wave))
            rows = rows[np.argsort(flat[rows], kind="stable")]
            slots = mx.array(self._slot_of[flat[rows]][:, None])
            output = forward(tokens[mx.array(rows // top_k)], slots)
            outputs.append(self._unfinished.note(output).squeeze(1))
            places.append(rows)
        back = np.argsort(np.concatenate(places))
        joined = mx.concatenate(outputs)[mx.array(back)]
        return joined.reshape(*chosen.shape, joined.shape[-1])


def attach(layer: ExpertLayer, stream: ExpertStream) -> None:
    """Let a module's calls go through a stream; everything else of the module stays.

    The module's class is replaced by a subclass of it, so that whatever else a model keeps there
    (a norm, an activation) is found where it was.
    """
    kind = type(layer.module)

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        return stream.run(lambda *arguments: kind.__call__(self, *arguments), x, indices)

    layer.module.__class__ = type(f"Streamed{kind.__name__}", (kind,), {"__call__": call})
