"""Notes which experts each token of a decode uses, whether they stream or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.seam import expert_layers


class ChoiceTrace:
    """The experts that tokens used, by layer.

    Args:
        layers: How many expert layers there are.

    Attributes:
        uses: For each layer the experts of each token that was ended.
    """

    def __init__(self, layers: int) -> None:
        self.uses: tuple[list[frozenset[int]], ...] = tuple([] for _ in range(layers))
        self._newest: list[mx.array | None] = [None] * layers

    def note(self, layer: int, indices: mx.array) -> None:
        """A layer was called; of several calls in one token the last counts."""
        self._newest[layer] = indices

    def end_token(self) -> None:
        """Everything of one token is computed."""
        for uses, indices in zip(self.uses, self._newest, strict=True):
            if indices is not None:
                uses.append(frozenset(np.unique(np.array(indices)).tolist()))


@contextmanager
def tracing(model: Any) -> Iterator[ChoiceTrace]:
    """While this lasts, calls of a model's expert layers are noted.

    A module's class is replaced by a subclass of it, as streaming does, and put back at the end.

    Args:
        model: mlx-lm's model, with or without streaming experts.
    """
    modules = [layer.module for layer in expert_layers(model)]
    kinds = [type(module) for module in modules]
    trace = ChoiceTrace(len(modules))
    try:
        for number, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
            module.__class__ = _noting(kind, number, trace)
        yield trace
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind


def _noting(kind: type[Any], layer: int, trace: ChoiceTrace) -> type[Any]:
    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        trace.note(layer, indices)
        output: mx.array = kind.__call__(self, x, indices)
        return output

    return type(f"Traced{kind.__name__}", (kind,), {"__call__": call})
