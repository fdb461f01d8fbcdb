"""What a chat or completion request may hold, and what is said about one that may not."""

import json
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from headrace_replicas.contract.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedParameterError,
)
from headrace_serve.http.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from headrace_serve.http.fields import RESERVED_TEMPLATE_NAMES
from headrace_serve.http.raw_body import BodyLimits

LIMITS = BodyLimits(max_body_bytes=1_000_000)
MESSAGES = [{"role": "user", "content": "hi"}]
Parse = Callable[[bytes, BodyLimits], ChatBody | CompletionBody]
PARSERS: tuple[Parse, ...] = (parse_chat, parse_completion)


def chat(**fields: object) -> ChatBody:
    """Parse a chat request with these fields."""
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), LIMITS)


def completion(**fields: object) -> CompletionBody:
    """Parse a completion request with these fields."""
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), LIMITS)


def refused(field: str, value: object) -> InvalidRequestError:
    """The error that a chat request gets for one field."""
    with pytest.raises(InvalidRequestError) as caught:
        chat(**{field: value})
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", 5, "model"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", {"role": "user"}, "messages"),
        ("messages", [MESSAGES[0], 5], "messages[1]"),
        ("messages", None, "messages"),
        ("temperature", "hot", "temperature"),
        ("temperature", "1", "temperature"),
        ("temperature", True, "temperature"),
        ("temperature", -1, "temperature"),
        ("temperature", 2.01, "temperature"),
        ("temperature", 10**400, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 7, "top_p"),
        ("top_k", -2, "top_k"),
        ("top_k", 1.0, "top_k"),
        ("min_p", 1.1, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-30, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", "x", "frequency_penalty"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", 1.0, "max_tokens"),
        ("max_tokens", "10", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", 10**12, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("seed", 2**63, "seed"),
        ("seed", -(2**63) - 1, "seed"),
        ("seed", 10**4_000, "seed"),
        ("seed", "x", "seed"),
        ("seed", 1.5, "seed"),
        ("stop", 5, "stop"),
        ("stop", "", "stop"),
        ("stop", [1], "stop[0]"),
        ("stop", ["a", ""], "stop[1]"),
        ("stop", list("abcde"), "stop"),
        ("stop", {"a": 1}, "stop"),
        ("stream", "yes", "stream"),
        ("stream", 1, "stream"),
        ("stream_options", True, "stream_options"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("stream_options", {"include_headrace": True}, "stream_options.include_headrace"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("logit_bias", [1], "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("logit_bias", {"5": True}, "logit_bias.5"),
        ("logit_bias", {"5": None}, "logit_bias.5"),
        ("logit_bias", {"05": 1}, "logit_bias.05"),
        ("logit_bias", {"-1": 1}, "logit_bias.-1"),
        ("logit_bias", {"٣": 1}, "logit_bias.٣"),
        ("logit_bias", {"9999999999": 1}, "logit_bias.9999999999"),
        ("logit_bias", {str(n): 1 for n in range(1025)}, "logit_bias"),
        ("chat_template_kwargs", [1], "chat_template_kwargs"),
        ("chat_template_kwargs", {"tokenize": 1}, "chat_template_kwargs.tokenize"),
        ("reasoning_effort", "lots", "reasoning_effort"),
    ],
)
def test_a_wrong_field_is_refused_and_named(field: str, value: object, param: str) -> None:
    error = refused(field, value)
    assert (error.param, error.code, error.http_status) == (param, "invalid_value", 400)
    assert error.message.startswith(param)


@pytest.mark.parametrize(
    "field",
    [
        *ChatBody.model_fields.keys() - {"messages"},
        *("tools", "tool_choice", "response_format", "n", "user", "metadata", "prediction"),
        *("parallel_tool_calls", "web_search_options", "audio", "modalities", "best_of", "echo"),
    ],
)
def test_null_is_the_same_as_leaving_a_field_out(field: str) -> None:
    untouched = parse_chat(json.dumps({"messages": MESSAGES}).encode(), LIMITS)
    nulled = parse_chat(json.dumps({"messages": MESSAGES, field: None}).encode(), LIMITS)
    assert nulled == untouched


def test_null_inside_stream_options_is_the_default() -> None:
    assert chat(stream_options={"include_usage": None}).stream_options.include_usage is False


def test_harmless_unknown_fields_of_any_type_are_ignored() -> None:
    body = chat(
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        user=5,
        parallel_tool_calls=True,
        modalities=["text"],
        verbosity="low",
        prompt_cache_key="k",
        num_ctx=8192,
        x_vendor={"y": [1]},
    )
    assert body == chat()


def test_integers_are_taken_where_numbers_are_meant() -> None:
    body = chat(temperature=0, top_p=1, min_p=0, presence_penalty=-2, repetition_penalty=2)
    assert (body.temperature, body.presence_penalty) == (0.0, -2.0)


@pytest.mark.parametrize("seed", [-3, 0, 2**63 - 1, -(2**63)])
def test_every_signed_64_bit_seed_is_taken(seed: int) -> None:
    assert chat(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 50}, 50),
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 50}, 7),
        ({"max_completion_tokens": None, "max_tokens": 50}, 50),
    ],
)
def test_max_completion_tokens_wins_and_no_limit_stays_none(
    fields: dict[str, object], limit: int | None
) -> None:
    assert chat(**fields).limit_tokens == limit


