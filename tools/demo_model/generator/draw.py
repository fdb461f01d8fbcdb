"""The one source of randomness: numbers, words, sentences and wordings drawn from a seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.material import Material
from tools.demo_model.generator.phrasings import forms

T = TypeVar("T")
C = TypeVar("C", bound=tuple[object, ...])

HELD_OUT_ONE_IN: Final = 12
# With one combination in twelve held out, 400 misses in a row have a chance of 1e-15; a space
# too small to have a combination of the wanted side ends there instead of in an endless loop.
_MOST_TRIES: Final = 400

# First and last code point of scripts whose characters are drawn as text to copy. A range that
# stands twice is drawn twice as often.
_SCRIPTS: Final = (
    (0xC0, 0x17F),  # Latin with marks
    (0xC0, 0xFF),
    (0x391, 0x3C9),  # Greek
    (0x410, 0x44F),  # Cyrillic
    (0x3041, 0x3096),  # Hiragana
    (0x30A1, 0x30FA),  # Katakana
    (0x4E00, 0x9FA5),  # Han
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),  # Hangul
    (0x1F300, 0x1F64F),  # pictographs
    (0x2010, 0x2040),  # punctuation
    (0x5D0, 0x5EA),  # Hebrew
    (0x627, 0x64A),  # Arabic
    (0x905, 0x939),  # Devanagari
)
_LINE_BREAKS: Final = str.maketrans("", "", "\u2028\u2029")
_LIST_POOLS: Final = (
    knowledge.FRUITS,
    knowledge.ANIMALS,
    knowledge.COLOUR_NAMES,
    knowledge.NAMES,
    knowledge.CITIES,
)


class Draw:
    """A seeded source of random choices over the word material.

    Attributes:
        rng: The generator below all draws. `pick` and `rng.choice` consume it differently, so
            one cannot stand for the other without changing all that follows.
        material: Words and sentences to draw from.
        held: Whether combinations and rare words come from the part that training never sees.
    """

    def __init__(self, seed: int, material: Material, *, held: bool = False) -> None:
        self.rng = random.Random(seed)
        self.material = material
        self.held = held
        self._defined = material.defined

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, for one draw."""
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def combination(self, make: Callable[[], C]) -> C:
        """A combination of the trained or of the held-out part of its space, as `held` says.

        Which part a combination belongs to depends on the combination alone (checksum of its
        `repr`), so no evaluated sum, comparison or range was ever trained.
        """
        for _ in range(_MOST_TRIES):
            value = make()
            is_held_out = zlib.crc32(repr(value).encode()) % HELD_OUT_ONE_IN == 0
            if is_held_out == self.held:
                break
        return value

    def phrase(self, name: str, /, **slots: object) -> str:
        """One of the wordings of that name in `phrasings.toml`, with its slots filled."""
        return self.pick(forms(name)).format(**slots)

    def polite(self, text: str) -> str:
        """The request as it is, or put another way."""
        r = self.rng.random()
        if r < 0.55:
            return text
        low = text[0].lower() + text[1:]
        if r < 0.70:
            return f"Please {low}"
        if r < 0.94 and text.endswith("."):
            bare = low.rstrip(".")
            if r < 0.80:
                return f"Can you {bare}?"
            if r < 0.87:
                return f"Could you please {bare}?"
            return bare if self.chance(0.5) else f"{bare} please"
        return f"Now {low}"

    def word(self) -> str:
        """A common word, a rarer noun, a piece of a word, or a made-up word."""
        r = self.rng.random()
        if r < 0.55:
            return self.pick(self.material.words)
        if r < 0.85:
            return self.pick(self.material.held_rare if self.held else self.material.rare)
        if r < 0.93:
            return self.pick(self.material.alpha)
        return self.pseudo() if r < 0.96 else self.invent()

    def undefined_word(self) -> str:
        """A word that the model has no definition of."""
        for _ in range(20):
            word = self.word()
            if word not in self._defined:
                return word
        return "zorbification"

    def letters(self) -> str:
        """Characters of one of many scripts, so that every byte can be copied."""
        low, high = self.pick(_SCRIPTS)
        count = self.rng.randint(1, 5)
        text = "".join(chr(self.rng.randint(low, high)) for _ in range(count))
        text = text.translate(_LINE_BREAKS)
        if self.chance(0.3):
            text += self.pick(self.material.alpha)
        return text or "x"

    def invent(self) -> str:
        """A pronounceable word made of pieces of two real words."""
        a, b = self.pick(self.material.words), self.pick(self.material.rare)
        return (a[: self.rng.randint(2, 4)] + b[-self.rng.randint(2, 5) :])[:12]

    def person(self) -> str:
        """A first name: as often a listed one as an invented one."""
        return self.pick(knowledge.NAMES) if self.chance(0.5) else self.invent().capitalize()

    def pseudo(self) -> str:
        """A made-up word, so that copying cannot lean on known words."""
        rng = self.rng
        if rng.random() < 0.5:
            syllables = (
                self.pick("bcdfghjklmnpqrstvwxz") + self.pick("aeiou")
                for _ in range(rng.randint(1, 4))
            )
            return "".join(syllables) + self.pick(["", "n", "r", "s", "x"])
        characters = "abcdefghijklmnopqrstuvwxyz0123456789"
        return "".join(self.pick(characters) for _ in range(rng.randint(3, 9)))

    def number(self) -> int:
        """A number of one to five digits, short ones as often as long ones."""
        rng = self.rng
        return rng.choice(
            [
                rng.randint(0, 9),
                rng.randint(10, 99),
                rng.randint(100, 999),
                rng.randint(1000, 99999),
            ]
        )

    def any_word(self) -> str:
        """A word, name, number, token piece or string of characters of any kind."""
        if self.chance(0.25):
            return self.letters() if self.chance(0.4) else self.pick(self.material.pieces)
        r = self.rng.random()
        if r < 0.86:
            return self._plain_word(r)
        if r < 0.93:
            return str(self.number())
        return self.word().upper() if r < 0.97 else self.word().capitalize()

    def _plain_word(self, r: float) -> str:
        """What `any_word` draws for r below 0.86."""
        if r < 0.5:
            return self.word()
        if r < 0.62:
            return self.pseudo()
        if r < 0.70:
            return self.person()
        if r < 0.76:
            return self.pick(knowledge.ACCENTED)
        if r < 0.82:
            return self.pick(knowledge.EMOJI)
        return "".join(self.pick(knowledge.CJK) for _ in range(self.rng.randint(1, 5)))

    def sentence(self) -> str:
        """A line of text to copy: an example phrase, a simple sentence, or loose words."""
        r = self.rng.random()
        if r < 0.55:
            text = self.pick(self.material.sentences)
            return text[0].upper() + text[1:] + self.pick([".", ".", ".", "!", "?", ""])
        if r < 0.75:
            return self.simple_sentence()
        words = " ".join(self.any_word() for _ in range(self.rng.randint(3, 14)))
        return words + self.pick(["", ".", "!"])

    def simple_sentence(self) -> str:
        """A sentence about listed people, animals, places and things."""
        k, p = knowledge, self.pick
        # All six are drawn before one is taken: fewer draws would change every later one.
        return p(
            [
                f"{p(k.NAMES)} has {self.rng.randint(2, 40)} {p(k.COLOUR_NAMES)} {p(k.OBJECTS)}s.",
                f"The {p(k.COLOUR_NAMES)} {p(k.ANIMALS)} sleeps near the {p(k.PLACES)}.",
                f"{p(k.NAMES)} and {p(k.NAMES)} walk to the {p(k.PLACES)} with a {p(k.OBJECTS)}.",
                f"On {p(k.DAYS)} the {p(k.ANIMALS)} found a {p(k.OBJECTS)} in {p(k.CITIES)}.",
                f"In {p(k.MONTHS)} {p(k.NAMES)} buys a {p(k.FRUITS)} and a {p(k.OBJECTS)}.",
                f"The quick {p(k.COLOUR_NAMES)} {p(k.ANIMALS)} jumps over the lazy {p(k.ANIMALS)}.",
            ]
        )

    def items(self, low: int, high: int) -> list[str]:
        """A list of distinct things of one kind: `low` to `high` of them, or a few less."""
        rng = self.rng
        count = rng.randint(low, high)
        kind = rng.randrange(8)
        if kind < len(_LIST_POOLS):
            pool = _LIST_POOLS[kind]
            return rng.sample(pool, min(count, len(pool)))
        if kind == 5:
            return [str(x) for x in rng.sample(range(1, 100), count)]
        if kind == 6:
            return list(dict.fromkeys(self.pseudo() for _ in range(count)))
        if count > 2:
            return list(dict.fromkeys(self.any_word() for _ in range(count + 1)))[:count]
        return rng.sample(self.material.words, count)
