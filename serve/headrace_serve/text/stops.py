"""Finds stop strings in text that comes in pieces, and holds back no more than it must.

The rule: the answer ends at the first character that completes a stop string. When several are
completed by the same character, the longest is the match, so that no part of any of them is left
in the answer. The text before the match is released, nothing after it.

Laws: the result does not depend on how the text is cut; held back is exactly the longest suffix
that is a proper prefix of some stop string; the time is linear in the text, whatever the stop
strings (Aho and Corasick 1975).
"""

from collections import deque
from dataclasses import dataclass

from headrace_replicas.contract.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """What one piece of text released.

    Attributes:
        text: Text that surely belongs to the answer.
        matched: The stop string that ended the answer, or None while it goes on.
    """

    text: str
    matched: str | None


@dataclass(slots=True, kw_only=True)
class _Node:
    """A prefix of some stop string.

    Attributes:
        spelled_by: A stop string that begins with this prefix.
        depth: Its length in characters.
        next: Longer prefixes, by the character that makes them.
        shorter: The longest proper suffix of this prefix that is itself a prefix.
        match: The longest stop string that ends here, if any does.
    """

    spelled_by: str
    depth: int
    next: "dict[str, _Node]"
    shorter: "_Node | None" = None
    match: str | None = None


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(spelled_by="", depth=0, next={})
    for stop in stops:
        node = root
        for depth, letter in enumerate(stop, start=1):
            node = node.next.setdefault(letter, _Node(spelled_by=stop, depth=depth, next={}))
        node.match = stop
    waiting = deque(root.next.values())
    for node in root.next.values():
        node.shorter = root
    while waiting:
        node = waiting.popleft()
        for letter, longer in node.next.items():
            longer.shorter = _after(node.shorter, letter, root)
            longer.match = longer.match or longer.shorter.match
            waiting.append(longer)
    return root


def _after(node: _Node | None, letter: str, root: _Node) -> _Node:
    """The longest prefix that ends in `letter` and continues `node` or one of its suffixes."""
    while node is not None:
        if letter in node.next:
            return node.next[letter]
        node = node.shorter
    return root


class StopMatcher:
    """Looks for stop strings in one answer.

    Args:
        stops: The stop strings; any number, none of them empty.

    Raises:
        InvalidRequestError: A stop string is empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise InvalidRequestError("A stop string must not be empty. Leave it out.", "stop")
        self._root = _automaton(stops)
        # The held text is the prefix that the node stands for, so no copy of it is kept.
        self._node = self._root
        self._matched: str | None = None

    def add(self, text: str) -> StopResult:
        """Takes the next piece of text.

        After a match, every further piece is dropped and the match is reported again.
        """
        if self._matched is not None:
            return StopResult(text="", matched=self._matched)
        held = self._node
        node = held
        for place, letter in enumerate(text, start=1):
            node = _after(node, letter, self._root)
            if node.match is not None:
                self._matched, self._node = node.match, self._root
                released = _joined(held, text, held.depth + place - len(node.match))
                return StopResult(text=released, matched=node.match)
        self._node = node
        return StopResult(
            text=_joined(held, text, held.depth + len(text) - node.depth), matched=None
        )

    def flush(self) -> str:
        """What was held back, when the answer ends without a match; nothing after a match."""
        held, self._node = self._node, self._root
        return _joined(held, "", held.depth)


def _joined(held: _Node, text: str, length: int) -> str:
    """The first `length` characters of the held text followed by `text`."""
    if length <= held.depth:
        return held.spelled_by[:length]
    return held.spelled_by[: held.depth] + text[: length - held.depth]