@pytest.mark.parametrize(
    ("value", "stops"),
    [("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ()), (list("abcd"), tuple("abcd"))],
)
def test_stop_is_one_string_or_up_to_four(value: object, stops: tuple[str, ...]) -> None:
    assert chat(stop=value).stop == stops


def test_logit_bias_becomes_pairs_in_the_order_of_their_ids() -> None:
    assert chat(logit_bias={"12": 1, "5": -100}).logit_bias == ((5, -100.0), (12, 1.0))


def test_include_headrace_is_taken_with_a_stream() -> None:
    body = chat(stream=True, stream_options={"include_headrace": True, "include_usage": True})
    assert body.stream_options.include_headrace
    assert body.stream_options.include_usage


def test_include_usage_without_a_stream_is_harmless() -> None:
    assert not chat(stream_options={"include_usage": True}).stream


def test_template_variables_hold_the_effort_unless_the_client_set_it_there() -> None:
    assert chat(reasoning_effort="low").template_variables == {"reasoning_effort": "low"}
    kwargs = {"reasoning_effort": "high", "enable_thinking": False}
    body = chat(reasoning_effort="low", chat_template_kwargs=kwargs)
    assert body.template_variables == kwargs


@pytest.mark.parametrize("name", sorted(RESERVED_TEMPLATE_NAMES))
def test_template_variables_cannot_replace_arguments_of_the_rendering_call(name: str) -> None:
    error = refused("chat_template_kwargs", {"fine": 1, name: 1})
    assert error.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("value", "prompt"),
    [("x", "x"), (["x"], "x"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([0], (0,))],
)
def test_a_prompt_is_one_text_or_one_list_of_ids(value: object, prompt: object) -> None:
    assert completion(prompt=value).prompt == prompt


@pytest.mark.parametrize("value", [["x", "y"], [[1], [2]], ["x", 1]])
def test_several_prompts_are_unsupported_with_a_remedy(value: object) -> None:
    with pytest.raises(UnsupportedParameterError, match="one request for each") as caught:
        completion(prompt=value)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (5, "prompt"),
        ([-1], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([[1, None]], "prompt[0][1]"),
        ([2**31], "prompt[0]"),
        (None, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused_and_its_place_named(value: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=value)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(("value", "taken"), [(0, 0), (5, 5), (None, None)])
def test_completions_take_logprobs_as_a_number(value: object, taken: int | None) -> None:
    assert completion(logprobs=value).logprobs == taken


@pytest.mark.parametrize("value", [True, 6, -1, "2"])
def test_completions_refuse_other_logprobs(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(logprobs=value)
    assert caught.value.param == "logprobs"


def test_chat_logprobs_work_with_and_without_alternatives() -> None:
    assert chat(logprobs=True).top_logprobs is None
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    with pytest.raises(InvalidRequestError, match="top_logprobs must be less than or equal to 20"):
        chat(logprobs=True, top_logprobs=99)


@pytest.mark.parametrize("parse", PARSERS)
def test_a_body_over_the_limit_is_too_large(parse: Parse) -> None:
    with pytest.raises(RequestTooLargeError):
        parse(b'{"a":1}', BodyLimits(max_body_bytes=3))


def test_many_wrong_messages_cost_one_complaint() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [5] * 10_000})
    assert caught.value.error_count() == 1


def test_an_error_never_repeats_a_long_value() -> None:
    error = refused("temperature", "secret" * 1_000)
    assert "secret" not in error.message
    assert len(error.message) < 200
