"""Reads a model's weights a part at a time, so that whoever waits can see it move.

A load from a network volume may take many minutes. One `eval` of everything would be as silent as
a hang all the while.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from headrace_replicas.engine.backend import mx

OnRead = Callable[[int, int], object]
"""Hears how many bytes are in memory, and of how many; on the engine thread."""

# 17 MB/s, the slowest volume that models were seen to be loaded from, brings as much in 4 s.
PART_BYTES: Final = 64 * 1024 * 1024


def read_arrays(arrays: Sequence[mx.array], on_read: OnRead | None) -> None:
    """Bring arrays into memory, on the calling thread's default stream.

    Args:
        arrays: Those that are there already cost nothing.
        on_read: Called after each part, the last time with all bytes.
    """
    total_bytes = sum(array.nbytes for array in arrays)
    done_bytes = 0
    for part in _parts(arrays):
        mx.eval(part)
        done_bytes += sum(array.nbytes for array in part)
        if on_read is not None:
            on_read(done_bytes, total_bytes)


def _parts(arrays: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    """The arrays in their order, in parts that end with the array that fills them."""
    part: list[mx.array] = []
    part_bytes = 0
    for array in arrays:
        part.append(array)
        part_bytes += array.nbytes
        if part_bytes >= PART_BYTES:
            yield part
            part, part_bytes = [], 0
    if part:
        yield part
