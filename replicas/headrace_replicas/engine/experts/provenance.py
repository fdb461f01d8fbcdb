"""Which tensors of a checkpoint an array of the model is made of, byte for byte.

mlx-lm loads a checkpoint's tensors lazily and lets the model class rename, stack or rearrange them
(`sanitize`). An array that comes out as the very object that went in holds the tensor's bytes as
they lie in the file; one that `mx.stack` made of such objects holds theirs one after the other.
Anything else was computed, and its bytes are in no file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace_replicas.engine.backend import mx


class Provenance:
    """Filled while a model is loaded; asked afterwards."""

    def __init__(self) -> None:
        # The arrays are held too, so that no other object can get one's id.
        self._raw: dict[int, tuple[str, mx.array]] = {}
        self._stacked: dict[int, tuple[tuple[str, ...], mx.array]] = {}

    def note_checkpoint(self, weights: Mapping[str, mx.array]) -> None:
        """These arrays are the checkpoint's tensors, by name."""
        self._raw.update({id(array): (name, array) for name, array in weights.items()})

    def tensor_of(self, array: mx.array) -> str | None:
        """The tensor whose bytes this array holds, or None."""
        known = self._raw.get(id(array))
        return None if known is None else known[0]

    def parts_of(self, array: mx.array) -> tuple[str, ...] | None:
        """The tensors that lie one after the other along its first dimension, or None."""
        known = self._stacked.get(id(array))
        return None if known is None else known[0]

    def forget(self) -> None:
        """Let go of the arrays, so that what the model does not keep is freed."""
        self._raw.clear()
        self._stacked.clear()

    @contextmanager
    def watching_stacks(self) -> Iterator[None]:
        """While this lasts, remember what `mx.stack` makes of the checkpoint's tensors."""
        original: Any = mx.stack

        def stack(arrays: list[mx.array], axis: int = 0, **options: Any) -> mx.array:
            result: mx.array = original(arrays, axis, **options)
            names = [self.tensor_of(array) for array in arrays]
            if axis == 0 and all(name is not None for name in names):
                self._stacked[id(result)] = (tuple(map(str, names)), result)
            return result

        mx.stack = stack  # type: ignore[assignment]  # the same calls, one of them watched
        try:
            yield
        finally:
            mx.stack = original
