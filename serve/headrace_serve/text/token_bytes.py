"""From a token's spelling in the vocabulary to the exact bytes that it stands for.

A vocabulary spells its tokens in one of a few ways, and the decoder in `tokenizer.json` says
which one:

* byte-level BPE (GPT-2, Qwen, Llama 3, DeepSeek): every byte has its own printable letter;
* SentencePiece (Llama 2, Mistral, Gemma): `▁` is a space, `<0xE2>` a single byte, and the text
  may lose the space that the first word carries;
* anything else is asked for text, token by token, and that text is taken as UTF-8.

Law: joining the bytes of the tokens of a text gives the bytes of the text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

WORD_START = "\u2581"
"""SentencePiece's sign for a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScheme:
    """How a vocabulary spells bytes.

    Attributes:
        kind: Which of the three ways of the module's docstring.
        byte_tokens: Whether `<0xE2>` stands for one byte.
        leading_spaces: That many spaces at the very start of a text are no part of it.
        bare_first: The first token of a text gives none of its word-start spaces.
    """

    kind: Literal["byte_level", "sentencepiece", "opaque"]
    byte_tokens: bool = False
    leading_spaces: int = 0
    bare_first: bool = False


def _byte_letters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_LETTER_TO_BYTE = _byte_letters()


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _flat(step)
    else:
        yield decoder


def scheme_of(decoder: Mapping[str, Any] | None) -> DecodeScheme:
    """The scheme that a `tokenizer.json` decoder describes.

    Args:
        decoder: The `decoder` object as parsed JSON; None when the tokenizer has none.
    """
    steps = list(_flat(decoder)) if decoder else []
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return DecodeScheme(kind="byte_level")
    metaspaces = [
        s for s in steps if s.get("type") == "Metaspace" and s["replacement"] == WORD_START
    ]
    swaps = [s for s in steps if s.get("type") == "Replace" and s["content"] == " "]
    swaps = [s for s in swaps if s["pattern"] == {"String": WORD_START}]
    if not metaspaces and not swaps:
        # Word pieces and the like put a space between tokens, and none before the first.
        return DecodeScheme(kind="opaque", leading_spaces=1)
    strips = [s["start"] for s in steps if s.get("type") == "Strip" and s["content"] == " "]
    return DecodeScheme(
        kind="sentencepiece",
        byte_tokens="ByteFallback" in kinds,
        leading_spaces=sum(strips),
        bare_first=any(s.get("prepend_scheme", "always") != "never" for s in metaspaces),
    )


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with any other letter is taken as it is written."""
    try:
        return bytes(_LETTER_TO_BYTE[letter] for letter in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str, *, byte_tokens: bool) -> bytes:
    """Bytes of a SentencePiece token, its word-start space included."""
    if byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes((int(match[1], 16),))
    return token.replace(WORD_START, " ").encode()
