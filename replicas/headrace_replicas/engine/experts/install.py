"""Puts expert streaming into a lazily loaded model, before any of its weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.pool import TensorPool
from headrace_replicas.engine.experts.provenance import Provenance
from headrace_replicas.engine.experts.reader import READ_FAILURES, RangeReader
from headrace_replicas.engine.experts.seam import ExpertLayer
from headrace_replicas.engine.experts.storage import Storage
from headrace_replicas.engine.experts.store import Store
from headrace_replicas.engine.experts.streaming import (
    ExpertStream,
    StreamCounters,
    Unfinished,
    attach,
)
from headrace_replicas.engine.experts.use_counts import UseCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedModel:
    """What streams the experts of one model.

    Attributes:
        streams: One for each expert layer that streams, in the model's order.
        counters: Theirs, together.
        reader: Reads the shards for all of them.
        on_progress: Called whenever bytes have arrived.
        uses: How often each expert of these layers was needed.
    """

    streams: tuple[ExpertStream, ...]
    counters: StreamCounters
    uses: UseCounts
    reader: RangeReader
    on_progress: Callable[[], None]

    @property
    def shapes(self) -> dict[str, int]:
        """Experts of each layer that streams, by its path, in the order of `streams`."""
        return {stream.path: stream.experts for stream in self.streams}


def stream_experts(
    layers: Sequence[ExpertLayer],
    *,
    store: Store,
    provenance: Provenance,
    slots: int,
    dtype_of: Callable[[str, mx.Dtype], mx.Dtype],
    workers: int,
    clock: Clock,
    on_progress: Callable[[], None],
    storage: Storage | None = None,
    read_failures: int = READ_FAILURES,
) -> StreamedModel:
    """Replace the experts of the given layers by slots.

    Args:
        layers: From `seam.expert_layers`; their arrays are not evaluated and are let go.
        store: Where the experts' bytes lie.
        provenance: From the load of this model.
        slots: Experts of a layer that fit into memory; a layer with no more stays resident.
        dtype_of: What a parameter is computed in, by its path and its type as loaded.
        workers: Reads under way at a time.
        clock: Time source.
        on_progress: Called whenever bytes have arrived, also in the middle of a batch of reads.
        storage: Where the files' bytes come from; None takes the operating system's files.
        read_failures: Failed batches of reads of one file after which it is reported lost.

    Raises:
        CheckpointError: A layer's experts cannot be read from the files as they are.
        ExpertReadError: A file cannot be opened.
    """
    reader = RangeReader(
        store.files,
        workers=workers,
        clock=clock,
        storage=storage,
        on_arrival=on_progress,
        failures=read_failures,
    )
    counters, unfinished = StreamCounters(), Unfinished()
    streaming = [layer for layer in layers if layer.experts > slots]
    uses = UseCounts([layer.experts for layer in streaming])
    streams: list[ExpertStream] = []
    for number, layer in enumerate(streaming):
        pools: list[TensorPool] = []
        for tensor in layer.tensors:
            path = f"{layer.path}.{tensor.projection}.{tensor.name}"
            pool = TensorPool(
                store.source(layer, tensor, provenance),
                tuple(tensor.array.shape[1:]),
                dtype_of(path, tensor.array.dtype),
                slots,
            )
            pool.serve(layer.module[tensor.projection], tensor.name)
            pools.append(pool)
        stream = ExpertStream(
            layer=layer,
            pools=pools,
            slots=slots,
            reader=reader,
            counters=counters,
            unfinished=unfinished,
            clock=clock,
            on_progress=on_progress,
            note_uses=partial(uses.note, number),
        )
        attach(layer, stream)
        streams.append(stream)
    return StreamedModel(
        streams=tuple(streams),
        counters=counters,
        uses=uses,
        reader=reader,
        on_progress=on_progress,
    )
