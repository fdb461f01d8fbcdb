"""mlx-lm's continuous batching without its full-stream drains.

`BatchGenerator` clears MLX's allocator cache after every prefill chunk and every 512 decode steps,
and synchronises the stream in `close()` and `__del__`. Each of those waits for all GPU work of the
process; after a GPU fault each of them is one more call into the failing driver. A serving engine
bounds the allocator cache by a limit instead, and is never closed: its process ends.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.errors import CheckpointError

_CLEARS_EVERY_STEPS = 512


class Float32Logits:
    """A model whose logits are float32, so that sampling does not lose bits to bfloat16."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """The model's logits, float32."""
        logits: mx.array = self._model(*args, **kwargs)
        return logits.astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def require_batching(model: Any, model_type: str) -> None:
    """Refuse a model whose caches mlx-lm cannot join to a batch.

    Raises:
        CheckpointError: With the cache that is to blame.
    """
    unfit = {
        type(cache).__name__ for cache in make_prompt_cache(model) if not hasattr(cache, "merge")
    }
    if unfit:
        raise CheckpointError(
            f"model type {model_type!r} keeps its keys and values in {', '.join(sorted(unfit))}, "
            "which this version of mlx-lm cannot join to a batch, so that it cannot be served. "
            "Upgrade mlx-lm when it can."
        )


class SteadyPromptBatch(PromptProcessingBatch):  # type: ignore[misc]  # mlx-lm is untyped
    """Prefills one prompt, a chunk for each call, without clearing the allocator cache."""

    def prompt(self, tokens: list[list[int]]) -> None:
        """Run one chunk of the prompt through the model and wait for its KV cache.

        Args:
            tokens: The chunk, as the only entry; an empty list does nothing.
        """
        if not tokens:
            return
        if len(tokens) != len(self.uids) or len(tokens) != 1:
            msg = f"one prompt is prefilled at a time, got {len(tokens)} for {len(self.uids)}"
            raise ValueError(msg)
        self.tokens[0] += tokens[0]
        self.model(mx.array(tokens), cache=self.prompt_cache)
        mx.eval([cache.state for cache in self.prompt_cache])


class SteadyBatchGenerator(BatchGenerator):  # type: ignore[misc]  # mlx-lm is untyped
    """A `BatchGenerator` that neither synchronises nor clears while requests run.

    Prompts are prefilled one at a time: a batch of prompts of different lengths needs padding,
    and the shape of a prefill decides which kernels compute it.

    Args:
        model: Called as `model(tokens, cache=...)`; returns logits.
        max_batch: Sequences that decode together.
        prefill_chunk_tokens: Prompt tokens for each call of `next`.
        stream: The engine thread's MLX stream.
    """

    def __init__(
        self, model: Any, *, max_batch: int, prefill_chunk_tokens: int, stream: mx.Stream
    ) -> None:
        super().__init__(
            model,
            completion_batch_size=max_batch,
            prefill_batch_size=1,
            prefill_step_size=prefill_chunk_tokens,
            stream=stream,
        )
        self._prompt_batch = SteadyPromptBatch.empty(
            model, self.sampler, prefill_step_size=prefill_chunk_tokens
        )

    def decode_in(self, batch: GenerationBatch) -> None:
        """Let sequences decode in another batch than mlx-lm's own; before the first request."""
        self._generation_batch = batch

    def admit(self, count: int) -> None:
        """Let so many sequences decode together from now on; those that do already stay."""
        self.completion_batch_size = count

    def next(self) -> tuple[list[Any], list[Any]]:
        """One decode step and one prefill chunk: (prompt responses, generation responses)."""
        if self._counters.generation_steps % _CLEARS_EVERY_STEPS == _CLEARS_EVERY_STEPS - 1:
            # The base class clears the cache when the counter reaches a multiple; step over it.
            self._counters.generation_steps += 1
        responses: tuple[list[Any], list[Any]] = super().next()
        return responses

    def close(self) -> None:
        """Nothing: the base class would synchronise the stream."""

    def __del__(self) -> None:
        """Nothing: the base class would call `close`."""
