"""Copying text: repeating it, working on lists, changing case, spelling."""

from __future__ import annotations

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.skills.order import ordinal


def echo(draw: Draw) -> Exchange:
    """Repeating text to the letter: words, emoji, many scripts, several lines."""
    text = _text_to_repeat(draw).strip()
    verb = draw.phrase("echo.verb")
    if "\n" in text or draw.chance(0.7):
        on_same_line = "\n" not in text or draw.chance(0.3)
        question = f"{verb}: {text}" if on_same_line else f"{verb}:\n{text}"
    else:
        question = f'{verb}: "{text}"'
    if draw.chance(0.15):
        question = "Please " + question[0].lower() + question[1:]
    return Exchange(question, text, "I repeat the text exactly.")


def _text_to_repeat(draw: Draw) -> str:
    rng = draw.rng
    kind = rng.randrange(10)
    if kind < 5:
        return draw.sentence()
    if kind == 5:
        return " ".join(draw.any_word() for _ in range(rng.randint(1, 25)))
    if kind == 6:
        return ", ".join(draw.items(2, 12))
    if kind == 7:
        count = rng.randint(1, 12)
        return "".join(
            draw.pick(knowledge.EMOJI if draw.chance(0.7) else knowledge.CJK) for _ in range(count)
        )
    if kind == 8:
        return "\n".join(draw.sentence() for _ in range(rng.randint(2, 5)))
    return " ".join(draw.sentence() for _ in range(rng.randint(2, 6)))


def listing(draw: Draw) -> Exchange:
    """Working on a list: reversing, counting, one item, bullets, removing and adding."""
    items = draw.items(3, 8)
    kind = draw.rng.randrange(9)
    shown = ", ".join(items)
    if kind <= 1:
        answer = ", ".join(reversed(items))
        think = "I read the list from the end to the start."
        return Exchange(draw.phrase("listing.reverse", shown=shown), answer, think)
    if kind in (2, 3):
        end, answer = ("first", items[0]) if kind == 2 else ("last", items[-1])
        question = draw.phrase(f"listing.{end}", shown=shown)
        return Exchange(question, answer, f"I take the {end} item.")
    if kind in (4, 5):
        i = draw.rng.randrange(len(items))
        question = draw.phrase("listing.place", ordinal=ordinal(i + 1), number=i + 1, shown=shown)
        return Exchange(question, items[i], f"I count to item {i + 1}.")
    if kind == 6:
        answer = f"There are {len(items)} items."
        think = f"I count the items one by one up to {len(items)}."
        return Exchange(draw.phrase("listing.count", shown=shown), answer, think)
    if kind == 7:
        answer = "\n".join(f"- {item}" for item in items)
        question = draw.phrase("listing.bullets", shown=shown)
        return Exchange(question, answer, "I write one line for each item.")
    return _changed_list(draw, items, shown)


def _changed_list(draw: Draw, items: list[str], shown: str) -> Exchange:
    if draw.chance(0.5):
        i = draw.rng.randrange(len(items))
        rest = items[:i] + items[i + 1 :]
        question = f"Remove {items[i]} from this list: {shown}"
        return Exchange(question, ", ".join(rest), f"I write the list without {items[i]}.")
    new = draw.word()
    question = f"Add {new} to the end of this list: {shown}"
    return Exchange(question, ", ".join([*items, new]), "I copy the list and add the new item.")


def case(draw: Draw) -> Exchange:
    """Upper, lower and title case."""
    if draw.chance(0.6):
        text = " ".join(draw.word() for _ in range(draw.rng.randint(1, 6)))
    else:
        text = draw.pick(draw.material.sentences)
    kind = draw.rng.randrange(3)
    if kind == 0:
        shown = text if draw.chance(0.8) else text.title()
        think = "I change every letter to a capital letter."
        return Exchange(draw.phrase("case.upper", shown=shown), text.upper(), think)
    if kind == 1:
        shown = text.upper() if draw.chance(0.7) else text.title()
        think = "I change every letter to a small letter."
        return Exchange(draw.phrase("case.lower", shown=shown), text.lower(), think)
    shown = text.lower().replace("'", "")
    answer = " ".join(word[:1].upper() + word[1:] for word in shown.split())
    think = "I start each word with a capital letter."
    return Exchange(draw.phrase("case.title", shown=shown), answer, think)


def spelling(draw: Draw) -> Exchange:
    """Spelling a word, counting its letters, its first and last letter."""
    if draw.rng.random() < 0.9:
        word = draw.word()
    else:
        k = knowledge
        word = draw.pick(k.NAMES + k.CITIES + k.FRUITS + k.ANIMALS + k.OBJECTS)
    kind = draw.rng.randrange(7)
    letters = "-".join(word)
    think = f"I spell it: {letters}."
    if kind <= 2:
        question = draw.phrase("spelling.spell", word=word)
        return Exchange(question, letters, "I write the letters one by one.")
    if kind == 3:
        answer = f"{letters} has {len(word)} letters."
        return Exchange(draw.phrase("spelling.length", word=word), answer, think)
    if kind == 4:
        return Exchange(draw.phrase("spelling.first", word=word), word[0], think)
    if kind == 5:
        return Exchange(draw.phrase("spelling.last", word=word), word[-1], think)
    return Exchange(draw.phrase("spelling.join", letters=letters), word, "I join the letters.")
