"""The fixed orders: days, months and the alphabet."""

from __future__ import annotations

import string
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw

_THINK: Final = "I go through the order and find the right place."
_WHOLE: Final = {"day": "week", "month": "year", "letter": "alphabet"}
_ORDINALS: Final = (
    "zeroth",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)


def ordinal(n: int) -> str:
    """The ordinal of n, in words up to twelfth."""
    if n < len(_ORDINALS):
        return _ORDINALS[n]
    is_teen = 10 <= n % 100 <= 20
    return f"{n}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def sequences(draw: Draw) -> Exchange:
    """The whole order, a part of it, or one place in it."""
    rng = draw.rng
    kind = rng.randrange(7)
    order, noun = draw.pick(
        [
            (knowledge.DAYS, "day"),
            (knowledge.MONTHS, "month"),
            (list(string.ascii_uppercase), "letter"),
        ]
    )
    i = rng.randrange(len(order))
    if kind == 0:
        question = draw.phrase(f"sequences.whole_{noun}")
        if question.endswith("."):
            question = draw.polite(question)
        return Exchange(question, ", ".join(order), _THINK)
    if kind in (1, 2):
        question = draw.phrase("sequences.after", noun=noun, item=order[i])
        return Exchange(question, order[(i + 1) % len(order)], _THINK)
    if kind == 3:
        question = draw.phrase("sequences.before", noun=noun, item=order[i])
        return Exchange(question, order[i - 1], _THINK)
    if kind == 5:
        i = rng.randrange(len(order))
        place = ordinal(i + 1)
        question = draw.phrase("sequences.place", noun=noun, place=place, whole=_WHOLE[noun])
        return Exchange(question, order[i], _THINK)
    return _part(draw, order, noun, backwards=kind == 6)


def _part(draw: Draw, order: list[str], noun: str, *, backwards: bool) -> Exchange:
    """A part of at least three."""
    if backwards:
        last = draw.rng.randrange(len(order) - 1, 1, -1)
        first = draw.rng.randrange(0, last - 1)
        question = f"List the {noun}s from {order[last]} back to {order[first]}."
        part = order[first : last + 1][::-1]
    else:
        first = draw.rng.randrange(len(order) - 2)
        last = draw.rng.randrange(first + 2, len(order))
        question = draw.phrase("sequences.part", noun=noun, first=order[first], last=order[last])
        part = order[first : last + 1]
    return Exchange(draw.polite(question), ", ".join(part), _THINK)
