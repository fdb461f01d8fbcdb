"""Where the time of a token goes: the engine's own steps, timed from outside.

Processor time of the engine's threads, but for reads, whose wall-clock time is what it waits for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from headrace_replicas.engine.experts.pool import TensorPool
from headrace_replicas.engine.experts.reader import RangeReader
from headrace_replicas.engine.experts.streaming import ExpertStream, Unfinished
from tests.bench.decoding import Subject
from tests.bench.work_clock import WorkClock

_READING = "reading"
# None of these runs inside another one.
_STEPS: dict[str, tuple[type, str]] = {
    "computing, waited for by layers": (Unfinished, "wait"),
    _READING: (RangeReader, "read"),
    "choosing slots": (ExpertStream, "place"),
    "listing reads": (ExpertStream, "jobs"),
    "converting scales and biases": (TensorPool, "finish"),
}
_LAST = "computing, the rest"
_OTHER = "Python and MLX's graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Feed tokens, and tell what each one's time went to.

    Attributes:
        tokens: What is fed.
        cold: Whether the page cache is dropped before each token.
    """

    tokens: Sequence[int]
    cold: bool = False

    def run(self, subject: Subject) -> dict[str, float]:
        """Seconds a token, by what they went to."""
        spent = dict.fromkeys((*_STEPS, _LAST, _OTHER), 0.0)
        with WorkClock() as clock, _timed_steps(spent, clock):
            for token in self.tokens:
                if self.cold:
                    subject.pages.drop()
                began_s = clock.seconds()
                logits = subject.model(mx.array([[token]]), cache=subject.cache)
                built_s = clock.seconds()
                mx.eval(logits)
                spent[_LAST] += clock.seconds() - built_s
                spent[_OTHER] += built_s - began_s
        spent[_OTHER] -= sum(spent[step] for step in _STEPS if step != _READING)
        return {step: seconds / len(self.tokens) for step, seconds in spent.items()}


@contextmanager
def _timed_steps(spent: dict[str, float], clock: WorkClock) -> Iterator[None]:
    with ExitStack() as patches:
        for step, (owner, name) in _STEPS.items():
            timed = _timed(getattr(owner, name), step, spent, clock)
            patches.enter_context(patch.object(owner, name, timed))
        yield


def _timed(
    method: Callable[..., Any], step: str, spent: dict[str, float], clock: WorkClock
) -> Callable[..., Any]:
    # The engine's own threads sleep while others read.
    seconds = time.perf_counter if step == _READING else clock.seconds

    def call(*arguments: Any) -> Any:
        began_s = seconds()
        try:
            return method(*arguments)
        finally:
            spent[step] += seconds() - began_s

    return call
