"""One flat view of an answer, whether it came as a stream or whole, from either API."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.cases.http_call import Answer
from tests.cases.sse_check import check
from tests.cases.sse_report import ToolCall

_STREAM_STARTS = (b"data:", b"event:", b":")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a client would take out of an answer.

    Attributes:
        is_stream: The answer is an event stream, by its type or by its looks.
        json: The body of a whole answer, when it is a JSON object.
        usage_chunks: None for a whole answer.
        malformed: Why a whole answer could not be read, or None.
        problems: Findings of the strict stream check.
        soft: Findings of it that most clients forgive.
    """

    is_stream: bool = False
    json: Mapping[str, Any] | None = None
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    stop_reason: str | None = None
    tools: tuple[ToolCall, ...] = ()
    usage: Mapping[str, Any] | None = None
    usage_chunks: int | None = None
    n_choices: int = 0
    logprobs: int = 0
    error: object = None
    malformed: str | None = None
    problems: tuple[str, ...] = ()
    soft: tuple[str, ...] = ()

    @property
    def error_object(self) -> Mapping[str, Any]:
        """The `error` member of a whole answer; empty when there is none."""
        error = (self.json or {}).get("error")
        return error if isinstance(error, dict) else {}


def read(answer: Answer) -> View:
    """Reads an answer without judging it."""
    content_type = answer.headers.get("content-type", "")
    if "text/event-stream" in content_type or answer.body.lstrip().startswith(_STREAM_STARTS):
        return _stream(answer.body)
    try:
        body = json.loads(answer.body)
    except ValueError:
        return View()
    if not isinstance(body, dict):
        return View()
    try:
        return _whole(body)
    except (AttributeError, KeyError, TypeError, IndexError) as failure:
        # A part has another type than the API gives it, anywhere in the tree.
        return View(json=body, malformed=f"answer is malformed ({failure!r})")


def _stream(body: bytes) -> View:
    report = check(body)
    return View(
        is_stream=True,
        text=report.text,
        reasoning=report.reasoning,
        finish=report.finish,
        stop_reason=report.stop_reason,
        tools=report.tools,
        usage=report.usage,
        usage_chunks=report.usage_chunks,
        n_choices=report.n_choices,
        logprobs=report.logprobs,
        error=report.error,
        problems=report.problems,
        soft=report.soft,
    )


def _whole(body: dict[str, Any]) -> View:
    if "choices" in body:
        return _choices(body)
    if body.get("type") == "message":
        return _message(body)
    return View(json=body)


def _choices(body: dict[str, Any]) -> View:
    choices = body["choices"]
    choice = choices[0] if choices else {}
    message = choice.get("message") or {}
    logprobs = choice.get("logprobs") or {}
    return View(
        json=body,
        n_choices=len(choices),
        usage=body.get("usage"),
        text=(message.get("content") if message else choice.get("text")) or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        finish=choice.get("finish_reason"),
        tools=tuple(
            ToolCall(
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
                call_id=call.get("id"),
            )
            for call in message.get("tool_calls") or []
        ),
        logprobs=len(logprobs.get("content") or logprobs.get("tokens") or []),
    )


def _message(body: dict[str, Any]) -> View:
    blocks = body["content"]
    return View(
        json=body,
        stop_reason=body.get("stop_reason"),
        text="".join(block.get("text", "") for block in blocks),
        usage=body.get("usage"),
        tools=tuple(
            ToolCall(name=block["name"], arguments=json.dumps(block["input"]), call_id=block["id"])
            for block in blocks
            if block["type"] == "tool_use"
        ),
    )
