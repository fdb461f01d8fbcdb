"""Long prompts: a fact hidden in a text, and numbered lines to sum up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import (
    Dialog,
    Exchange,
    Message,
    answered,
    filler,
    opening,
    said,
    turns,
)
from tools.demo_model.generator.draw import Draw


@dataclass(frozen=True, slots=True)
class _Fact:
    """A sentence to hide, the question for it and the answer."""

    sentence: str
    question: str
    answer: str


def needle(draw: Draw, low: int = 3, high: int = 110) -> Dialog:
    """A fact hidden among `low` to `high` sentences (up to about 1,800 tokens)."""
    rng = draw.rng
    count = int(low * (high / low) ** rng.random())
    lines = [filler(draw) for _ in range(count)]
    fact, lines = _hidden_fact(draw, lines)
    lines.insert(rng.randrange(len(lines) + 1), fact.sentence)
    text = draw.phrase("needle.separator").join(lines)
    messages = _asked(draw, text, fact.question)
    messages.append(answered(fact.answer, "I look for the place in the text that says it."))
    return Dialog("needle", messages)


def _code_number(draw: Draw) -> str:
    return str(draw.rng.randint(1000, 99999))


def _numbered_word(draw: Draw) -> str:
    return f"{draw.word()}-{draw.rng.randint(10, 99)}"


_Secret = Callable[[Draw], str]
_SECRETS: Final[tuple[_Secret, ...]] = (_code_number, Draw.pseudo, Draw.word, _numbered_word)
_OTHERS_SECRETS: Final[tuple[_Secret, ...]] = (Draw.pseudo, Draw.word, _code_number)


def _hidden_fact(draw: Draw, lines: list[str]) -> tuple[_Fact, list[str]]:
    """A fact, and the lines with sentences added that resemble it."""
    kind = draw.rng.randrange(5)
    secret = draw.pick(_SECRETS)(draw)
    who, what = draw.pick(knowledge.NAMES), draw.pick(knowledge.OBJECTS)
    if kind == 0:
        noun = draw.phrase("needle.secret_noun")
        sentence = f"The {noun} is {secret}."
        return _Fact(sentence, f"What is the {noun}?", sentence), lines
    if kind == 1:
        return _owned_secret(draw, lines, who, secret)
    if kind == 2:
        sentence = f"{who} hid the {what} in the {draw.pick(knowledge.PLACES)}."
        return _Fact(sentence, f"Where did {who} hide the {what}?", sentence), lines
    if kind == 3:
        number, city = draw.rng.randint(2, 99), draw.pick(knowledge.CITIES)
        sentence = f"Remember: the special number for {city} is {number}."
        answer = f"The special number for {city} is {number}."
        return _Fact(sentence, f"What is the special number for {city}?", answer), lines
    return _named_value(draw, lines)


def _owned_secret(draw: Draw, lines: list[str], who: str, secret: str) -> tuple[_Fact, list[str]]:
    """A secret of one person, among secrets of others."""
    noun = draw.phrase("needle.owned_noun")
    strangers = [name for name in knowledge.NAMES if name != who]
    for other in draw.rng.sample(strangers, min(4, len(lines))):
        position = draw.rng.randrange(len(lines) + 1)
        theirs = draw.pick(_OTHERS_SECRETS)(draw)
        lines.insert(position, f"The {noun} of {other} is {theirs}.")
    sentence = f"The {noun} of {who} is {secret}."
    return _Fact(sentence, f"What is the {noun} of {who}?", sentence), lines


def _named_value(draw: Draw, lines: list[str]) -> tuple[_Fact, list[str]]:
    """The value of one word, among values of other words."""
    name, value = draw.word(), draw.any_word()
    for _ in range(min(5, len(lines))):
        position = draw.rng.randrange(len(lines) + 1)
        lines.insert(position, f"The value of {draw.word()} is {draw.any_word()}.")
    lines = [line for line in lines if not line.startswith(f"The value of {name} ")]
    sentence = f"The value of {name} is {value}."
    return _Fact(sentence, f"What is the value of {name}?", sentence), lines


def _asked(draw: Draw, text: str, question: str) -> list[Message]:
    """Text and question in one turn, or the text in the system turn, or in an earlier turn."""
    intro = draw.phrase("needle.intro")
    ask = draw.phrase("needle.ask", question=question)
    r = draw.rng.random()
    if r < 0.75:
        is_text_first = draw.chance(0.85)
        return [said(f"{intro}{text}\n\n{ask}" if is_text_first else f"{ask}\n\n{text}")]
    if r < 0.88:
        return [{"role": "system", "content": text}, said(question)]
    return [
        said(f"{intro}{text}"),
        answered("I have read the text. What would you like to know?", "I read the text."),
        said(question),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Numbered lines that each say their number and a multiple of it.

    Attributes:
        noun: What a line is called.
        first: Number of the first line.
        step: The factor of the multiples.
        texts: The lines.
    """

    noun: str
    first: int
    step: int
    texts: list[str]

    @property
    def last(self) -> int:
        """Number of the last line."""
        return self.first + len(self.texts) - 1


