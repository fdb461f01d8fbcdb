"""mlx-lm's batch of decoding sequences, which drafts for a sequence that decodes alone.

A decode step hands the newest token to the model and gets the logits that the next one is drawn
from. Here the model also gets the draft model's guesses of what comes next. The logits after the
newest token go back as ever; those after the guesses are kept. When the token that is drawn is the
guess, the next step takes the kept logits instead of running the model. So drawing, penalties, log
probabilities, stops and limits see nothing of it.

Between two steps the caches always stand where the sequence stands: what a pass wrote for guesses
is taken back at once, and counted again when the guess proves right and nobody has changed the
caches since. Whoever joins, cuts, copies or drops them therefore needs to know nothing of drafts.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.drafts.policy import Pace, observed, prefilled
from headrace_replicas.engine.drafts.proposer import Proposer
from headrace_replicas.engine.drafts.rewind import (
    Mark,
    count_again,
    has_room,
    is_unchanged,
    mark,
    take_back,
)
from headrace_replicas.engine.sampling import Draw, Sampler

# isort: split
# This imports MLX itself: it comes after the import that explains a missing backend.
from mlx_lm.generate import GenerationBatch

log = logging.getLogger("ray.serve.headrace.drafts")

# Tokens that the draft model lags behind and takes in the step that drafts; more are a prefill.
_TAIL_TOKENS: Final = 8


@dataclass(slots=True)
class DraftCounters:
    """What drafts have done; only the engine thread writes.

    Attributes:
        passes: Runs of the model with drafts.
        drafted: Tokens proposed in them.
        accepted: Tokens whose logits such a pass had computed already: runs of the model saved.
        prefilled: Tokens that the draft model was fed to catch up with a sequence.
        stops: Times that drafts were found not to pay.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    prefilled: int = 0
    stops: int = 0

    @property
    def acceptance_ratio(self) -> float:
        """Share of the proposed tokens that were accepted; 0 before any was proposed."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What bounds the drafts of a pass.

    Attributes:
        tokens: Drafts of a pass at most.
        context_tokens: Tokens that both models can look back on.
        prefill_tokens: Tokens that the draft model is fed in one step to catch up.
        same_bits: Whether a pass gives each token the bits that a step of its own would. Where it
            does not, requests that want those are not drafted for.
    """

    tokens: int
    context_tokens: int
    prefill_tokens: int
    same_bits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """What a pass computed beyond the newest token.

    Attributes:
        drafts: The guesses, shape (1, tokens).
        logits: After each of them, shape (1, tokens, vocabulary).
        used: Guesses that were accepted already.
        marked: The caches, as they stand since then.
    """

    drafts: mx.array
    logits: mx.array
    used: int
    marked: Mark

    def is_right(self, newest: mx.array) -> bool:
        """Whether the next guess is the token that was drawn; shape (1, 1)."""
        return bool(np.array(newest)[0, 0] == np.array(self.drafts)[0, self.used])


