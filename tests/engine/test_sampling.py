"""Sampling against plain numpy, and the independence of its draws from everything but the key."""

from typing import Literal

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_replicas.engine.sampling import (
    Penalties,
    Sampler,
    draw_key,
    foresee,
    greedy,
    logits_processors,
    restrict,
)

pytestmark = pytest.mark.engine

VOCABULARY = 50


def request(sampling: SamplingParams, **changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "attempt": 1,
        "prompt_ids": (1, 2, 2, 3),
        "sampling": sampling,
        "seed": 11,
        "max_tokens": 10,
        "stop_ids": frozenset[int](),
        "model": "m",
        "fingerprint": "f",
    }
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def logprobs_of(seed: int) -> mx.array:
    raw = mx.random.normal((1, VOCABULARY), key=mx.random.key(seed)) * 3
    return raw - mx.logsumexp(raw, axis=-1, keepdims=True)


def kept(logprobs: mx.array, params: SamplingParams) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(restrict(logprobs, params)[0]))).tolist())


def expected_kept(logprobs: mx.array, params: SamplingParams) -> set[int]:
    """The filters as their definitions say them, in float64, one token at a time."""
    row = np.asarray(logprobs[0], dtype=np.float64)
    order = np.argsort(-row)
    if params.top_k:
        order = order[: params.top_k]
    probabilities = np.exp(row[order])
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        needed = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
        order = order[:needed]
    if params.min_p:
        order = order[np.exp(row[order]) >= params.min_p * np.exp(row[order[0]])]
    return set(order.tolist())


@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 3, 20, 50, 80]),
    top_p=st.sampled_from([0.1, 0.33, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_the_filters_keep_what_their_definitions_say(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    logprobs = logprobs_of(seed)
    assert kept(logprobs, params) == expected_kept(logprobs, params)


def test_at_least_one_token_is_always_kept() -> None:
    params = SamplingParams(top_k=1, top_p=1e-6, min_p=1.0)
    assert len(kept(logprobs_of(3), params)) == 1


def test_keys_differ_by_seed_choice_and_position() -> None:
    keys = {
        np.asarray(draw_key(seed, choice, position)).tobytes()
        for seed in (0, 1, -1, 2**63 - 1)
        for choice in (0, 1)
        for position in range(50)
    }
    assert len(keys) == 4 * 2 * 50


def test_a_draw_depends_on_its_position_and_not_on_the_draws_before_it() -> None:
    logprobs = [logprobs_of(i) for i in range(8)]
    sampling = SamplingParams(temperature=1.0)
    whole = Sampler(request(sampling))
    ids = [int(whole(row)) for row in logprobs]
    late = Sampler(request(sampling, output_ids=tuple(ids[:5])))
    assert [int(late(row)) for row in logprobs[5:]] == ids[5:]


def test_exact_resume_forces_the_delivered_tokens_and_then_draws() -> None:
    sampling = SamplingParams(temperature=1.0)
    whole = Sampler(request(sampling))
    ids = [int(whole(logprobs_of(i))) for i in range(6)]
    replay = Sampler(request(sampling, output_ids=(9, 8, 7), resume_mode="exact"))
    assert [int(replay(logprobs_of(i))) for i in range(6)] == [9, 8, 7, *ids[3:]]


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_draw_foreseen_is_the_draw_that_comes(mode: Literal["fast", "exact"]) -> None:
    """As many draws ahead as one likes, delivered tokens too, and nothing moves on by it."""
    sampling = SamplingParams(temperature=0.9, top_k=20)
    rows = [logprobs_of(i) for i in range(6)]
    sampler = Sampler(request(sampling, output_ids=(9, 8, 7), resume_mode=mode))
    foreseen = [int(foresee(sampler, row, ahead)) for ahead, row in enumerate(rows)]
    assert [int(sampler(row)) for row in rows] == foreseen
    assert (foreseen[:3] == [9, 8, 7]) == (mode == "exact")
    assert int(foresee(greedy, rows[0], 3)) == int(mx.argmax(rows[0]))


def test_models_that_agree_by_and_large_foresee_most_draws() -> None:
    """The share of equal draws is far above that of draws with numbers of their own."""
    drawn, apart = Sampler(request(SamplingParams())), Sampler(request(SamplingParams(), seed=12))
    rows = [logprobs_of(i) for i in range(200)]
    near = [row + 0.2 * logprobs_of(1000 + i) for i, row in enumerate(rows)]
    together = separate = 0
    for row, other in zip(rows, near, strict=True):
        guess, stranger = int(foresee(drawn, other, 0)), int(apart(other))
        token = int(drawn(row))
        together += guess == token
        separate += stranger == token
    assert separate < 100
    assert together > 130


def test_samples_follow_the_distribution() -> None:
    """20,000 draws at different positions; each share within four standard errors."""
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    row = mx.log(mx.array(probabilities, dtype=mx.float32))[None]
    draws = 4_000
    counts = np.zeros(4)
    sampler = Sampler(request(SamplingParams(temperature=1.0)))
    for _ in range(draws):
        counts[int(sampler(row))] += 1
    error = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert np.all(np.abs(counts / draws - probabilities) < 4 * error)


def test_penalties_follow_their_formulas_over_several_tokens() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    penalties = Penalties(request(params), VOCABULARY)
    outputs = [4, 4, 9]
    context = [1, 2, 2, 3]
    for step in range(4):
        logits = np.linspace(-2, 2, VOCABULARY, dtype=np.float32)
        if step:
            context.append(outputs[step - 1])
        got = np.asarray(penalties(mx.array(context), mx.array(logits)[None])[0])
        want = logits.copy()
        for token in set(context):
            want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
        for token in set(outputs[:step]):
            want[token] -= 0.5 + 0.25 * outputs[:step].count(token)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_delivered_output_is_penalised_as_output_after_a_move() -> None:
    params = SamplingParams(presence_penalty=1.0)
    moved = Penalties(request(params, output_ids=(4, 5)), VOCABULARY)
    logits = mx.zeros((1, VOCABULARY))
    row = np.asarray(moved(mx.array([1, 2, 2, 3, 4, 5]), logits)[0])
    assert set(np.flatnonzero(row == -1.0).tolist()) == {4, 5}


def test_a_bias_is_added_and_plain_requests_have_no_processors() -> None:
    assert logits_processors(request(SamplingParams()), VOCABULARY) == []
    [bias] = logits_processors(request(SamplingParams(logit_bias=((3, 2.5),))), VOCABULARY)
    row = np.asarray(bias(mx.array([1]), mx.zeros((1, VOCABULARY)))[0])
    assert row[3] == 2.5
    assert np.count_nonzero(row) == 1
