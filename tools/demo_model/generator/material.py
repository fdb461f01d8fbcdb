"""The words and sentences that the conversations are made of (`wordnet_extract.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXTRACT_FILE: Final = Path(__file__).with_name("wordnet_extract.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What `extract_wordnet` took from WordNet 3.0 and from the tokenizer.

    Attributes:
        words: Common words, the most frequent first.
        sentences: Example phrases of WordNet's glosses.
        definitions: Rows of (word, part of speech, gloss).
        rare: Rarer nouns that training may use.
        held_rare: Rarer nouns kept for the evaluation.
        pieces: The text of the tokenizer's tokens that are whole characters.
        alpha: Those pieces that are two or more ASCII letters.
    """

    words: list[str]
    sentences: list[str]
    definitions: list[list[str]]
    rare: list[str]
    held_rare: list[str]
    pieces: list[str]
    alpha: list[str]

    @property
    def defined(self) -> set[str]:
        """The words that have a definition."""
        return {row[0] for row in self.definitions}


def load_material(path: Path = EXTRACT_FILE) -> Material:
    """Read the file that `extract_wordnet` wrote.

    Raises:
        FileNotFoundError: There is no such file; `extract_wordnet` makes it.
        TypeError: The file lacks a list or has one too many.
    """
    return Material(**json.loads(path.read_text(encoding="utf-8")))