def items(draw: Draw) -> Dialog:
    """Three to 85 lines with a counter and a multiple, then a request to sum up."""
    lines = _numbered_lines(draw)
    body = draw.phrase("items.separator").join(lines.texts)
    ask = draw.phrase("items.ask")
    lead_in = draw.phrase("items.lead_in")
    request = f"{lead_in}{body}{draw.phrase('items.before_ask')}{ask}"
    messages = opening(draw)
    messages += turns(Exchange(request, _summary(lines), _count_aloud(lines)))
    if draw.chance(0.35):
        messages += turns(_question_about(draw, lines))
    return Dialog("items", messages)


def _numbered_lines(draw: Draw) -> _Lines:
    rng = draw.rng
    is_classic = draw.chance(0.7)

    def step_and_count() -> tuple[int, int]:
        step = 7 if is_classic else rng.randint(2, 12)
        is_short = rng.random() < 0.5
        return step, int(3 * (85 / 3) ** rng.random()) if is_short else rng.randint(3, 85)

    step, count = draw.combination(step_and_count)
    first = 1 if draw.chance(0.75) else rng.choice([0, rng.randint(2, 60)])
    noun, middle, end = "Item", "the quick brown fox number", "jumps over lazy dog"
    if not is_classic:
        noun = draw.phrase("items.noun")
        if draw.chance(0.6):
            colour, animal = draw.pick(knowledge.COLOUR_NAMES), draw.pick(knowledge.ANIMALS)
            middle = f"the {colour} {animal} number"
            end = f"{draw.phrase('items.verb')} the {draw.pick(knowledge.ANIMALS)}"
    numbers = range(first, first + count)
    texts = [f"{noun} {i}: {middle} {i} {end} {i * step}." for i in numbers]
    return _Lines(noun=noun, first=first, step=step, texts=texts)


def _summary(lines: _Lines) -> str:
    nouns = "entries" if lines.noun == "Entry" else lines.noun.lower() + "s"
    first, last, step = lines.first, lines.last, lines.step
    return (
        f"There are {len(lines.texts)} {nouns}. The first is {first} with {first * step}, the "
        f"last is {last} with {last * step}. The rule is: the second number is {step} times the "
        "first."
    )


def _count_aloud(lines: _Lines) -> str:
    return (
        f"The list goes from {lines.first} to {lines.last}, so it has {len(lines.texts)} lines. "
        f"The step is {lines.step}."
    )


def _question_about(draw: Draw, lines: _Lines) -> Exchange:
    i = draw.rng.randint(lines.first, lines.last)
    noun, step = lines.noun.lower(), lines.step
    question, answer = draw.pick(
        [
            (f"What is the number of {noun} {i}?", f"The number of {noun} {i} is {i * step}."),
            (f"Repeat {noun} {i}.", lines.texts[i - lines.first]),
            ("How many are there?", f"There are {len(lines.texts)}."),
            ("What is the last number?", f"The last number is {lines.last * step}."),
        ]
    )
    return Exchange(question, answer, "I look at the list again.")
