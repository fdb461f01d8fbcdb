"""Streams and answers, good and bad: at least one for each rule of the tools that judge cases."""

import json
from typing import Any

from tests.cases.http_call import Answer

Chunk = dict[str, Any]


def chunk(delta: Chunk, finish: str | None = None, **more: Any) -> Chunk:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


def tool_delta(index: int | None, call_id: str | None, name: str | None, arguments: str) -> Chunk:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "function": function}]}


def wire(*events: Chunk | str, done: bool = True) -> bytes:
    """The events as a body, with event names where they have a type."""
    lines = []
    for event in [*events, *(["[DONE]"] if done else [])]:
        name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        data = event if isinstance(event, str) else json.dumps(event)
        lines.append(f"{name}data: {data}\n\n")
    return "".join(lines).encode()


ROLE = chunk({"role": "assistant", "content": ""})
STOP = chunk({}, "stop")
USAGE = {**chunk({}), "choices": [], "usage": {"completion_tokens": 3}}
CALL = tool_delta(0, "t1", "f", '{"a": ')
CALL_REST = tool_delta(0, None, None, "1}")
TOOL_STOP = chunk({}, "tool_calls")

MESSAGE_START = {"type": "message_start"}
TEXT_BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
TEXT_DELTA = {
    "type": "content_block_delta",
    "index": 0,
    "delta": {"type": "text_delta", "text": "hi"},
}
BLOCK_STOP = {"type": "content_block_stop", "index": 0}
TOOL_BLOCK = {
    "type": "content_block_start",
    "index": 0,
    "content_block": {"type": "tool_use", "id": "t1", "name": "f"},
}
MESSAGE_DELTA = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}
MESSAGE_STOP = {"type": "message_stop"}


def input_delta(part: str) -> Chunk:
    delta = {"type": "input_json_delta", "partial_json": part}
    return {"type": "content_block_delta", "index": 0, "delta": delta}


# What the strict check says, and a stream of which it says it.
BAD_STREAMS = {
    "not UTF-8": wire(ROLE, STOP).replace(b'""', b'"\xff"', 1),
    "does not end with a blank line": wire(ROLE, STOP)[:-1],
    "line is no SSE field": b"Traceback: boom\n\n" + wire(ROLE, STOP),
    "data after [DONE]": wire(ROLE, STOP) + wire(STOP, done=False),
    "data is not JSON": wire(ROLE, "{", STOP),
    "data is not a JSON object": wire(ROLE, "[1]", STOP),
    "lone surrogate": wire(ROLE, chunk({"content": "\ud83d"}), STOP),
    "chunk has no choices list": wire(ROLE, {"object": "x"}, STOP),
    "event is malformed": wire(ROLE, chunk({"content": 5}), STOP),
    "usage on a chunk whose choices": wire(ROLE, {**STOP, "usage": {}}),
    "chunk after its finish_reason": wire(ROLE, STOP, chunk({"content": "x"})),
    "first delta has no role": wire(chunk({"content": "x"}), STOP),
    "tool delta without index": wire(ROLE, chunk(tool_delta(None, "t", "f", "{}")), STOP),
    "lacks id or name": wire(ROLE, chunk(tool_delta(0, "t", None, "{}")), TOOL_STOP),
    "out of order": wire(ROLE, chunk(tool_delta(1, "t", "f", "{}")), TOOL_STOP),
    "id changes": wire(ROLE, chunk(CALL), chunk(tool_delta(0, "u", None, "1}")), TOOL_STOP),
    "arguments are not JSON": wire(ROLE, chunk(CALL), TOOL_STOP),
    "share an id": wire(ROLE, *(chunk(tool_delta(n, "t", "f", "{}")) for n in range(2)), TOOL_STOP),
    "tool calls but finish_reason": wire(ROLE, chunk(CALL), chunk(CALL_REST), STOP),
    "no [DONE]": wire(ROLE, STOP, done=False),
    "no finish_reason": wire(ROLE),
    "id/model/object vary": wire(ROLE, {**STOP, "id": "other"}),
    "error event and a normal finish": wire(ROLE, STOP, {"error": {"message": "boom"}}),
    "event name wrong": wire(MESSAGE_STOP, done=False).replace(b"event: m", b"event: wrong\nid: m"),
    "after message_stop": wire(MESSAGE_STOP, MESSAGE_DELTA, done=False),
    "no message_stop": wire(MESSAGE_START, done=False),
    "block index": wire({**TEXT_BLOCK, "index": 2}, MESSAGE_STOP, done=False),
    "a block that is not open": wire(TEXT_DELTA, MESSAGE_STOP, done=False),
    "without its text": wire(
        TEXT_BLOCK, {**TEXT_DELTA, "delta": {"type": "text_delta"}}, MESSAGE_STOP, done=False
    ),
    "empty text block": wire(TEXT_BLOCK, BLOCK_STOP, MESSAGE_STOP, done=False),
    "tool input is not JSON": wire(
        TOOL_BLOCK, input_delta("{"), BLOCK_STOP, MESSAGE_STOP, done=False
    ),
}


