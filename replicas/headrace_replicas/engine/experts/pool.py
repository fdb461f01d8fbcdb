"""Memory for a bounded number of experts, as arrays that mlx-lm's own layers compute with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.dtypes import CONTAINERS, DTYPES
from headrace_replicas.engine.experts.reader import ReadJob
from headrace_replicas.engine.experts.store import TensorSource


class TensorPool:
    """One tensor of an expert layer, for as many experts as there are slots.

    Bytes are read straight into the array's own buffer. Where the engine computes in another type
    than the file's (scales in float32 on a CPU) they are read into the end of their slot and
    converted there; only where that type is narrower, so that they do not fit, beside it.

    Args:
        source: Where the experts' bytes lie.
        shape: Shape of one expert's part.
        dtype: What the engine computes in.
        slots: Number of experts that fit.

    Attributes:
        array: Shape (slots, *shape); its contents change behind MLX's back, so it may be written
            only when nothing that reads it is waiting to be computed. A resize replaces it.
    """

    def __init__(
        self, source: TensorSource, shape: tuple[int, ...], dtype: mx.Dtype, slots: int
    ) -> None:
        self._source = source
        self._file_dtype = DTYPES[source.dtype]
        self._converts = self._file_dtype != dtype
        self._allocate(shape, dtype, slots)
        self._slot_bytes = self.array.nbytes // slots
        self._unconverted: dict[int, memoryview] = {}
        self._user: tuple[Any, str] | None = None

    def _allocate(self, shape: tuple[int, ...], dtype: mx.Dtype, slots: int) -> None:
        container = mx.zeros((slots, *shape), dtype=CONTAINERS[dtype.size])
        self.array = container.view(dtype)
        mx.eval(container, self.array)
        self._container = container
        self._bytes = memoryview(container).cast("B")  # type: ignore[arg-type]  # buffer protocol

    @property
    def slot_bytes(self) -> int:
        """Memory of one expert in the pool."""
        return self._slot_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that bringing one expert reads."""
        return self._source.expert_bytes

    def place(self, expert: int) -> tuple[int, int]:
        """(file index, offset) of an expert's bytes."""
        return self._source.places[expert]

    def serve(self, linear: Any, name: str) -> None:
        """Let a module compute with the pool, also after a resize.

        Args:
            linear: mlx-lm's module.
            name: Of its tensor that the pool stands for (`scales`).
        """
        self._user = (linear, name)
        linear[name] = self.array

    def resize(self, slots: int, kept: Sequence[int]) -> None:
        """Change the number of slots; the memory of the old ones is free on return.

        Both arrays exist in between, so this takes as much as the new one on top for a moment.

        Args:
            slots: Number of experts that fit from now on.
            kept: Slots whose contents stay; the first one becomes slot 0, and so on.
        """
        old, size = self._bytes, self._slot_bytes
        # What a failed read has left behind belongs to a slot that may be another's now.
        self._unconverted.clear()
        self._allocate(self.array.shape[1:], self.array.dtype, slots)
        for new, was in enumerate(kept):
            self._bytes[new * size : (new + 1) * size] = old[was * size : (was + 1) * size]
        if self._user is not None:
            self.serve(*self._user)

    def job(self, expert: int, slot: int) -> ReadJob:
        """What has to be read to bring an expert into a slot."""
        file, offset = self._source.places[expert]
        target = self._slot(slot)
        if self._converts:
            fits = self._source.expert_bytes <= self._slot_bytes
            room = target if fits else memoryview(bytearray(self._source.expert_bytes))
            target = self._unconverted[slot] = room[-self._source.expert_bytes :]
        return ReadJob(file, offset, target)

    def finish(self) -> None:
        """Convert what came in another type; nothing, in the common case."""
        for slot, raw in self._unconverted.items():
            converted = _converted(raw, self._file_dtype, self.array.dtype)
            self._slot(slot)[:] = converted.data.cast("B")
        self._unconverted.clear()

    def _slot(self, slot: int) -> memoryview:
        return self._bytes[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]


def _converted(raw: bytearray | memoryview, source: mx.Dtype, target: mx.Dtype) -> NDArray[Any]:
    """Elements of one type as another, rounded as MLX rounds; as bytes that numpy can hold.

    The result shares no memory with `raw`.
    """
    if source == mx.bfloat16 and target == mx.float32:
        # bfloat16 is the upper half of float32, and this is the load path of every CPU engine.
        halves = np.frombuffer(raw, dtype=np.uint16)
        words = halves.astype(np.uint32)
        words <<= 16
        return words
    if source == mx.float16 and target == mx.float32:
        return np.frombuffer(raw, dtype=np.float16).astype(np.float32)
    held = mx.array(np.frombuffer(raw, dtype=f"u{source.size}")).view(source)
    return np.array(held.astype(target).view(CONTAINERS[target.size]))
