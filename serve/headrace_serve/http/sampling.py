"""From a request body to the sampling parameters that travel to the engine."""

from headrace_replicas.contract.requests import SamplingParams
from headrace_serve.http.bodies import ChatBody, CompletionBody

GREEDY_BELOW = 1e-4
"""Temperatures below this are taken as 0: divided by less, float32 logits may overflow."""

SMALLEST_TOP_P = 1e-6
"""A smaller nucleus holds the same one token (the likeliest of a vocabulary of up to a million
is likelier than this), but 1e-50 would be 0 in float32, where nothing is left to draw from."""


def sampling(body: ChatBody | CompletionBody) -> SamplingParams:
    """Map a checked body to the contract's parameters; never fails on a parsed body."""
    return SamplingParams(
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_p=max(body.top_p, SMALLEST_TOP_P),
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        logprobs=_alternatives(body),
    )


def _alternatives(body: ChatBody | CompletionBody) -> int | None:
    """Chat switches log probabilities on and counts apart; the legacy field does both at once."""
    match body:
        case CompletionBody():
            return body.logprobs
        case ChatBody():
            return (body.top_logprobs or 0) if body.logprobs else None
