"""What one running choice has produced and not yet sent, and when it is time to send it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    Progress,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.output_check import REPEATS, check_repeated, check_token

Sink = Callable[[TokenChunk | HeadraceError], None]

# A stream that has no tokens to send says this often that the engine moves on. The gateway takes
# several missed signs for a stall, so this bounds how fast a frozen replica is noticed.
SIGN_OF_LIFE_S = 0.2


class OutputStream:
    """The output side of one attempt, used by the engine thread alone.

    Args:
        request: The attempt; its `output_ids` were delivered by earlier attempts.
        sink: Takes chunks, and at most one error as the last thing.
        settings: How long and how many tokens may wait to travel together.
    """

    def __init__(self, request: GenerateRequest, sink: Sink, settings: EngineSettings) -> None:
        self.request = request
        self._sink = sink
        self._settings = settings
        self._position = len(request.output_ids)
        self._replay_left = self._position if request.resume_mode == "exact" else 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent_anything = False
        self._last_sent_s = 0.0
        self._newest_id = -1
        self._repeats = 0
        self.prefill_done_tokens = 0
        self.prefill_total_tokens = len(self.prompt_ids)

    @property
    def prompt_ids(self) -> list[int]:
        """What is prefilled: the prompt, and in `fast` resume the delivered output after it."""
        replayed = self.request.output_ids if self.request.resume_mode == "fast" else ()
        return [*self.request.prompt_ids, *replayed]

    @property
    def new_tokens_limit(self) -> int:
        """Tokens that the generator may produce for this attempt, replayed decode steps included.

        0 when earlier attempts delivered everything but the finish.
        """
        delivered = 0 if self.request.resume_mode == "exact" else len(self.request.output_ids)
        return self.request.max_tokens - delivered

    @property
    def outstanding_tokens(self) -> int:
        """Upper bound of the tokens that this attempt still has to prefill and generate."""
        to_prefill = self.prefill_total_tokens - self.prefill_done_tokens
        produced = self._position + len(self._ids)
        return to_prefill + self._replay_left + self.request.max_tokens - produced

    def check(self, token_id: int, row: Any) -> bool:
        """Look whether a token can come from a device that works, before any token is taken.

        Args:
            token_id: The drawn token.
            row: Log probabilities, shape (vocabulary,), evaluated.

        Returns:
            Whether a canary should decide: it came so often in a row now that it looks wrong.

        Raises:
            EngineFaultError: It cannot; nothing of this step may be delivered.
        """
        host_row = np.asarray(row)
        check_token(token_id, host_row)
        self._repeats = self._repeats + 1 if token_id == self._newest_id else 1
        self._newest_id = token_id
        if self._repeats < REPEATS:
            return False
        check_repeated(token_id, host_row)
        return self._repeats == REPEATS and not self.request.is_probe

    def take(self, token_id: int, row: Any, finish: FinishReason | None, now_s: float) -> None:
        """Take one token of the generator that `check` has passed.

        Args:
            token_id: The drawn token; with `finish` "stop" it is a stop id and not output.
            row: Log probabilities, shape (vocabulary,), evaluated.
            finish: Set when this was the attempt's last token.
            now_s: Monotonic seconds.
        """
        if self._replay_left:
            self._replay_left -= 1
        elif finish != "stop":
            self._ids.append(token_id)
            if self.request.sampling.logprobs is not None:
                count = self.request.sampling.logprobs
                self._logprobs.append(_token_logprob(token_id, np.asarray(row), count))
        if finish is not None or (self._ids and self._flush_due(now_s)):
            self._flush(now_s, finish)

    def finish_delivered(self, now_s: float) -> None:
        """End an attempt whose earlier attempts delivered every token but not the finish."""
        self._flush(now_s, "length")

    def sign_of_life(self, engine_steps: int, now_s: float) -> None:
        """Send what waits, or else a progress report, when nothing was sent for a while.

        Called after a step that the engine has finished, and therefore true.
        """
        if now_s - self._last_sent_s < SIGN_OF_LIFE_S:
            return
        if self._ids:
            self._flush(now_s, None)
        else:
            self._send(TokenChunk(**self._head(), progress=self._progress(engine_steps)), now_s)

    def fail(self, error: HeadraceError) -> None:
        """End the attempt with an error."""
        self._sink(error)

    def _flush_due(self, now_s: float) -> bool:
        return (
            not self._sent_anything
            or len(self._ids) >= self._settings.flush_tokens
            or now_s - self._last_sent_s >= self._settings.flush_s
        )

    def _flush(self, now_s: float, finish: FinishReason | None) -> None:
        completion_tokens = self._position + len(self._ids)
        usage = Usage(
            prompt_tokens=len(self.request.prompt_ids), completion_tokens=completion_tokens
        )
        chunk = TokenChunk(
            **self._head(),
            ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            finish_reason=finish,
            usage=None if finish is None else usage,
        )
        self._position = completion_tokens
        self._ids.clear()
        self._logprobs.clear()
        self._sent_anything = True
        self._send(chunk, now_s)

    def _send(self, chunk: TokenChunk, now_s: float) -> None:
        self._last_sent_s = now_s
        self._sink(chunk)

    def _head(self) -> dict[str, Any]:
        return {
            "request_id": self.request.request_id,
            "attempt": self.request.attempt,
            "position": self._position,
        }

    def _progress(self, engine_steps: int) -> Progress:
        return Progress(
            engine_steps=engine_steps,
            prefill_done_tokens=self.prefill_done_tokens,
            prefill_total_tokens=self.prefill_total_tokens,
        )


def _token_logprob(token_id: int, row: NDArray[np.float32], count: int) -> TokenLogprob:
    top: tuple[tuple[int, float], ...] = ()
    if count:
        best = np.argpartition(row, -count)[-count:]
        best = best[np.argsort(-row[best], kind="stable")]
        top = tuple((int(token), float(row[token])) for token in best)
    return TokenLogprob(token_id=token_id, logprob=float(row[token_id]), top=top)
