"""Chat messages of the API, checked and brought to one shape."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import InvalidRequestError
from headrace_serve.text.messages import ROLES, normalise


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


def calling(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}


def arguments_of(message: dict[str, Any], *, parse: bool = True) -> object:
    (shaped,) = normalise([message], parse_arguments=parse)
    return shaped["tool_calls"][0]["function"]["arguments"]


def test_text_parts_are_joined() -> None:
    """A list of text parts becomes one string, with nothing between."""
    parts = [{"type": "text", "text": "please "}, {"type": "text", "text": "go"}]
    assert normalise([user(parts)]) == [user("please go")]
    assert normalise([user(["a", {"type": "input_text", "text": "b"}])]) == [user("ab")]
    assert normalise([user([])]) == [user("")]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    """A part that is no text is refused, with its kind and its place."""
    parts = [{"type": "text", "text": "what is it"}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(InvalidRequestError, match=kind) as caught:
        normalise([user("hi"), user(parts)])
    assert caught.value.param == "messages[1].content[1]"
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([user("x"), "y"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user({"type": "text"})], "messages[0].content"),
        ([user([5])], "messages[0].content[0]"),
        ([user([{"text": "x"}])], "messages[0].content[0]"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{"type": "text", "text": 1}])], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_malformed_messages_name_the_place(messages: object, param: str) -> None:
    """Whatever is not as the API defines it is an invalid request with the path of the fault."""
    with pytest.raises(InvalidRequestError) as caught:
        normalise(messages)
    assert caught.value.param == param


def test_null_content() -> None:
    """An assistant that only called tools, or a tool without output, has empty content."""
    tool = {"role": "tool", "tool_call_id": "c1", "content": None}
    shaped = normalise([calling("{}"), tool, {"role": "assistant"}])
    assert [message["content"] for message in shaped] == ["", "", ""]
    assert shaped[1]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("given_arguments", "objects", "texts"),
    [
        ('{"city":"Bern"}', {"city": "Bern"}, '{"city":"Bern"}'),
        ("", {}, "{}"),
        (None, {}, "{}"),
        ({"city": "Zürich"}, {"city": "Zürich"}, '{"city": "Zürich"}'),
        ("{broken", "{broken", "{broken"),
        ("[1]", "[1]", "[1]"),
        ("7" * 5000, "7" * 5000, "7" * 5000),
        ("[" * 100_000, "[" * 100_000, "[" * 100_000),
    ],
    ids=["object", "empty", "null", "given_object", "broken", "list", "huge_number", "deep"],
)
def test_arguments(given_arguments: object, objects: object, texts: str) -> None:
    """Arguments become an object if they are one, and stay the text that came if asked for."""
    assert arguments_of(calling(given_arguments)) == objects
    assert arguments_of(calling(given_arguments), parse=False) == texts


def test_history_passes_through() -> None:
    """What we returned comes back whole, unknown keys too; nulls and odd reasoning are dropped."""
    replayed = {
        "role": "assistant",
        "content": "42.",
        "reasoning_content": "six times seven",
        "reasoning": {"effort": "low"},
        "refusal": None,
        "annotations": [],
        "name": "bot",
        "tool_calls": [call('{"a": 1}')],
    }
    (shaped,) = normalise([replayed])
    assert shaped == {
        "role": "assistant",
        "content": "42.",
        "reasoning_content": "six times seven",
        "annotations": [],
        "name": "bot",
        "tool_calls": [call({"a": 1})],
    }
    assert replayed["refusal"] is None


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_means_no_key(calls: object) -> None:
    """Null or empty `tool_calls` is the same as none, for templates that test for the key."""
    shaped = normalise([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert shaped == [{"role": "assistant", "content": "x"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["role", "content", "tool_calls", "type", "text", "function", "name"])


@given(messages=JSON | st.lists(st.dictionaries(KEYS, JSON | st.sampled_from(ROLES)), max_size=4))
def test_any_json_is_shaped_or_refused(messages: object) -> None:
    """Whatever JSON comes, it is either brought to shape or an invalid request with a path."""
    try:
        shaped = normalise(messages)
    except InvalidRequestError as error:
        path = error.param or ""
    else:
        path = "messages"
        assert all(m["role"] in ROLES and isinstance(m["content"], str) for m in shaped)
        assert json.loads(json.dumps(shaped)) == shaped
    assert path.startswith("messages")
