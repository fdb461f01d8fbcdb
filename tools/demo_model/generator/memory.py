"""Conversations in which the user tells something and asks for it some turns later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Dialog, Exchange, opening, turns
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.skills.catalogue import QUICK
from tools.demo_model.generator.tool_values import place


@dataclass(frozen=True, slots=True)
class _Subject:
    """Something told: how the model replies, and what it answers when asked for it."""

    name: str
    reply: str
    answer: str


# How the user tells it and asks for it is in `phrasings.toml` under [memory].
_SUBJECTS: Final = (
    _Subject("name", "Nice to meet you, {name}!", "Your name is {name}."),
    _Subject("animal", "The {animal} is a fine animal.", "Your favourite animal is the {animal}."),
    _Subject("colour", "{Colour} is a nice colour.", "Your favourite colour is {colour}."),
    _Subject("city", "I hope that you like it in {city}.", "You live in {city}."),
    _Subject("food", "I see, you like {food}.", "You like {food}."),
    _Subject("number", "I will remember {number}.", "The number is {number}."),
    _Subject("word", "I will remember {word}.", "The word is {word}."),
    _Subject("age", "I see, you are {age} years old.", "You are {age} years old."),
)


def _things_to_tell(draw: Draw) -> dict[str, str]:
    name = draw.person() if draw.chance(0.8) else draw.pseudo().capitalize()
    animal, colour = draw.pick(knowledge.ANIMALS), draw.pick(knowledge.COLOUR_NAMES)
    return {
        "name": name,
        "animal": animal,
        "colour": colour,
        "Colour": colour.capitalize(),
        "city": place(draw),
        "food": draw.pick(knowledge.FRUITS),
        "number": str(draw.number()),
        "word": draw.any_word(),
        "age": str(draw.rng.randint(5, 90)),
    }


def memory(draw: Draw) -> Dialog:
    """One to four things told, other talk between and after, then questions about them."""
    rng = draw.rng
    things = _things_to_tell(draw)
    subjects = rng.sample(_SUBJECTS, rng.randint(1, 4))
    exchanges: list[Exchange] = []
    for subject in subjects:
        told = draw.phrase(f"memory.say_{subject.name}", **things)
        think = "The user tells me something. I keep it in mind."
        exchanges.append(Exchange(told, subject.reply.format(**things), think))
        if draw.chance(0.25):
            exchanges.append(draw.pick(QUICK)(draw))
    exchanges += [draw.pick(QUICK)(draw) for _ in range(rng.choice([0, 0, 1, 2]))]
    rng.shuffle(subjects)
    for subject in subjects[: rng.randint(1, len(subjects))]:
        ask = draw.phrase(f"memory.ask_{subject.name}")
        answer = subject.answer.format(**things)
        exchanges.append(Exchange(ask, answer, "The user told me this before."))
    exchanges = _with_questions_about_talk(draw, exchanges, things["name"])
    messages = opening(draw)
    for exchange in exchanges:
        messages += turns(exchange)
    return Dialog("memory", messages)


def _with_questions_about_talk(draw: Draw, exchanges: list[Exchange], name: str) -> list[Exchange]:
    """Now and then ask for the first message, or for the name before it is told."""
    if draw.chance(0.12):
        ask = draw.phrase("memory.ask_first")
        think = "I look at the start of the conversation."
        exchanges = [*exchanges, Exchange(ask, exchanges[0].user, think)]
    if not draw.chance(0.08):
        return exchanges
    answer = "I do not know your name yet. What is it?"
    early = Exchange(draw.phrase("memory.ask_early"), answer, "The user did not say it.")
    asks_later = any(x.user.startswith(("What is my name", "Do you know")) for x in exchanges)
    is_told = any(name in x.user for x in [early, *exchanges])
    return exchanges if asks_later and not is_told else [early, *exchanges]
