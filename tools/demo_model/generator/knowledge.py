"""The tables of `knowledge.toml`: what the model is taught to know, and words to speak about."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TABLES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("knowledge.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Wordings of one question, its answer, and what any right answer contains."""

    ask: list[str]
    answer: str
    key: str


FRUITS: Final[list[str]] = _TABLES["fruits"]
ANIMALS: Final[list[str]] = _TABLES["animals"]
COLOUR_NAMES: Final[list[str]] = _TABLES["colour_names"]
OBJECTS: Final[list[str]] = _TABLES["objects"]
PLACES: Final[list[str]] = _TABLES["places"]
NAMES: Final[list[str]] = _TABLES["names"]
CITIES: Final[list[str]] = _TABLES["cities"]
DAYS: Final[list[str]] = _TABLES["days"]
MONTHS: Final[list[str]] = _TABLES["months"]
NUMBER_WORDS: Final[list[str]] = _TABLES["number_words"]
ACCENTED: Final[list[str]] = _TABLES["accented"]
EMOJI: Final[str] = _TABLES["emoji"]
CJK: Final[str] = _TABLES["cjk"]
CANNOT_ANSWER: Final[list[str]] = _TABLES["cannot_answer"]

CAPITALS: Final[dict[str, str]] = _TABLES["capitals"]
COLOURS: Final[dict[str, str]] = _TABLES["colours"]
SOUNDS: Final[dict[str, str]] = _TABLES["sounds"]
BABIES: Final[dict[str, str]] = _TABLES["babies"]
LEGS: Final[dict[str, str]] = _TABLES["legs"]
OPPOSITES: Final[dict[str, str]] = _TABLES["opposites"]
PLURALS: Final[dict[str, str]] = _TABLES["plurals"]
TRANSLATIONS: Final[dict[str, dict[str, str]]] = _TABLES["translations"]

SMALL_TALK: Final = [Question(**row) for row in _TABLES["small_talk"]]
QUESTIONS: Final = [Question(**row) for row in _TABLES["questions"]]
