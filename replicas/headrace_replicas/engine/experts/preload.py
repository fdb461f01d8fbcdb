"""Fills slots before anybody asks: the experts that were wanted most before the last restart."""

from collections.abc import Iterator, Sequence
from typing import Final

from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.slots import Placement
from headrace_replicas.engine.experts.streaming import ExpertStream, fill

# Layers are read together up to so many bytes: far more than keeps all workers busy, and little
# enough that what is read beside the pools to be converted does not count, and that the engine
# gives a sign of life every second or so.
_BATCH_BYTES: Final = 1024**3


def preload(streamed: StreamedModel, hottest: Sequence[Sequence[int]]) -> int:
    """Bring the hottest experts of each layer into its slots; the hottest are the last to leave.

    On the engine thread, between two steps. What is there already is not read again, and nothing
    is counted as a hit or a miss.

    Args:
        streamed: What streams the experts.
        hottest: For each layer, its experts, hottest first; those beyond the slots are left out.

    Returns:
        Experts read.

    Raises:
        ExpertReadError: An expert's bytes could not be read; the layers read before have theirs.
    """
    placed = [
        (stream, stream.refill(experts[: stream.capacity][::-1]))
        for stream, experts in zip(streamed.streams, hottest, strict=True)
        if experts
    ]
    batches = list(_batches(placed))
    for number, batch in enumerate(batches):
        try:
            fill(streamed.reader, batch)
        except ExpertReadError:
            for stream, one in (pair for later in batches[number + 1 :] for pair in later):
                stream.abandon(one)
            raise
        streamed.on_progress()
    return sum(len(one.loads) for _stream, one in placed)


Placed = tuple[ExpertStream, Placement]


def _batches(placed: Sequence[Placed]) -> Iterator[list[Placed]]:
    batch: list[Placed] = []
    size = 0
    for stream, placement in placed:
        batch.append((stream, placement))
        size += len(placement.loads) * stream.expert_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