def whole(content: str = "hi", finish: str = "stop", n: int = 1, **more: Any) -> Answer:
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": finish, **more.pop("choice", {})}
    return plain(200, {"choices": [choice] * n, **more})


def plain(status: int, body: object, **more: Any) -> Answer:
    return Answer(status=status, body=json.dumps(body).encode(), headers_s=0.1, **more)


def stream(*events: Chunk | str) -> Answer:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return Answer(status=200, body=wire(*events), headers=headers, headers_s=0.1)


def refusal(code: str = "c") -> Answer:
    return plain(400, {"error": {"message": "m", "type": "t", "param": None, "code": code}})


TOOL_MESSAGE = {
    "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}]
}
BROKEN_TOOL = {"tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{"}}]}
ANTHROPIC = {"type": "message", "content": [{"type": "text", "text": "hi"}]}
ANTHROPIC_ERROR = {"type": "error", "error": {"type": "t", "message": "m"}}
LOGPROBS: Chunk = {"logprobs": {"content": [{}, {}]}}
THREE = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}

# Expectation, an answer that meets it, an answer that does not.
JUDGED: list[tuple[Chunk, Answer, Answer]] = [
    ({"status": 200}, whole(), refusal()),
    ({"status": [400, 404]}, refusal(), whole()),
    ({"error_shape": "openai"}, refusal(), plain(400, {"detail": []})),
    ({"error_shape": "any"}, refusal(), plain(500, {"error": "text"})),
    ({"error_shape": "anthropic"}, plain(400, ANTHROPIC_ERROR), refusal()),
    ({"error_code": "c"}, refusal(), refusal("other")),
    ({"sse": True}, stream(ROLE, STOP), whole()),
    ({"sse": True}, stream(ROLE, ROLE, STOP), stream(ROLE)),
    ({"sse": True, "strict": True}, stream(ROLE, STOP), stream(ROLE, ROLE, STOP)),
    ({"usage_chunk": True}, stream(ROLE, STOP, USAGE), stream(ROLE, STOP)),
    ({"usage_chunk": False}, stream(ROLE, STOP), stream(ROLE, STOP, USAGE)),
    ({"usage_chunk": True}, stream(ROLE, STOP, USAGE), stream(ROLE, STOP, USAGE, USAGE)),
    ({"text": "hi"}, whole(), whole("hi ")),
    ({"text_contains": ["h"]}, whole(), whole("x")),
    ({"text_not_contains": ["x"]}, whole(), whole("x")),
    ({"no_fffd": True}, whole(), whole("\ufffd")),
    ({"reasoning_contains": "r"}, whole(message={"reasoning_content": "r"}), whole()),
    ({"finish_reason": ["length", None]}, refusal(), whole()),
    ({"finish_reason": "stop"}, stream(ROLE, STOP), whole(finish="length")),
    ({"stop_reason": "end_turn"}, plain(200, ANTHROPIC | {"stop_reason": "end_turn"}), whole()),
    ({"n_choices": 2}, whole(n=2), whole()),
    ({"n_choices_or_400": 2}, refusal(), whole()),
    ({"completion_tokens": 3}, whole(usage=THREE), whole()),
    ({"headers": {"content-type": "EVENT-stream"}}, stream(STOP), whole()),
    ({"max_seconds": 2}, whole(), plain(200, {}, total_s=3.0)),
    ({"max_header_seconds": 1}, whole(), Answer(status=200, headers_s=2.0)),
    ({"max_header_seconds": 1}, whole(), Answer()),
    ({"tool_args": [{"city": "Bern"}]}, whole(message=TOOL_MESSAGE), whole()),
    ({"tool_args": []}, whole(), whole(message=BROKEN_TOOL)),
    ({"not_plain_prose": True}, whole(finish="length"), whole()),
    ({"not_plain_prose": True}, refusal(), whole("{} and prose")),
    ({"json_content": True}, whole("{}"), whole()),
    ({"logprobs_len_matches": True}, whole(choice=LOGPROBS, usage=THREE), whole(usage=THREE)),
    ({"cached_at_least": 9}, whole(usage=THREE), whole(usage={"completion_tokens": 3})),
    ({"body_contains": "hi"}, whole(), whole("x")),
    ({"same_text_as": "first"}, whole(), whole("x")),
    ({"differs_from": "first"}, whole("x"), whole()),
    ({"same_usage_as": "first"}, whole(usage=THREE), whole(usage={"completion_tokens": 4})),
]
