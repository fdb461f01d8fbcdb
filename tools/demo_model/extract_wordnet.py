r"""Take words, glosses and example phrases from the WordNet 3.0 database files.

Input is the folder with the plain files (`index.noun`, `data.noun`, `cntlist.rev` and so on), such
as `/usr/share/wordnet` of Debian's package `wordnet-base` (WordNet 3.0 licence, Princeton
University), and a `tokenizer.json`. Output is one JSON file with the lists that
`generator.material.Material` names.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from tools.demo_model.generator.material import EXTRACT_FILE
from tools.demo_model.paths import MODEL_DIR

# Parts of speech and their digit in the sense keys of `cntlist.rev`.
_PARTS_OF_SPEECH: Final = {"noun": "1", "verb": "2", "adj": "3"}
_SATELLITE_ADJECTIVE: Final = "5"
_HELD_OUT_NOUNS: Final = 500
_HELD_OUT_SEED: Final = 3
_SENTENCES: Final = 3500
_SENTENCE_STEP: Final = 6  # spreads the choice over the alphabet
_UNFIT: Final = re.compile(
    r"sex|slang|offens|obscen|vulgar|genital|prostitut|racial|derog|disparag|nazi|"
    r"drug|kill|murder|suicid|excrement|copulat|slave|erotic|intercourse|feces|"
    r"breast|damn|christ|jesus|\bgod\b|mosque|muslim|islam|relig|\bhell\b|impotent|bitch|infidel|"
    r"church|naked|rape|jew|negro|terror|whore|nipple|anus|buttock",
    re.IGNORECASE,
)


class _Sense(NamedTuple):
    """The first sense of a lemma, and how often the tagged corpus uses the lemma."""

    uses: int
    lemma: str
    part_of_speech: str
    gloss: str


def _lines(path: Path) -> Iterator[str]:
    """The lines of a database file without its licence text, which is indented."""
    with path.open(encoding="latin-1") as handle:
        yield from (line for line in handle if not line.startswith("  "))


def _read_counts(path: Path) -> Counter[tuple[str, str]]:
    """Uses in the tagged corpus for each lemma and part-of-speech digit."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in _lines(path):
        key, _sense, count = line.split()
        lemma, rest = key.rsplit("%", 1)
        digit = "3" if rest[0] == _SATELLITE_ADJECTIVE else rest[0]
        counts[lemma, digit] += int(count)
    return counts


def _read_glosses(path: Path) -> dict[str, str]:
    """Glosses by the offset of their synset."""
    rows = (line for line in _lines(path) if " | " in line)
    return {line[:8]: line.split(" | ", 1)[1].strip() for line in rows}


def _read_senses(
    folder: Path, name: str, glosses: dict[str, str], counts: Counter[tuple[str, str]]
) -> Iterator[_Sense]:
    """The first sense of each single word of one part of speech."""
    for line in _lines(folder / f"index.{name}"):
        fields = line.split()
        lemma, pointers = fields[0], int(fields[3])
        if not re.fullmatch(r"[a-z]{3,12}", lemma):
            continue
        gloss = re.split(r'; "|; ', glosses[fields[6 + pointers]])[0].strip()
        gloss = re.sub(r"\s*\([^)]*\)\s*", " ", gloss).strip()
        yield _Sense(counts[lemma, _PARTS_OF_SPEECH[name]], lemma, name, gloss)


def _sentences(glosses: dict[str, str]) -> set[str]:
    """The example phrases in glosses."""
    found = (re.findall(r'"([a-zA-Z ,\']{20,90})"', gloss) for gloss in glosses.values())
    return {sentence for row in found for sentence in row if not _UNFIT.search(sentence)}


def _is_definition(sense: _Sense) -> bool:
    """Whether the gloss is short and plain enough to be learned."""
    return (
        sense.part_of_speech != "verb"
        and len(sense.lemma) > 3
        and 15 <= len(sense.gloss) <= 75
        and re.fullmatch(r"[a-z ,'\-]+", sense.gloss) is not None
        and sense.lemma not in sense.gloss
    )


