"""The conversations that the model is trained on: skills, tools, long prompts, memory, stories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tools.demo_model.generator.conversation import Dialog, opening, turns
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.long_prompts import items, needle
from tools.demo_model.generator.memory import memory
from tools.demo_model.generator.skills.catalogue import QUICK, SKILLS, WEIGHTS, Skill
from tools.demo_model.generator.stories import story, summarise_story
from tools.demo_model.generator.tool_calls import tools


def mixture(draw: Draw) -> Dialog:
    """One to six exchanges of any single skills."""
    count = draw.rng.choice([1, 1, 2, 3, 4, 5, 6])
    names = draw.rng.choices(list(SKILLS), list(WEIGHTS.values()), k=count)
    messages = opening(draw)
    contains: tuple[str, ...] = ()
    for name in names:
        exchange = SKILLS[name](draw)
        messages += turns(exchange)
        contains = exchange.contains
    return Dialog(names[-1], messages, None, contains)


def single(draw: Draw, name: str, skill: Skill) -> Dialog:
    """One exchange and nothing around it."""
    exchange = skill(draw)
    return Dialog(name, turns(exchange), None, exchange.contains)


def introduced(draw: Draw, name: str, skill: Skill) -> Dialog:
    """One exchange, now and then after a system message or another short exchange."""
    messages = opening(draw)
    if draw.chance(0.15):
        messages += turns(draw.pick(QUICK)(draw))
    last = single(draw, name, skill)
    return Dialog(name, messages + last.messages, None, last.contains)


_KINDS: Final[tuple[tuple[float, Callable[[Draw], Dialog]], ...]] = (
    (0.56, mixture),
    (0.17, tools),
    (0.055, needle),
    (0.035, items),
    (0.055, memory),
    (0.095, lambda draw: introduced(draw, "story", story)),
    (0.03, lambda draw: introduced(draw, "summary", summarise_story)),
)


def dialog(draw: Draw) -> Dialog:
    """One conversation for training."""
    _, make = draw.rng.choices(_KINDS, [share for share, _ in _KINDS])[0]
    return make(draw)