class DraftedBatch(GenerationBatch):  # type: ignore[misc]  # mlx-lm is untyped
    """A `GenerationBatch` that drafts while it has one sequence only.

    Args:
        target: The model, called as `target(tokens, cache=...)`.
        fallback_sampler: Of sequences that have none.
        proposer: The draft model.
        limits: What bounds drafts.
        counters: Counted on.
        clock: Time source.
        pace: How decoding has gone so far; None knows nothing yet.
    """

    def __init__(
        self,
        target: Any,
        *,
        fallback_sampler: Draw,
        proposer: Proposer,
        limits: DraftLimits,
        counters: DraftCounters,
        clock: Clock,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(
            target,
            uids=[],
            inputs=mx.array([], dtype=mx.uint32),
            prompt_cache=[],
            tokens=[],
            samplers=[],
            fallback_sampler=fallback_sampler,
            logits_processors=[],
            stop_sequences=[],
            max_tokens=[],
        )
        self._proposer = proposer
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._pace = pace or Pace()
        self._ahead: _Ahead | None = None
        self._is_comparable = False
        self._said: set[str] = set()

    @property
    def model(self) -> Any:
        """What a step calls. It is made anew each time: a batch that is let go is gone at once."""
        return self._logits

    @model.setter
    def model(self, target: Any) -> None:
        self._target = target

    def next(self) -> list[Any]:
        """One step of all sequences; its time tells whether drafts pay."""
        self._is_comparable = False
        began_s = self._clock.monotonic_s()
        responses: list[Any] = super().next()
        if self._is_comparable:
            self._observe(self._clock.monotonic_s() - began_s)
        return responses

    def _logits(self, tokens: mx.array, cache: Any) -> mx.array:
        """What the model's own call would give, for the newest token of each sequence.

        Args:
            tokens: Shape (batch, 1).
            cache: The batch's prompt cache.

        Returns:
            Shape (batch, 1, vocabulary).
        """
        ahead, self._ahead = self._ahead, None
        if len(self.uids) == 1:
            if ahead and is_unchanged(cache, ahead.marked) and ahead.is_right(tokens):
                return self._accepted(ahead, cache)
            if count := self._drafts_now(cache):
                return self._verified(tokens, cache, count)
        logits: mx.array = self._target(tokens, cache=cache)
        return logits

    def _accepted(self, ahead: _Ahead, cache: Any) -> mx.array:
        count_again(cache, 1)
        self._counters.accepted += 1
        self._is_comparable = True
        used = ahead.used + 1
        if used < ahead.drafts.shape[1]:
            self._ahead = replace(ahead, used=used, marked=mark(cache))
        return ahead.logits[:, ahead.used : used]

    def _verified(self, tokens: mx.array, cache: Any, count: int) -> mx.array:
        drafts = self._proposer.propose(self.tokens[0], tokens, count, self.samplers[0])
        together = mx.concatenate([tokens.astype(mx.uint32), drafts], axis=1)
        logits: mx.array = self._target(together, cache=cache)
        take_back(cache, count)
        self._counters.passes += 1
        self._counters.drafted += count
        self._ahead = _Ahead(drafts=drafts, logits=logits[:, 1:], used=0, marked=mark(cache))
        return logits[:, :1]

    def _drafts_now(self, cache: Any) -> int:
        """How many tokens to draft in this step."""
        obstacle = self._obstacle(cache)
        if obstacle:
            self._say_once(obstacle)
            return 0
        if self._pace.drafting:
            lag = self._proposer.follow(self.uids[0], self.tokens[0])
            if not self._proposer.has_room(lag + 1 + self._limits.tokens):
                self._say_once("the draft model's window is full")
                return 0
            if lag > _TAIL_TOKENS:
                self._catch_up(lag)
                return 0
        self._is_comparable = True
        # The step after the last token that may be drawn would draw from the last draft's logits.
        useful = self.max_tokens[0] - self._num_tokens[0] - 2
        return max(0, min(self._limits.tokens, useful)) if self._pace.drafting else 0

    def _obstacle(self, cache: Any) -> str:
        """Why this sequence must do without drafts now; empty when it need not."""
        limits, sampler = self._limits, self.samplers[0]
        pass_tokens = 1 + limits.tokens
        if not limits.same_bits and isinstance(sampler, Sampler) and sampler.replays_by_decode:
            return "exact requests want the bits of single steps, and a verify pass has others"
        if not has_room(cache, pass_tokens):
            return "the model's caches cannot be taken back (recurrent, or a window that is full)"
        if len(self.tokens[0]) + pass_tokens > limits.context_tokens:
            return "the context of the model or of its draft model ends here"
        return ""

    def _say_once(self, obstacle: str) -> None:
        if obstacle not in self._said:
            self._said.add(obstacle)
            log.info("no drafts for a request (said once): %s", obstacle)

    def _catch_up(self, lag: int) -> None:
        count = min(lag, self._limits.prefill_tokens)
        began_s = self._clock.monotonic_s()
        self._proposer.catch_up(self.tokens[0], count)
        self._pace = prefilled(self._pace, self._clock.monotonic_s() - began_s)
        self._counters.prefilled += count

    def _observe(self, spent_s: float) -> None:
        before, self._pace = self._pace, observed(self._pace, spent_s)
        if before.drafting and self._pace.phase == "resting":
            self._counters.stops += 1
        if before.paid is not self._pace.paid:
            log.info(
                "drafts %s: %.2f ms a token with them, %.2f ms without, %.0f %% accepted so far",
                "pay" if self._pace.paid else "rest because they do not pay",
                1e3 * self._pace.with_drafts.per_token_s,
                1e3 * self._pace.without.per_token_s,
                100 * self._counters.acceptance_ratio,
            )
