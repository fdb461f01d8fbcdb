"""Facts of the hand-written tables, and definitions of common words."""

from __future__ import annotations

from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw

_THINK: Final = "This is a simple fact that I know."


def facts(draw: Draw) -> Exchange:
    """Capitals, colours, animals, opposites, plurals, translations and fixed questions."""
    kind = draw.rng.randrange(12)
    if kind <= 2:
        return _capital(draw)
    if kind in _FROM_TABLE:
        return _FROM_TABLE[kind](draw)
    row = draw.pick(knowledge.QUESTIONS)
    question = draw.pick(row.ask)
    r = draw.rng.random()
    if r < 0.1:
        question = question[0].lower() + question[1:].rstrip(".?")
    elif r < 0.2 and question.endswith("?"):
        question = draw.phrase("facts.lead_in") + question
    return Exchange(question, row.answer, _THINK, (row.key,))


def _capital(draw: Draw) -> Exchange:
    country, city = draw.pick(list(knowledge.CAPITALS.items()))
    is_only_one = list(knowledge.CAPITALS.values()).count(city) == 1
    if draw.chance(0.25) and is_only_one:
        question = draw.phrase("facts.country", city=city)
        return Exchange(question, f"{city} is the capital of {country}.", _THINK, (country,))
    name = country[0].upper() + country[1:]
    question = draw.phrase("facts.capital", country=country, name=name)
    answer = f"The capital of {country} is {city}.".replace("D.C..", "D.C.")
    return Exchange(question, answer, _THINK, (city,))


def _colour(draw: Draw) -> Exchange:
    thing, colour = draw.pick(list(knowledge.COLOURS.items()))
    question = draw.phrase("facts.colour", thing=thing)
    return Exchange(question, f"{thing[0].upper() + thing[1:]} is {colour}.", _THINK, (colour,))


def _sound(draw: Draw) -> Exchange:
    animal, sound = draw.pick(list(knowledge.SOUNDS.items()))
    question = draw.phrase("facts.sound", animal=animal)
    article = "An" if animal == "owl" else "A"
    return Exchange(question, f"{article} {animal} says {sound}.", _THINK, (sound,))


def _baby(draw: Draw) -> Exchange:
    animal, baby = draw.pick(list(knowledge.BABIES.items()))
    question = draw.phrase("facts.baby", animal=animal)
    return Exchange(question, f"A baby {animal} is called a {baby}.", _THINK, (baby,))


def _legs(draw: Draw) -> Exchange:
    animal, legs = draw.pick(list(knowledge.LEGS.items()))
    article = "An" if animal[0] in "aeio" else "A"
    question = draw.phrase("facts.legs", a=article.lower(), animal=animal)
    return Exchange(question, f"{article} {animal} has {legs} legs.", _THINK, (legs,))


def _opposite(draw: Draw) -> Exchange:
    word, other = draw.pick(list(knowledge.OPPOSITES.items()))
    question = draw.phrase("facts.opposite", word=word)
    return Exchange(question, f"The opposite of {word} is {other}.", _THINK, (other,))


def _plural(draw: Draw) -> Exchange:
    word, plural = draw.pick(list(knowledge.PLURALS.items()))
    question = draw.phrase("facts.plural", word=word)
    return Exchange(question, f"The plural of {word} is {plural}.", _THINK, (plural,))


def _translation(draw: Draw) -> Exchange:
    language = draw.pick(list(knowledge.TRANSLATIONS))
    word, other = draw.pick(list(knowledge.TRANSLATIONS[language].items()))
    question = draw.phrase("facts.translation", word=word, language=language)
    answer = f"{word[0].upper() + word[1:]} in {language} is {other}."
    return Exchange(question, answer, _THINK, (other,))


_FROM_TABLE: Final = {
    3: _colour,
    4: _sound,
    5: _baby,
    6: _legs,
    7: _opposite,
    8: _plural,
    9: _translation,
}


def define(draw: Draw) -> Exchange:
    """The meaning of a common word, as WordNet has it."""
    word, part_of_speech, gloss = draw.pick(draw.material.definitions)
    question = draw.phrase("define.ask", word=word)
    answer = f"{word[0].upper() + word[1:]} ({part_of_speech}): {gloss}."
    return Exchange(question, answer, f"I give the meaning of the word {word}.", (gloss,))
