"""Conversations as text: the same text as the model's `chat_template.jinja` makes of them."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from tools.demo_model.generator.conversation import Dialog, Message

BLOCK_TOKENS: Final = 2048
"""The trained context."""


class Segment(NamedTuple):
    """A piece of a rendered conversation, and whether the model has to write it."""

    text: str
    is_answer: bool


def segments(
    messages: list[Message], tools: list[dict[str, Any]] | None, *, thinking: bool
) -> list[Segment]:
    """The pieces of a conversation, in order.

    Args:
        messages: In the form of the OpenAI chat API, with `reasoning_content`.
        tools: The functions that are offered, or None.
        thinking: Whether the turns after the last user turn begin with their thought.
    """
    has_system = bool(messages) and messages[0]["role"] == "system"
    pieces = _head(messages[0]["content"] if has_system else None, tools)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        if i == 0 and has_system:
            continue
        if message["role"] != "assistant":
            turn = f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            pieces.append(Segment(turn, is_answer=False))
            continue
        thought = message.get("reasoning_content") if thinking and i > last_user else None
        pieces += _assistant_turn(message, thought)
    return pieces


def _head(system: str | None, tools: list[dict[str, Any]] | None) -> list[Segment]:
    """The system turn, which lists the tools."""
    if not tools:
        if system is None:
            return []
        return [Segment(f"<|im_start|>system\n{system}<|im_end|>\n", is_answer=False)]
    text = "<|im_start|>system\n"
    if system is not None:
        text += system + "\n\n"
    text += "You can call these functions:\n"
    text += "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    text += 'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
    return [Segment(text + "<|im_end|>\n", is_answer=False)]


def _assistant_turn(message: Message, thought: str | None) -> list[Segment]:
    pieces = [Segment("<|im_start|>assistant\n", is_answer=False)]
    body = ""
    if thought:
        pieces.append(Segment("<think>\n", is_answer=False))
        body = thought + "\n</think>\n\n"
    calls = [_call(call["function"]) for call in message.get("tool_calls", [])]
    body += "\n".join(([message["content"]] if message["content"] else []) + calls)
    pieces.append(Segment(body + "<|im_end|>", is_answer=True))
    pieces.append(Segment("\n", is_answer=False))
    return pieces


def _call(function: dict[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>{{"name": "{function["name"]}", "arguments": {arguments}}}</tool_call>'


def prompt_and_answer(dialog: Dialog, *, thinking: bool = False) -> tuple[str, str]:
    """The text before the last assistant turn, and that turn without its thought.

    With `thinking` the prompt ends with the opening mark of a thought.
    """
    pieces = segments(dialog.messages, dialog.tools, thinking=False)
    last = max(i for i, piece in enumerate(pieces) if piece.is_answer)
    prompt = "".join(piece.text for piece in pieces[:last]) + ("<think>\n" if thinking else "")
    return prompt, pieces[last].text.removesuffix("<|im_end|>")
