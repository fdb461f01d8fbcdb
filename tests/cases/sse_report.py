"""What a strict reader makes of one event stream."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call, put together; `arguments` is the JSON text as it was sent."""

    name: str | None
    arguments: str
    call_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """The content of a stream, and where it breaks the rules.

    Attributes:
        text: Content of choice 0 (or of the text blocks), joined.
        reasoning: Its reasoning, joined.
        finish: finish_reason of choice 0.
        stop_reason: The Anthropic API's word for it.
        tools: In the order of their indices.
        usage: The last usage seen.
        usage_chunks: Chunks that carried one.
        n_choices: Highest choice index plus one.
        logprobs: Log probabilities seen, over all choices.
        error: The last error event's error object.
        problems: Breaches of the rules, each once.
        soft: Breaches that most clients forgive.
    """

    text: str
    reasoning: str
    finish: str | None
    stop_reason: str | None
    tools: tuple[ToolCall, ...]
    usage: Mapping[str, Any] | None
    usage_chunks: int
    n_choices: int
    logprobs: int
    error: object
    problems: tuple[str, ...]
    soft: tuple[str, ...]


def is_json(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
