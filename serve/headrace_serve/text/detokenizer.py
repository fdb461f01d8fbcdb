"""Token ids to text, as they come, byte for byte.

Law: for every sequence of ids and every way to cut it, the joined answers of `add` and `flush`
are the UTF-8 decoding of the joined token bytes, invalid bytes replaced. A character whose bytes
are spread over tokens is held back until it is whole; bytes that can never become a character
give one U+FFFD for each maximal subpart (Unicode Standard, chapter 3.9), and what is incomplete at
the end is flushed the same way.
"""

import codecs
from collections.abc import Iterable

from headrace_serve.text.tokenizer import TextTokenizer


class Detokenizer:
    """Collects one answer's text.

    Args:
        tokenizer: Gives the bytes of tokens.
        shown: Special tokens that are not skipped, for a parser that looks for their text.
        mid_text: The answer goes on in the middle of a text (a raw completion), so a
            SentencePiece word at its start keeps its space. Otherwise that space is dropped, as
            the tokenizer's own decoder does.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        shown: frozenset[int] = frozenset(),
        mid_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_drop = 0 if mid_text else tokenizer.scheme.leading_spaces
        self._bare_first = tokenizer.scheme.bare_first and not mid_text

    def add(self, ids: Iterable[int]) -> str:
        """Text that these ids complete; may be empty."""
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def flush(self) -> str:
        """What was held back, at the end of the answer: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        raw = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        if not raw:
            return raw
        if self._bare_first:
            self._bare_first = False
            raw = raw.replace(b" ", b"")
        if self._spaces_to_drop:
            bare = raw.lstrip(b" ")
            dropped = min(len(raw) - len(bare), self._spaces_to_drop)
            self._spaces_to_drop = 0 if bare else self._spaces_to_drop - dropped
            return raw[dropped:]
        return raw


def text_of(
    tokenizer: TextTokenizer,
    ids: Iterable[int],
    *,
    shown: frozenset[int] = frozenset(),
    mid_text: bool = False,
) -> str:
    """The whole text of an answer's ids: what a `Detokenizer` gives in the end."""
    detokenizer = Detokenizer(tokenizer, shown=shown, mid_text=mid_text)
    return detokenizer.add(ids) + detokenizer.flush()
