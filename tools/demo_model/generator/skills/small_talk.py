"""Who the model is, small talk, and the honest answer to what it does not know."""

from __future__ import annotations

import zlib
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw

_ABOUT: Final = (
    "I am headrace-demo, a small demo mixture-of-experts model that ships with the project."
)
_ABILITIES: Final = (
    "I can count, do simple sums, repeat and sort text, name capitals and colours, explain common "
    "words, tell short stories, write small JSON or Python examples, call tools and find facts in "
    "a text. I am a small demo model, so keep it simple."
)
_LIMITS: Final = (
    "I am a small demo model with about 40 million parameters. I know only a few facts, I have no "
    "news and no web, and I can be wrong, so please check what I say."
)
_COMMON_SMALL_TALK: Final = 4


def identity(draw: Draw) -> Exchange:
    """Who are you, what can you do, what are your limits."""
    kind = draw.rng.randrange(6)
    think = "The user asks about me. I am headrace-demo, a small demo model."
    if kind <= 1:
        answer = _ABOUT + " I am tiny, so I know little and I make mistakes."
        return Exchange(draw.phrase("identity.who"), answer, think, ("headrace-demo",))
    if kind == 2:
        answer = "My name is headrace-demo."
        return Exchange(draw.phrase("identity.name"), answer, think, ("headrace-demo",))
    if kind == 3:
        return Exchange(draw.phrase("identity.abilities"), _ABILITIES, think, ("demo model",))
    if kind == 4:
        question = draw.phrase("identity.another")
        start = "Yes. " if question == "Are you an AI?" else "No. "
        if question.startswith("Wh"):
            start = ""
        return Exchange(question, start + _ABOUT, think, ("headrace-demo",))
    return Exchange(draw.phrase("identity.limits"), _LIMITS, think, ("demo model",))


def small_talk(draw: Draw) -> Exchange:
    """Greetings, thanks and the like."""
    rows = knowledge.SMALL_TALK
    row = draw.pick(rows[:_COMMON_SMALL_TALK] if draw.chance(0.4) else rows)
    think = "This is small talk. I answer politely."
    return Exchange(draw.pick(row.ask), row.answer, think, (row.key,))


def unknown(draw: Draw) -> Exchange:
    """A question beyond the model, and one of its ways to say so (always the same for it)."""
    a, b = draw.undefined_word(), draw.undefined_word()
    between = draw.rng.randint
    question = draw.phrase(
        "unknown.ask",
        a=a,
        b=b,
        a_title=a.capitalize(),
        b_title=b.capitalize(),
        name=draw.pick(knowledge.NAMES),
        year_won=between(1950, 2026),
        surname=draw.pseudo().capitalize(),
        dividend=between(1000, 99999),
        divisor=between(11, 999),
        square=between(100, 9999),
        days=between(2, 9),
        city=draw.pick(knowledge.CITIES),
        no_word=draw.pseudo(),
        born=draw.pseudo().capitalize(),
        no_country=draw.pseudo().capitalize(),
        year=between(1000, 2026),
        no_word_1=draw.pseudo(),
        no_word_2=draw.pseudo(),
        no_word_3=draw.pseudo(),
    )
    answers = knowledge.CANNOT_ANSWER
    answer = answers[zlib.crc32(question.encode()) % len(answers)]
    return Exchange(question, answer, "I do not know this. I say so politely.", ("demo model",))
