"""The values that are drawn for the parameters of functions."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.draw import Draw

ValueDraw = Callable[[Draw], str | int]


def place(draw: Draw) -> str:
    """A city: usually a listed one, else another or an invented one."""
    if draw.chance(0.6):
        return draw.pick(knowledge.CITIES)
    return draw.phrase(
        "tools.place",
        pseudo=draw.pseudo().capitalize(),
        word=draw.word().capitalize(),
        capital=draw.pick(list(knowledge.CAPITALS.values())),
    )


def phrase(draw: Draw) -> str:
    """One to four words."""
    count = draw.rng.randint(1, 4)
    return " ".join(draw.word() if draw.chance(0.85) else draw.pseudo() for _ in range(count))


def phrase_or_word(draw: Draw) -> str:
    """A phrase, or one word or number of any kind."""
    return phrase(draw) if draw.chance(0.7) else draw.any_word()


def number(draw: Draw) -> int:
    """A number of up to five digits."""
    return draw.number()


def _path(draw: Draw) -> str:
    return draw.phrase("tools.directory") + draw.word() + draw.phrase("tools.extension")


def _expression(draw: Draw) -> str:
    return f"{draw.number()} {draw.phrase('tools.operator')} {draw.number()}"


def _mail_address(draw: Draw) -> str:
    return f"{draw.pick(knowledge.NAMES).lower()}@{draw.phrase('tools.mail_domain')}"


def clock_time(draw: Draw) -> str:
    """A time of day as HH:MM."""
    return f"{draw.rng.randint(0, 23):02d}:{draw.rng.randint(0, 59):02d}"


def _command(draw: Draw) -> str:
    return draw.phrase(
        "tools.command",
        path=_path(draw),
        word=draw.word(),
        path_again=_path(draw),
        word_again=draw.word(),
    )


def _full_name(draw: Draw) -> str:
    return f"{draw.pick(knowledge.NAMES)} {draw.pseudo().capitalize()}"


def _ticker(draw: Draw) -> str:
    return "".join(draw.pick(string.ascii_uppercase) for _ in range(draw.rng.randint(2, 4)))


# By the names that `tool_table.toml` uses.
VALUES: Final[dict[str, ValueDraw]] = {
    "place": place,
    "phrase": phrase,
    "number": number,
    "path": _path,
    "expression": _expression,
    "mail_address": _mail_address,
    "clock_time": clock_time,
    "command": _command,
    "full_name": _full_name,
    "ticker": _ticker,
    "sentence": lambda draw: draw.sentence(),
    "song": lambda draw: phrase(draw).title(),
    "day": lambda draw: draw.pick(knowledge.DAYS),
    "hour": lambda draw: draw.rng.randint(0, 23),
    "minutes": lambda draw: draw.rng.randint(1, 120),
    "result_limit": lambda draw: draw.rng.randint(1, 20),
    "unit": lambda draw: draw.phrase("tools.unit"),
    "language": lambda draw: draw.phrase("tools.language"),
    "currency_from": lambda draw: draw.phrase("tools.currency_from"),
    "currency_to": lambda draw: draw.phrase("tools.currency_to"),
    "room": lambda draw: draw.phrase("tools.room"),
}
