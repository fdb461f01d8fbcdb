"""Keeps control tokens that somebody wrote into a message from acting as control tokens.

A chat template writes `<|im_end|>` and its like as text, and the tokenizer turns that text into
control tokens. A message, a tool result or a web page inside one that spells `<|im_end|>` would
end its turn the same way and could speak as the system. So such spellings are marked before the
template sees them, and what is still marked after rendering is tokenized as ordinary text.

The marks are Unicode noncharacters, which are set aside for use inside a process and never
appear in interchanged text; stray ones are dropped from what is marked, so none can be forged.
Only tokens that the vocabulary flags as special are treated so: `<think>` or `<tool_call>` often
are ordinary vocabulary, and templates look for them in the history of an assistant.
"""

import re
from collections.abc import Iterable, Mapping

from headrace_replicas.contract.errors import InvalidRequestError

_START, _END = "\ufdd0", "\ufdd1"
_STRAY = str.maketrans("", "", _START + _END)


class ControlTokens:
    """The spellings of a vocabulary's control tokens, and how to defuse them in given text."""

    def __init__(self, spellings: Iterable[str]) -> None:
        longest_first = sorted(filter(None, spellings), key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelling = re.compile(any_of)
        # A template that writes JSON in ASCII escapes the marks; they are known that way too.
        self._marked = re.compile(
            rf"(?:{_START}|\\ufdd0)({any_of})(?:{_END}|\\ufdd1)|[{_START}{_END}]"
        )

    def occur_in(self, value: object) -> bool:
        """Whether any string inside nested lists and mappings spells a control token."""
        if isinstance(value, str):
            return self._spelling.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.occur_in(key) or self.occur_in(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(map(self.occur_in, value))
        return False

    def mark(self, value: object) -> object:
        """A copy of nested lists and mappings with every spelling marked.

        Raises:
            InvalidRequestError: The name of a field spells a control token. Names pass through
                templates in too many ways to be marked.
        """
        if isinstance(value, str):
            return self._spelling.sub(rf"{_START}\g<0>{_END}", value.translate(_STRAY))
        if isinstance(value, Mapping):
            for key in value:
                self._check_name(key)
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """Rendered text cut at the marks, as (text, whether it must be read as plain text).

        A lone mark, left by a template that cut a string in two, only separates its neighbours.
        """
        parts = self._marked.split(rendered)
        return [(part, place % 2 == 1) for place, part in enumerate(parts) if part]

    def _check_name(self, name: object) -> None:
        if isinstance(name, str) and (match := self._spelling.search(name)):
            raise InvalidRequestError(
                f"A field name inside the messages or tools contains {match[0]!r}, a control token "
                "of this model. Rename the field.",
                "messages",
            )
