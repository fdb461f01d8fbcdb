"""OpenAI chat messages, checked and brought to the one shape that chat templates read.

What comes out, for every message: `role` (system, developer, user, assistant or tool), `content`
as one string, and whatever else the client sent, except nulls. Unknown keys are kept: clients
replay `refusal`, `annotations` and the like, and templates look at what they know.

* A list of text parts is joined without a separator. A part of another kind is refused by name.
* Null or missing content is the empty string on an assistant or tool message, and refused on the
  others.
* The arguments of a tool call become an object when they are JSON text of one, because most
  templates walk over them or write them with `tojson`; other text is kept as it is. No text at
  all means no arguments.
* `reasoning_content`, `reasoning` and `thinking` are kept when they are text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_replicas.contract.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and the key that holds it."""

_MAY_BE_EMPTY = ("assistant", "tool")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def normalise(messages: object, *, parse_arguments: bool = True) -> list[dict[str, Any]]:
    """Checks a request's `messages` and brings them to one shape.

    Args:
        messages: The parsed JSON value of `messages`.
        parse_arguments: False leaves the arguments of tool calls as the text that came, for the
            templates that join them to other text.

    Raises:
        InvalidRequestError: Something is not as the API defines it; `param` is its path.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError("`messages` must be a list of messages.", "messages")
    if not messages:
        raise InvalidRequestError("`messages` is empty. Send at least one message.", "messages")
    return [
        _message(message, f"messages[{index}]", parse_arguments=parse_arguments)
        for index, message in enumerate(messages)
    ]


def _message(message: object, path: str, *, parse_arguments: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{path} must be an object with `role` and `content`.", path)
    role = message.get("role")
    if role not in ROLES:
        said = "has no role" if role is None else f"has the unknown role {role!r}"
        raise InvalidRequestError(f"{path} {said}. Use one of {', '.join(ROLES)}.", f"{path}.role")
    shaped = {str(key): value for key, value in message.items() if value is not None}
    for key in _REASONING_KEYS:
        if not isinstance(shaped.get(key, ""), str):
            del shaped[key]
    shaped["content"] = _content(message.get("content"), f"{path}.content", role)
    calls = _tool_calls(shaped.pop("tool_calls", ()), f"{path}.tool_calls", parse_arguments)
    if calls:
        shaped["tool_calls"] = calls
    return shaped


def _content(content: object, path: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role in _MAY_BE_EMPTY:
            return ""
        raise InvalidRequestError(f"{path} is missing. A {role} message needs text.", path)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(f"{path} must be a string or a list of text parts.", path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequestError(f"{path} must be an object with `type` and `text`.", path)
    kind = part["type"]
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{path} is of type {kind!r}, and only text is read here, also where the model's "
            "checkpoint holds more. Send text parts.",
            path,
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{path}.{_TEXT_PARTS[kind]} must be a string.", f"{path}.{_TEXT_PARTS[kind]}"
        )
    return text


def _tool_calls(calls: object, path: str, parse_arguments: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequestError(f"{path} must be a list of tool calls.", path)
    return [
        _tool_call(call, f"{path}[{index}]", parse_arguments) for index, call in enumerate(calls)
    ]


def _tool_call(call: object, path: str, parse_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError(f"{path} must be an object with a `function`.", path)
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{path}.function.name must be a string.", f"{path}.function.name"
        )
    shaped = _object if parse_arguments else _text
    return {**call, "function": {**function, "arguments": shaped(function.get("arguments"))}}


def _object(arguments: object) -> object:
    """Arguments as an object where they can be one."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments if arguments.strip() else {}
    return parsed if isinstance(parsed, dict) else arguments


def _text(arguments: object) -> str:
    """Arguments as the text that came."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
