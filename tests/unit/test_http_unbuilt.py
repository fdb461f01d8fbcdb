"""Fields that would change the answer and are not built are refused, never dropped silently."""

import json

import pytest

from headrace_replicas.contract.errors import InvalidRequestError, UnsupportedParameterError
from headrace_serve.http.bodies import parse_chat, parse_completion
from headrace_serve.http.raw_body import BodyLimits
from headrace_serve.http.unbuilt import CHAT_RULES, COMPLETION_RULES, refuse_unbuilt

LIMITS = BodyLimits(max_body_bytes=10_000)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def send_chat(fields: dict[str, object]) -> None:
    """Parse a chat request with these fields."""
    parse_chat(json.dumps({**CHAT, **fields}).encode(), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"best_of": 1},
        {"echo": False},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"functions": [TOOL], "function_call": "none"},
        {"modalities": ["text"]},
        {"ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "length_penalty": 1.0},
    ],
)
def test_a_neutral_value_passes(fields: dict[str, object]) -> None:
    send_chat(fields)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 3}),
        ("best_of", {"best_of": 2}),
        ("echo", {"echo": True}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("tools", {"tools": [TOOL]}),
        ("tools", {"tools": [TOOL], "tool_choice": "auto"}),
        ("tools", {"tools": [TOOL], "tool_choice": None}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "nope"}}}),
        ("functions", {"functions": [TOOL]}),
        ("functions", {"functions": [TOOL], "tool_choice": "none"}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("audio", {"audio": {"voice": "a"}}),
        ("prediction", {"prediction": {"type": "content", "content": "x"}}),
        ("web_search_options", {"web_search_options": {}}),
        ("thinking_budget", {"thinking_budget": 100}),
        ("enable_thinking", {"enable_thinking": False}),
        ("chat_template", {"chat_template": "{{ x }}"}),
        ("min_tokens", {"min_tokens": 5}),
        ("ignore_eos", {"ignore_eos": True}),
        ("skip_special_tokens", {"skip_special_tokens": 1}),
        ("adapters", {"adapters": "some/adapter"}),
    ],
)
def test_a_value_that_would_change_the_answer_is_unsupported(
    param: str, fields: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        send_chat(fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", "2"),
        ("n", True),
        ("n", 1.0),
        ("tool_choice", "bogus"),
        ("tool_choice", 5),
        ("function_call", "required"),
        ("tools", {"a": 1}),
        ("tools", [1]),
        ("response_format", "json"),
        ("response_format", {"type": "yaml"}),
        ("response_format", {}),
        ("modalities", "text"),
        ("audio", "loud"),
        ("echo", "yes"),
    ],
)
def test_a_value_outside_the_definition_is_invalid_rather_than_unsupported(
    param: str, value: object
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        send_chat({param: value})
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def test_tools_that_are_no_list_are_refused_even_when_switched_off() -> None:
    with pytest.raises(InvalidRequestError, match="tools must be a list of objects"):
        send_chat({"tools": "f", "tool_choice": "none"})


def test_completions_refuse_a_suffix_and_ignore_fields_of_chat() -> None:
    def send(fields: dict[str, object]) -> None:
        parse_completion(json.dumps({"prompt": "x", **fields}).encode(), LIMITS)

    send({"suffix": "", "tools": [TOOL]})
    with pytest.raises(UnsupportedParameterError, match="suffix"):
        send({"suffix": "end"})


@pytest.mark.parametrize("rules", [CHAT_RULES, COMPLETION_RULES])
def test_every_rule_says_what_its_field_takes_and_refuses_something(rules: object) -> None:
    assert isinstance(rules, dict)
    for name, rule in rules.items():
        assert rule.remedy, name
        with pytest.raises(InvalidRequestError) as caught:
            refuse_unbuilt({name: {"unheard": "of"}}, rules)
        assert caught.value.param == name
        assert "must be ;" not in caught.value.message
