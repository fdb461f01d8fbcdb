"""The tokens that a choice has delivered, over all of its attempts.

Laws: every id is accepted once and in order, whatever attempt brings it; a delivered id never
changes; an older attempt says nothing; there is one finish, and nothing after it.
"""

from dataclasses import dataclass, replace

from headrace_replicas.contract.fleet import AttemptFailure
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a chunk adds to the answer.

    Attributes:
        ids: New ids only; empty when the chunk just ends the answer.
        logprobs: One entry for each of `ids`, or none at all.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    usage: Usage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A chunk that cannot belong to this answer; its attempt is fenced off and must be ended.

    Attributes:
        failure: `mismatch` when it contradicts delivered tokens, `faulted` when it breaks the
            protocol between gateway and replica.
        detail: What is wrong, for a person.
    """

    failure: AttemptFailure
    detail: str


class Journal:
    """The delivered ids of one choice. It only appends: a copy for each chunk would be quadratic.

    Attributes:
        attempt: Number of the attempt that owns the stream, 0 before the first.
        finish_reason: Why the answer ended, None while it goes on.
    """

    __slots__ = ("_ids", "_owned", "attempt", "finish_reason")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._owned = False
        self.attempt = 0
        self.finish_reason: FinishReason | None = None

    @property
    def output_ids(self) -> tuple[int, ...]:
        """A copy of the delivered ids."""
        return tuple(self._ids)

    @property
    def delivered(self) -> int:
        """Number of delivered ids."""
        return len(self._ids)

    @property
    def finished(self) -> bool:
        """Whether the answer is whole."""
        return self.finish_reason is not None

    def begin_attempt(self) -> int:
        """Give the stream to a new attempt, fence off the earlier ones, and return its number."""
        self.attempt += 1
        self._owned = True
        return self.attempt

    def request_for_attempt(self, base: GenerateRequest) -> GenerateRequest:
        """The request as the present attempt must send it, with what was delivered as output."""
        return replace(base, attempt=self.attempt, output_ids=self.output_ids)

    def record(self, chunk: TokenChunk) -> Accepted | Refused | None:
        """Take a chunk; None when it brings nothing new (late, duplicate, or only a sign of life).

        Returns:
            What to hand on to the client, or why the attempt that sent it must end.
        """
        if self.finished or not self._owned or chunk.attempt < self.attempt:
            return None
        refused = self._objection(chunk)
        if refused is not None:
            self._owned = False
            return refused
        fresh = slice(len(self._ids) - chunk.position, None)
        accepted = Accepted(
            ids=chunk.ids[fresh],
            logprobs=chunk.logprobs[fresh],
            finish_reason=chunk.finish_reason,
            usage=chunk.usage,
        )
        self._ids.extend(accepted.ids)
        self.finish_reason = chunk.finish_reason
        return accepted if accepted.ids or accepted.finish_reason is not None else None

    def _objection(self, chunk: TokenChunk) -> Refused | None:
        broken = self._broken_rule(chunk)
        if broken is not None:
            return Refused(failure="faulted", detail=f"{_name(chunk)} {broken}")
        contradiction = self._contradiction(chunk)
        if contradiction is not None:
            return Refused(failure="mismatch", detail=f"{_name(chunk)} {contradiction}")
        return None

    def _broken_rule(self, chunk: TokenChunk) -> str | None:
        held = len(self._ids)
        if chunk.attempt > self.attempt:
            return f"belongs to no attempt: the newest is {self.attempt}"
        if not 0 <= chunk.position <= held:
            return f"leaves a gap: {held} tokens were delivered before it"
        if chunk.logprobs and len(chunk.logprobs) != len(chunk.ids):
            return f"has {len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens"
        if (chunk.finish_reason is None) != (chunk.usage is None):
            return "must carry a finish reason and usage together, or neither"
        return None

    def _contradiction(self, chunk: TokenChunk) -> str | None:
        held = len(self._ids)
        end = chunk.position + len(chunk.ids)
        known = tuple(self._ids[chunk.position : end])
        for offset, (was, now) in enumerate(zip(known, chunk.ids, strict=False)):
            if was != now:
                at = chunk.position + offset
                return f"says {now} for token {at}, which was delivered as {was}"
        if chunk.finish_reason is not None and end < held:
            return f"ends the answer after {end} tokens, and {held} were delivered"
        return None


def _name(chunk: TokenChunk) -> str:
    return (
        f"chunk of request {chunk.request_id}, attempt {chunk.attempt}, position {chunk.position}"
    )
