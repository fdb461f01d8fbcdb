"""Speculate, fetch, verify: a decode schedule that cuts the graph once a pass, not once a layer.

The whole token runs through the model with the experts that are there; another stands in for a
missing one, and every layer leaves its choice behind. One read-back then tells what was missing in
all layers, one deep batch of reads fetches it, the caches go back to where they were, and the token
runs again. The pass in which nothing was missing is the resident computation, and the only one
whose result anybody sees. A wrong pass still predicts most choices of the later layers (93 % of
the experts that it fetched were needed, measured on the demo model).

It pays where a graph cut is dear and reads are latency-bound, and loses where compute is.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.slots import Placement
from headrace_replicas.engine.experts.streaming import ExpertStream, fill

# Passes that may fail before a token goes layer by layer, which needs exactly one.
_PASSES: Final = 3


class SpeculativeModel:
    """A model whose decode steps speculate; prefill goes layer by layer.

    Args:
        model: mlx-lm's model, with streaming experts.
        streamed: What streams them.
        step_tokens: Tokens of a sequence that a step has at most: with drafts to verify, several.
    """

    def __init__(self, model: Any, streamed: StreamedModel, step_tokens: int = 1) -> None:
        self._model = model
        self._streamed = streamed
        self._step_tokens = step_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None, **options: Any) -> mx.array:
        """Logits, as the model's own call gives them; shape (batch, tokens, vocabulary).

        Raises:
            ExpertReadError: An expert's bytes could not be read.
        """
        if cache is None or tokens.shape[1] > self._step_tokens:
            return self._plainly(tokens, cache, options)
        counters = self._streamed.counters
        counters.speculated += 1
        fetched: list[Placement] = []
        for _ in range(_PASSES):
            before = remember(cache)
            logits = self._speculate(tokens, cache, options)
            counters.passes += 1
            chosen = self._choices()
            if not any(s.missing(c) for s, c in self._each(chosen)):
                self._accept(chosen)
                self._count(chosen, fetched)
                return logits
            recall(cache, before)
            if any(len(c) > s.capacity for s, c in self._each(chosen)):
                break
            fetched.extend(self._fetch(chosen))
        hits, misses = counters.hits, counters.misses
        logits = self._plainly(tokens, cache, options)
        # What the passes had fetched was found in its slot now, and was no hit all the same.
        counters.hits = hits
        self._count(self._choices(), fetched, missed=counters.misses - misses)
        return logits

    def _plainly(self, tokens: mx.array, cache: Any, options: dict[str, Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache, **options)
        return logits

    def _speculate(self, tokens: mx.array, cache: Any, options: dict[str, Any]) -> mx.array:
        for stream in self._streamed.streams:
            stream.speculating = True
        try:
            logits = self._plainly(tokens, cache, options)
            mx.eval(logits, [stream.chosen for stream in self._streamed.streams])
        finally:
            for stream in self._streamed.streams:
                stream.speculating = False
        return logits

    def _choices(self) -> list[list[int]]:
        return [np.unique(np.array(stream.chosen)).tolist() for stream in self._streamed.streams]

    def _each(self, chosen: Sequence[list[int]]) -> list[tuple[ExpertStream, list[int]]]:
        return list(zip(self._streamed.streams, chosen, strict=True))

    def _fetch(self, chosen: Sequence[list[int]]) -> list[Placement]:
        """Bring what every layer chose, in one batch of reads."""
        placed = [(stream, stream.place(needed)) for stream, needed in self._each(chosen)]
        fill(self._streamed.reader, placed)
        self._streamed.on_progress()
        return [placement for _stream, placement in placed]

    def _accept(self, chosen: Sequence[list[int]]) -> None:
        """Note what the accepted pass used, and make it the youngest."""
        for stream, needed in self._each(chosen):
            stream.note_uses(needed)
            stream.place(needed)

    def _count(
        self, chosen: Sequence[list[int]], fetched: Sequence[Placement], *, missed: int = 0
    ) -> None:
        """Note what a token needed, and how much of it was there before its first pass.

        Args:
            chosen: Experts that the token used, for each layer.
            fetched: What its passes read: all layers of the first, then those of the next.
            missed: What was read besides, and counted.
        """
        counters, layers = self._streamed.counters, len(self._streamed.streams)
        for number, needed in enumerate(chosen):
            loads = [
                expert for placement in fetched[number::layers] for expert, _slot in placement.loads
            ]
            read = len(set(loads).intersection(needed))
            counters.wasted += len(loads) - read
            counters.misses += read
            counters.hits += len(needed) - read
        counters.hits -= missed


def remember(cache: Any) -> list[Any]:
    """Where a prompt cache stands.

    mlx-lm's caches replace their states, and write new keys and values in place behind what counts;
    so references are enough, and the next pass overwrites what this one wrote. Only counters (one
    number for each sequence) are changed in place: those are copied.
    """
    return [_remembered(entry) for entry in cache]


def _remembered(entry: Any) -> Any:
    if isinstance(entry, (list, tuple)):
        return [_remembered(part) for part in entry]
    if hasattr(entry, "__dict__"):
        return {name: _remembered(value) for name, value in vars(entry).items()}
    if isinstance(entry, mx.array) and entry.ndim <= 1:
        return mx.array(entry)
    return entry


def recall(cache: Any, before: Sequence[Any]) -> None:
    """Put a prompt cache back to where it stood."""
    for entry, state in zip(cache, before, strict=True):
        _recalled(entry, state)


def _recalled(entry: Any, state: Any) -> Any:
    if isinstance(entry, list):
        entry[:] = [_recalled(part, old) for part, old in zip(entry, state, strict=True)]
        return entry
    if isinstance(entry, tuple):
        return tuple(_recalled(part, old) for part, old in zip(entry, state, strict=True))
    if isinstance(state, dict):
        for name, old in state.items():
            vars(entry)[name] = _recalled(vars(entry)[name], old)
        return entry
    return state
