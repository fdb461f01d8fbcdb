"""What the generator makes: single exchanges and whole conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.demo_model.generator.draw import Draw

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One user turn and the right answer to it.

    Attributes:
        user: What the user says.
        answer: What the assistant says.
        think: The line of thought before the answer, written when thinking is on.
        contains: What a right answer contains; empty when it must match exactly.
    """

    user: str
    answer: str
    think: str = "I can answer this directly."
    contains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialog:
    """A whole conversation; its last message is the assistant's.

    Attributes:
        skill: The skill of the last exchange.
        messages: In the form of the OpenAI chat API, with `reasoning_content`.
        tools: The functions that are offered, or None.
        contains: What a right last answer contains; empty when it must match exactly.
    """

    skill: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    contains: tuple[str, ...] = ()


def said(text: str) -> Message:
    """A turn of the user."""
    return {"role": "user", "content": text}


def answered(text: str, think: str) -> Message:
    """A turn of the assistant with its line of thought."""
    return {"role": "assistant", "content": text, "reasoning_content": think}


def turns(exchange: Exchange) -> list[Message]:
    """The two messages of an exchange."""
    return [said(exchange.user), answered(exchange.answer, exchange.think)]


def filler(draw: Draw) -> str:
    """A sentence that says nothing of use."""
    if draw.rng.random() < 0.5:
        return draw.simple_sentence()
    text = draw.pick(draw.material.sentences)
    return text[0].upper() + text[1:] + "."


def opening(draw: Draw) -> list[Message]:
    """A system message in two of five conversations, now and then a long one."""
    r = draw.rng.random()
    if r < 0.6:
        return []
    text = draw.phrase("system.prompt")
    if r >= 0.92:
        text += " " + " ".join(filler(draw) for _ in range(draw.rng.randint(1, 12)))
    return [{"role": "system", "content": text}]
