"""All single skills, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.skills.copying import case, echo, listing, spelling
from tools.demo_model.generator.skills.facts import define, facts
from tools.demo_model.generator.skills.numbers import arithmetic, comparing, counting
from tools.demo_model.generator.skills.order import sequences
from tools.demo_model.generator.skills.small_talk import identity, small_talk, unknown
from tools.demo_model.generator.skills.structured import code, json_task

Skill = Callable[[Draw], Exchange]

# The order is part of the generator (a draw is an index into it), and the evaluation gives each
# skill a seed by its place.
SKILLS: Final[dict[str, Skill]] = {
    "identity": identity,
    "smalltalk": small_talk,
    "counting": counting,
    "sequences": sequences,
    "arithmetic": arithmetic,
    "comparing": comparing,
    "echo": echo,
    "listing": listing,
    "case": case,
    "spelling": spelling,
    "facts": facts,
    "define": define,
    "json": json_task,
    "code": code,
    "unknown": unknown,
}

# How often a skill is drawn, relative to the others: the harder, the more often.
WEIGHTS: Final[dict[str, float]] = {
    "identity": 3.0,
    "smalltalk": 3.0,
    "counting": 6.0,
    "sequences": 4.0,
    "arithmetic": 12.0,
    "comparing": 7.0,
    "echo": 10.0,
    "listing": 9.0,
    "case": 5.0,
    "spelling": 7.0,
    "facts": 9.0,
    "define": 6.0,
    "json": 7.0,
    "code": 4.0,
    "unknown": 6.0,
}

# Short exchanges that stand between others. Facts stand twice: they are drawn twice as often.
QUICK: Final[tuple[Skill, ...]] = (
    identity,
    small_talk,
    facts,
    arithmetic,
    sequences,
    comparing,
    facts,
    listing,
    spelling,
    unknown,
)
