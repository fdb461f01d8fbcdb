"""From a body to the parameters that travel to the engine."""

import json

import pytest

from headrace_replicas.contract.requests import SamplingParams
from headrace_serve.http.bodies import parse_chat, parse_completion
from headrace_serve.http.raw_body import BodyLimits
from headrace_serve.http.sampling import sampling

LIMITS = BodyLimits(max_body_bytes=10_000)


def chat_sampling(**fields: object) -> SamplingParams:
    """The parameters of a chat request with these fields."""
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return sampling(parse_chat(json.dumps(body).encode(), LIMITS))


def completion_sampling(**fields: object) -> SamplingParams:
    """The parameters of a completion request with these fields."""
    return sampling(parse_completion(json.dumps({"prompt": "x", **fields}).encode(), LIMITS))


def test_a_request_that_says_nothing_gets_the_defaults_of_the_contract() -> None:
    assert chat_sampling() == SamplingParams()
    assert completion_sampling() == SamplingParams()


def test_every_field_reaches_the_engine() -> None:
    assert chat_sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": 2},
        logprobs=True,
        top_logprobs=4,
    ) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, 2.0),),
        logprobs=4,
    )


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_chat_reports_as_many_alternatives_as_asked(
    fields: dict[str, object], logprobs: int | None
) -> None:
    assert chat_sampling(**fields).logprobs == logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_completions_report_as_many_alternatives_as_asked(logprobs: int | None) -> None:
    assert completion_sampling(logprobs=logprobs).logprobs == logprobs


def test_minus_one_switches_top_k_off() -> None:
    assert chat_sampling(top_k=-1).top_k == 0


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-300, 9e-5])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert str(chat_sampling(temperature=temperature).temperature) == "0.0"


def test_a_nucleus_too_small_for_float32_keeps_the_likeliest_token() -> None:
    assert chat_sampling(top_p=1e-300).top_p == 1e-6
    assert chat_sampling(top_p=1e-5).top_p == 1e-5
