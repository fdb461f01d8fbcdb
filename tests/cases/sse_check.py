"""Strict check of one event-stream body: OpenAI's chunks or Anthropic's message events.

`python -m tests.cases.sse_check < body` prints the report and exits with 1 on a problem.
"""

import dataclasses
import json
import sys
from typing import Any

from tests.cases.sse_chunks import ChunkReader
from tests.cases.sse_events import Event, events
from tests.cases.sse_messages import MessageReader
from tests.cases.sse_report import StreamReport


def check(body: bytes) -> StreamReport:
    """Reads a whole stream.

    Args:
        body: Everything after the headers, as it came over the wire.

    Returns:
        Its content and its faults; a stream without faults has no `problems`.
    """
    problems: list[str] = []
    chunks, messages = ChunkReader(problems), MessageReader(problems)
    done, error = False, None
    for event in events(body, problems):
        if done:
            problems.append("data after [DONE]")
        elif event.data == "[DONE]":
            done = True
        else:
            error = _take(event, chunks, messages, problems) or error
    _judge_end(chunks, messages, problems, done=done, failed=bool(error))
    return StreamReport(
        text=chunks.text + messages.text,
        reasoning=chunks.reasoning + messages.reasoning,
        finish=chunks.finish,
        stop_reason=messages.stop_reason,
        tools=chunks.tools + tuple(messages.tools),
        usage=chunks.usage if chunks.usage is not None else messages.usage,
        usage_chunks=chunks.usage_chunks,
        n_choices=chunks.n_choices,
        logprobs=chunks.logprobs,
        error=error,
        problems=tuple(dict.fromkeys(problems)),
        soft=tuple(sorted(chunks.soft)),
    )


def _take(
    event: Event, chunks: ChunkReader, messages: MessageReader, problems: list[str]
) -> object:
    """Hands one event to the reader it belongs to; returns the error of an error event."""
    payload = _payload(event, problems)
    try:
        if "choices" in payload:
            chunks.take(payload)
        elif "error" in payload:
            return payload["error"]
        elif "type" in payload:
            messages.take(event.name, payload)
        elif payload:
            problems.append("chunk has no choices list")
    except (AttributeError, KeyError, TypeError) as failure:
        # A part has another type than the API gives it, anywhere in the tree.
        problems.append(f"event is malformed ({failure!r}): {event.data[:60]!r}")
    return None


def _payload(event: Event, problems: list[str]) -> dict[str, Any]:
    """The event's JSON object; an empty one stands for an event that is already judged."""
    try:
        payload = json.loads(event.data)
    except ValueError:
        problems.append(f"data is not JSON: {event.data[:60]!r}")
        return {}
    if any("\ud800" <= char <= "\udfff" for char in json.dumps(payload, ensure_ascii=False)):
        problems.append("lone surrogate in a delta")
    if not isinstance(payload, dict) or not payload:
        problems.append(f"data is not a JSON object with members: {event.data[:60]!r}")
        return {}
    return payload


def _judge_end(
    chunks: ChunkReader,
    messages: MessageReader,
    problems: list[str],
    *,
    done: bool,
    failed: bool,
) -> None:
    chunks.judge_tools()
    if messages.seen:
        if not messages.stopped and not failed:
            problems.append("no message_stop")
    elif not failed:
        if not done:
            problems.append("no [DONE]")
        chunks.judge_end()
    elif done and chunks.finishes:
        problems.append("error event and a normal finish in one stream")


def main() -> None:
    """Checks standard input."""
    report = check(sys.stdin.buffer.read())
    text = json.dumps(dataclasses.asdict(report), ensure_ascii=False, indent=1)
    sys.stdout.write(text + "\n")
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
