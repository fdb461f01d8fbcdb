"""The evaluation's conversations: held-out material, and seeds that training never uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from tools.demo_model.generator.conversation import Dialog, answered, said
from tools.demo_model.generator.dialogs import single
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.long_prompts import items, needle
from tools.demo_model.generator.material import Material
from tools.demo_model.generator.memory import memory
from tools.demo_model.generator.skills.catalogue import SKILLS
from tools.demo_model.generator.stories import story, summarise_story
from tools.demo_model.generator.tool_calls import tools

EVALUATION_SEED: Final = 990_001
_UNSEEN_WORDS_SEED: Final = 5

# The order is part of the evaluation: the n-th set has the seed EVALUATION_SEED + n.
_MAKERS: Final[dict[str, Callable[[Draw], Dialog]]] = {
    **{name: partial(single, name=name, skill=skill) for name, skill in SKILLS.items()},
    "story": partial(single, name="story", skill=story),
    "summary": partial(single, name="summary", skill=summarise_story),
    "needle": needle,
    "needle_long": partial(needle, low=80, high=110),
    "items": items,
    "memory": memory,
    "tools_call": tools,
    "tools_parallel": tools,
    "tools_result": tools,
    "tools_none": tools,
}


def evaluation_sets(
    material: Material, per_skill: int, seed: int = EVALUATION_SEED
) -> dict[str, list[Dialog]]:
    """That many conversations for each skill, in a fixed order of skills.

    A larger `per_skill` adds to the end of each set and leaves its beginning as it is.
    """
    sets: dict[str, list[Dialog]] = {}
    for index, (name, make) in enumerate(_MAKERS.items()):
        draw = Draw(seed + index, material, held=True)
        rows: list[Dialog] = []
        while len(rows) < per_skill:
            dialog = make(draw)
            # One maker gives all four kinds of tool conversations; others name their own skill.
            if make is not tools or dialog.skill == name:
                rows.append(dialog)
        sets[name] = rows
    return sets


def unseen_words(material: Material, words: Iterable[str], count: int) -> list[Dialog]:
    """Copying, spelling and case with words that are in no training list.

    Args:
        material: The training material; its words are left out.
        words: The words to use, of which those of 4 to 10 letters are taken.
        count: How many conversations.

    Raises:
        ValueError: None of the words is left.
    """
    known = {*material.words, *material.rare}
    usable = [w for w in words if w.isalpha() and w not in known and 4 <= len(w) <= 10]
    if not usable:
        raise ValueError("no word of 4 to 10 letters is unknown to training; give other words")
    draw = Draw(_UNSEEN_WORDS_SEED, material)
    return [_copying(draw, usable) for _ in range(count)]


def _copying(draw: Draw, words: list[str]) -> Dialog:
    a, b, c = (draw.pick(words) for _ in range(3))
    question, answer = draw.pick(
        [
            (f"Repeat: {a} {b} {c}", f"{a} {b} {c}"),
            (f"Reverse this list: {a}, {b}, {c}", f"{c}, {b}, {a}"),
            (f"Spell the word {a}.", "-".join(a)),
            (f"Convert to uppercase: {a} {b}", f"{a} {b}".upper()),
        ]
    )
    return Dialog("unseen_words", [said(question), answered(answer, "")])
