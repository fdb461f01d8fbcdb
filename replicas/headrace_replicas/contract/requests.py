"""What travels between gateway and replica for one request: token ids, never text."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
ResumeMode = Literal["fast", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is drawn from the logits.

    Attributes:
        temperature: 0 takes the most likely token; above 0 the logits are divided by it.
        top_p: Nucleus: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: Keep that many most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one; 0 drops none.
        repetition_penalty: Divides the positive logits of tokens seen in prompt or output
            (and multiplies the negative ones); 1 changes nothing (Keskar et al. 2019).
        presence_penalty: Subtracted from the logit of a token that the output already holds.
        frequency_penalty: Subtracted once for each time that the output holds the token.
        logit_bias: (token id, value added to its logit) pairs.
        logprobs: Number of alternatives to report with each token; None reports nothing,
            0 only the chosen token's own log probability.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One choice of one client request, as one attempt on one replica.

    Attributes:
        request_id: The client request's id, the same over all attempts.
        attempt: 1 for the first replica tried, one more with every move.
        prompt_ids: The rendered prompt.
        output_ids: Tokens that earlier attempts already delivered. They stay output: penalties,
            sampling positions, limits and usage count on from them.
        seed: Together with `choice` and the absolute output position it keys each draw.
        choice: Index among the client request's `n` answers.
        constraint: A grammar for structured output; None leaves the output free.
        max_tokens: Limit on output tokens over all attempts, at least 1.
        stop_ids: Token ids that end the answer; they are not part of it.
        deadline_s: Wall-clock second after which nobody waits for the answer.
        priority: Higher goes first among waiting requests.
        resume_mode: `fast` replays `output_ids` by prefill, `exact` by decode steps.
        trace_context: W3C trace headers, as (name, value) pairs.
        fingerprint: The checkpoint's identity; a replica with another one refuses.
        is_probe: Whether nobody but the fleet itself asks; what it needs is not what clients need.
    """

    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    model: str
    fingerprint: str
    output_ids: tuple[int, ...] = ()
    choice: int = 0
    constraint: str | None = None
    deadline_s: float | None = None
    priority: int = 0
    resume_mode: ResumeMode = "fast"
    trace_context: tuple[tuple[str, str], ...] = ()
    is_probe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """A canary for one replica; the router sends it to `replica_id` and nowhere else.

    Attributes:
        exact: Whether the known answer must be computed, however busy the engine is.
    """

    replica_id: str
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of a token under the distribution that it was drawn from.

    Attributes:
        token_id: The drawn token.
        logprob: Its log probability after penalties and bias, before temperature.
        top: (token id, log probability) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one choice over all of its attempts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A sign of life without tokens: the engine moved on since the last one.

    Attributes:
        engine_steps: Steps that the engine has finished since it started.
        prefill_done_tokens: Prompt tokens of this request that are in the KV cache.
        prefill_total_tokens: Prompt tokens (and replayed output) to prefill in all.
    """

    engine_steps: int
    prefill_done_tokens: int
    prefill_total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """A few tokens of one attempt, in order.

    Attributes:
        position: Absolute output position of the first id; with no ids, of the next one.
        ids: Token ids, stop ids left out.
        logprobs: One entry per id when the request asked for them, else empty.
        finish_reason: Set on the attempt's last chunk only.
        usage: Set with `finish_reason`.
        progress: Set when the chunk reports work instead of, or beside, tokens.
    """

    request_id: str
    attempt: int
    position: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """What two replicas must share for a stream to move between them.

    Attributes:
        fingerprint: Digest over weights (sizes and headers), config, tokenizer and template.
        compute_dtype: What the engine computes in, as MLX names it (`float32`).
        engine: Engine class and its version.
    """

    fingerprint: str
    compute_dtype: str
    engine: str = field(default="mlx")