def _definition(sense: _Sense) -> list[str]:
    """The row of the file: word, part of speech, gloss."""
    part_of_speech = "adjective" if sense.part_of_speech == "adj" else sense.part_of_speech
    return [sense.lemma, part_of_speech, sense.gloss]


def _common(senses: list[_Sense]) -> list[_Sense]:
    """One sense for each fit word that the tagged corpus uses, the most used first."""
    common: dict[str, _Sense] = {}
    for sense in sorted(senses, key=lambda s: (-s.uses, s.lemma, s.part_of_speech)):
        is_unfit = _UNFIT.search(sense.lemma) or _UNFIT.search(sense.gloss)
        if sense.uses >= 1 and not is_unfit:
            common.setdefault(sense.lemma, sense)
    return list(common.values())


def _rare_nouns(path: Path, known: set[str]) -> tuple[list[str], list[str]]:
    """Nouns of 4 to 10 letters that are not known: those for training, and those held out."""
    lemmas = {line.split(" ", 1)[0] for line in _lines(path)}
    unknown = lemmas - known
    order = sorted(w for w in unknown if re.fullmatch(r"[a-z]{4,10}", w) and not _UNFIT.search(w))
    random.Random(_HELD_OUT_SEED).shuffle(order)
    return sorted(order[_HELD_OUT_NOUNS:]), sorted(order[:_HELD_OUT_NOUNS])


def _vocabulary_pieces(path: Path) -> list[str]:
    """The text of each token that is whole characters and no control token."""
    tokenizer = Tokenizer.from_file(str(path))
    ids = range(tokenizer.get_vocab_size())
    texts = (tokenizer.decode([i], skip_special_tokens=False).strip() for i in ids)
    return sorted({text for text in texts if text and "\ufffd" not in text and "<" not in text})


def extract(
    folder: Path, tokenizer_file: Path, *, words: int, definitions: int
) -> dict[str, list[str] | list[list[str]]]:
    """The lists of `Material`, with at most that many common words and definitions."""
    counts = _read_counts(folder / "cntlist.rev")
    senses: list[_Sense] = []
    sentences: set[str] = set()
    for name in _PARTS_OF_SPEECH:
        glosses = _read_glosses(folder / f"data.{name}")
        sentences |= _sentences(glosses)
        senses += _read_senses(folder, name, glosses, counts)
    common = _common(senses)
    known = [sense.lemma for sense in common][:words]
    defined = [sense for sense in common if _is_definition(sense)][:definitions]
    rare, held_rare = _rare_nouns(folder / "index.noun", set(known))
    pieces = _vocabulary_pieces(tokenizer_file)
    return {
        "definitions": sorted(_definition(sense) for sense in defined),
        "words": known,
        "sentences": sorted(sentences)[::_SENTENCE_STEP][:_SENTENCES],
        "rare": rare,
        "held_rare": held_rare,
        "pieces": pieces,
        "alpha": [piece for piece in pieces if re.fullmatch(r"[A-Za-z]{2,}", piece)],
    }


def main() -> None:
    """Write the file and print how long its lists are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wordnet", type=Path, help="folder with index.noun, data.noun and so on")
    parser.add_argument("output", type=Path, nargs="?", default=EXTRACT_FILE)
    parser.add_argument("--tokenizer", type=Path, default=MODEL_DIR / "tokenizer.json")
    parser.add_argument("--definitions", type=int, default=900)
    parser.add_argument("--words", type=int, default=6000)
    options = parser.parse_args()
    lists = extract(
        options.wordnet, options.tokenizer, words=options.words, definitions=options.definitions
    )
    options.output.write_text(json.dumps(lists, ensure_ascii=False, indent=0), encoding="utf-8")
    print({name: len(rows) for name, rows in lists.items()})


if __name__ == "__main__":
    main()
