"""The draft model: follows one sequence at a time and proposes how it goes on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.drafts.rewind import has_room, take_back
from headrace_replicas.engine.sampling import Draw, foresee

# isort: split
# This imports MLX itself: it comes after the import that explains a missing backend.
from mlx_lm.models.cache import make_prompt_cache


class Proposer:
    """A draft model with a cache of its own.

    The cache is compared with the sequence each time: what was proposed and not accepted is taken
    back, and of a sequence that begins like the one before the beginning is kept.

    Args:
        model: The draft model; its parameters are evaluated.
        vocabulary: Rows of the draft model's embedding.
        target_vocabulary: Rows of the embedding of the model that it drafts for.
    """

    def __init__(self, model: Any, *, vocabulary: int, target_vocabulary: int) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._target_vocabulary = target_vocabulary
        self._cache: list[Any] = make_prompt_cache(model)
        self._sequence = -1
        self._fed: list[int] = []
        # Fed after those, and computed by the time that anybody asks; shape (1, tokens).
        self._fed_unread: mx.array | None = None

    def follow(self, sequence: int, tokens: Sequence[int]) -> int:
        """Stand on the tokens of a sequence, as far as they were fed.

        Args:
            sequence: Tells sequences apart; the tokens of one only ever grow.
            tokens: All of them that the model has in its cache.

        Returns:
            How many tokens are still to be fed.
        """
        known = len(self._fed) if sequence == self._sequence else 0
        if self._fed_unread is not None:
            self._fed += np.array(self._fed_unread)[0].tolist()
            self._fed_unread = None
        agreed = _agreement(self._fed, tokens, known)
        if agreed < len(self._fed):
            self._take_back(len(self._fed) - agreed)
        self._sequence = sequence
        return len(tokens) - len(self._fed)

    def catch_up(self, tokens: Sequence[int], count: int) -> None:
        """Feed the next tokens of a followed sequence and wait for their keys and values."""
        fresh = list(tokens[len(self._fed) : len(self._fed) + count])
        self._run(mx.array([fresh], dtype=mx.uint32))
        self._fed += fresh
        mx.eval([entry.state for entry in self._cache])

    def has_room(self, tokens: int) -> bool:
        """Whether so many more tokens could be taken back again."""
        return has_room(self._cache, tokens)

    def propose(
        self, tokens: Sequence[int], newest: mx.array, count: int, sampler: Draw
    ) -> mx.array:
        """Guess what follows, without waiting for anything.

        Args:
            tokens: Of the followed sequence, without the newest.
            newest: Shape (1, 1); it need not be computed.
            count: How many tokens to guess.
            sampler: What will draw the real ones.

        Returns:
            Token ids, shape (1, count).
        """
        rest = mx.array([list(tokens[len(self._fed) :])], dtype=mx.uint32)
        self._fed += tokens[len(self._fed) :]
        step = newest.astype(mx.uint32)
        logits = self._run(mx.concatenate([rest.reshape(1, -1), step], axis=1))
        fed, guesses = [step], []
        for ahead in range(count):
            step = foresee(sampler, logits, ahead).astype(mx.uint32)[None]
            guesses.append(step)
            if ahead + 1 < count:
                logits = self._run(step)
                fed.append(step)
        self._fed_unread = mx.concatenate(fed, axis=1)
        return mx.concatenate(guesses, axis=1)

    def _run(self, tokens: mx.array) -> mx.array:
        """Logits after the last token, as wide as the target's, shape (1, vocabulary)."""
        # A row that only the target has is a wrong guess's worth, not a read beyond the embedding.
        known = mx.minimum(tokens, self._vocabulary - 1)
        logits: mx.array = self._model(known, cache=self._cache)
        logits = logits[:, -1, :].astype(mx.float32)
        lacking = self._target_vocabulary - logits.shape[-1]
        if lacking > 0:
            return mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)
        return logits[:, : self._target_vocabulary]

    def _take_back(self, surplus: int) -> None:
        if all(entry.is_trimmable() for entry in self._cache):
            take_back(self._cache, surplus)
            del self._fed[len(self._fed) - surplus :]
        else:
            self._cache = make_prompt_cache(self._model)
            self._fed.clear()


def _agreement(fed: Sequence[int], tokens: Sequence[int], known: int) -> int:
    """How many leading tokens are the same; the first `known` of them are."""
    agreed = known
    for one, other in zip(fed[known:], tokens[known:], strict=False):
        if one != other:
            break
        agreed += 1
    return agreed
