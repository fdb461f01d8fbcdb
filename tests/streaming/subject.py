"""What is asked of a model: a prompt, single steps, results that wait, and a batch."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.steady_batch import SteadyBatchGenerator
from tests.streaming.model_configs import EXPERTS, VOCABULARY, WIDTH, Architecture

# With one expert a token it still makes more than the 64 choices from which mlx-lm sorts them.
PROMPT: Final = [(7 * position + 3) % VOCABULARY for position in range(72)]
DECODE_STEPS: Final = 12
BATCH: Final = ([5, 6, 7], list(range(18)), list(range(40, 74)))
BATCH_TOKENS: Final = 5
CHUNK_TOKENS: Final = 17
# One-token prompts, the first one twice, whose results are asked for only when all have run.
WAITING: Final = (5, 5, 9, 31, 67)


class Subject:
    """One model under test.

    Args:
        architecture: What it is.
        model: mlx-lm's, resident or streamed, or one that speculates with it.
    """

    def __init__(self, architecture: Architecture, model: Any) -> None:
        self._batches = not architecture.unbatched and not architecture.metal_only
        alone = architecture.metal_only
        self._model: Any = LayersAlone(model, architecture.top_k) if alone else model
        self._new_cache: Callable[[], Any] = list if alone else lambda: make_prompt_cache(model)
        self._cache: Any = self._new_cache()
        self._newest: mx.array | None = None

    def prefill(self) -> mx.array:
        """Logits of the prompt, shape (1, tokens, vocabulary)."""
        return self._forward(mx.array(PROMPT))

    def decode(self) -> tuple[mx.array, ...]:
        """Logits of single steps after the prompt, each with the likeliest token before it."""
        steps = []
        for _ in range(DECODE_STEPS):
            assert self._newest is not None
            likeliest = mx.argmax(self._newest[0, -1]) % VOCABULARY
            steps.append(self._forward(likeliest[None]))
        return tuple(steps)

    def wait(self) -> tuple[mx.array, ...]:
        """Logits of prompts that all have been called before the first result is computed."""
        waiting = [self._model(mx.array([[token]]), cache=self._new_cache()) for token in WAITING]
        mx.eval(waiting)
        return tuple(waiting)

    def batch(self) -> tuple[mx.array, ...]:
        """Log probabilities of sequences of different lengths that are decoded together.

        Returns:
            One array for each sequence, shape (tokens, vocabulary); () where mlx-lm cannot.
        """
        if not self._batches:
            return ()
        generator = SteadyBatchGenerator(
            self._model,
            max_batch=len(BATCH),
            prefill_chunk_tokens=CHUNK_TOKENS,
            stream=mx.default_stream(mx.cpu),
        )
        ids = generator.insert([*BATCH], max_tokens=[BATCH_TOKENS] * len(BATCH))
        steps: dict[int, list[mx.array]] = {one: [] for one in ids}
        running = set(ids)
        while running:
            _, responses = generator.next()
            for response in responses:
                steps[response.uid].append(response.logprobs)
                running -= {response.uid} if response.finish_reason else set()
        return tuple(mx.stack(steps[one]) for one in ids)

    def _forward(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self._model(tokens[None], cache=self._cache)
        mx.eval(logits)
        self._newest = logits
        return logits


class LayersAlone:
    """The expert layers of a model, one after the other, without what lies between them.

    For architectures whose attention is written in Metal alone: their experts can be compared on
    any device.

    Args:
        model: Any model.
        top_k: Experts of one token.
    """

    def __init__(self, model: Module, top_k: int) -> None:
        self._layers = [layer.module for layer in expert_layers(model)]
        self._top_k = top_k
        self._embedding = mx.random.normal((VOCABULARY, WIDTH), key=mx.random.key(1))
        self._gate = mx.random.normal((WIDTH, EXPERTS), key=mx.random.key(2))

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:  # noqa: ARG002 - a model's
        """The hidden states after the last layer, shape (1, tokens, width)."""
        hidden = self._embedding[tokens]
        for layer in self._layers:
            chosen = mx.argpartition(-(hidden @ self._gate), kth=self._top_k - 1, axis=-1)
            hidden = hidden + layer(hidden, chosen[..., : self._top_k]).mean(axis=-2)
            hidden = hidden * mx.rsqrt(mx.mean(hidden * hidden, axis=-1, keepdims=True))
        return hidden
