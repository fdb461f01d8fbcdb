"""Decodes one stream and notes what each token took; for benches, on the calling thread.

No batching, no sampling, no other process: what is left is the model, its experts and the disk.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.speculation import recall, remember
from headrace_replicas.engine.loading import LoadedModel

# Passes of one token with all its experts there: the first few bring them, the others count.
_SETTLING: Final = 3
_REPEATS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model's expert layers have done so far; zeros when nothing streams.

    Attributes:
        hits: Needed experts that were in their slots.
        misses: Needed experts that had to be read.
        wasted: Experts that were read and turned out not to be needed.
        read_bytes: Bytes read.
        read_s: Seconds of waiting for reads.
        gate_s: Seconds of waiting for gates; the device computes meanwhile.
        passes: Runs of whole tokens by speculation.
    """

    hits: int = 0
    misses: int = 0
    wasted: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    gate_s: float = 0.0
    passes: int = 0

    def __sub__(self, earlier: "Work") -> "Work":
        names = [field.name for field in fields(self)]
        return Work(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """What some decode steps gave and took.

    Attributes:
        chosen: The most likely token of each step.
        spent_s: Seconds of all steps; what was done between two of them is not counted.
        work: What the expert layers did.
    """

    chosen: tuple[int, ...]
    spent_s: float
    work: Work

    @property
    def tokens_per_s(self) -> float:
        """Steps a second."""
        return len(self.chosen) / self.spent_s

    @property
    def hit_ratio(self) -> float:
        """Of the experts needed; 1 when all are resident."""
        needed = self.work.hits + self.work.misses
        return self.work.hits / needed if needed else 1.0

    @property
    def read_bytes(self) -> float:
        """Bytes read a token."""
        return self.work.read_bytes / len(self.chosen)

    @property
    def read_s(self) -> float:
        """Seconds of waiting for reads, a token."""
        return self.work.read_s / len(self.chosen)

    @property
    def gate_s(self) -> float:
        """Seconds of waiting for gates, a token."""
        return self.work.gate_s / len(self.chosen)

    @property
    def passes(self) -> float:
        """Passes a token; 0 layer by layer."""
        return self.work.passes / len(self.chosen)


def work_so_far(loaded: LoadedModel) -> Work:
    """What a model's expert layers have done since it was loaded."""
    if loaded.streamed is None:
        return Work()
    counters, totals = loaded.streamed.counters, loaded.streamed.reader.totals
    return Work(
        hits=counters.hits,
        misses=counters.misses,
        wasted=counters.wasted,
        read_bytes=totals.read_bytes,
        read_s=totals.busy_s,
        gate_s=counters.gate_wait_s,
        passes=counters.passes,
    )


def prefill(loaded: LoadedModel, prompt: Sequence[int], *, chunk_tokens: int) -> Any:
    """A prompt cache that holds all tokens of a prompt but the last.

    Args:
        loaded: The model.
        prompt: At least one token.
        chunk_tokens: Tokens of one prefill step.
    """
    cache = make_prompt_cache(loaded.model)
    model: Any = loaded.model
    for begin in range(0, len(prompt) - 1, chunk_tokens):
        model(mx.array([prompt[begin : min(begin + chunk_tokens, len(prompt) - 1)]]), cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def greedily(_step: int, best: int) -> int:
    """Feed what the model says."""
    return best


def decode(
    model: Any,
    loaded: LoadedModel,
    *,
    cache: Any,
    first: int,
    count: int,
    clock: Clock,
    follow: Callable[[int, int], int] = greedily,
    never: Collection[int] = (),
    before_each: Callable[[], None] = lambda: None,
    after_each: Callable[[], None] = lambda: None,
) -> Decode:
    """Feed a token, take the most likely next one, and go on from there.

    Args:
        model: The model by the schedule that is to be measured.
        loaded: The model, for what its expert layers do.
        cache: Its prompt cache, up to the token before `first`.
        first: The first token to feed.
        count: Steps, at least one.
        clock: Time source.
        follow: (number of the step, its most likely token) -> the token to feed next.
        never: Tokens that are never taken for the most likely one.
        before_each: Called before each step, outside of its time.
        after_each: Called after each step, outside of its time.

    Raises:
        ExpertReadError: An expert's bytes could not be read.
    """
    before = work_so_far(loaded)
    chosen: list[int] = []
    spent_s, token = 0.0, first
    for step in range(count):
        before_each()
        began_s = clock.monotonic_s()
        best = _likeliest(model(mx.array([[token]]), cache=cache)[0, -1], never)
        mx.eval(best)
        spent_s += clock.monotonic_s() - began_s
        after_each()
        chosen.append(best.item())
        token = follow(step, chosen[-1])
    return Decode(chosen=tuple(chosen), spent_s=spent_s, work=work_so_far(loaded) - before)


def _likeliest(logits: mx.array, never: Collection[int]) -> Any:
    """The token with the largest logit, not computed yet; files may name tokens that are none."""
    banned = [token for token in never if token < logits.shape[-1]]
    if banned:
        logits[mx.array(banned)] = float("-inf")
    return mx.argmax(logits)


def all_hits_s(
    model: Any, loaded: LoadedModel, *, cache: Any, token: int, clock: Clock
) -> float | None:
    """Seconds of a token whose experts are all in memory: one token, again and again.

    The cache goes back after each pass, so that every pass asks for the same experts, and none but
    the first has anything to read. Real weights are far larger than a processor's own caches, so
    reading the same ones again is no faster than reading others.

    Args:
        model: The model by the schedule that is to be measured.
        loaded: The model, for what its expert layers do.
        cache: Its prompt cache; as it was when this returns.
        token: The token to feed.
        clock: Time source.

    Returns:
        None when something had to be read all the same.
    """
    before = remember(cache)

    def passes(count: int) -> float:
        began_s = clock.monotonic_s()
        for _ in range(count):
            mx.eval(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]))
            recall(cache, before)
        return clock.monotonic_s() - began_s

    passes(_SETTLING)
    read_bytes = work_so_far(loaded).read_bytes
    took_s = passes(_REPEATS)
    return took_s / _REPEATS if work_so_far(loaded).read_bytes == read_bytes else None
