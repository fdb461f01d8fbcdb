"""Stop strings over any cut of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import InvalidRequestError
from headrace_serve.text.stops import StopMatcher, StopResult


def naive(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The rule, word for word: the first end of any stop string, and there the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def in_pieces(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    results = [matcher.add(piece) for piece in pieces]
    matched = next((result.matched for result in results if result.matched is not None), None)
    return [*(result.text for result in results), matcher.flush()], matched


LETTERS = st.text("ab\U0001f600", max_size=8)
STOPS = st.lists(LETTERS.filter(bool), max_size=6).map(tuple)


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=12))
def test_any_cut_equals_search(stops: tuple[str, ...], pieces: list[str]) -> None:
    """However the text is cut, the result is that of a plain search over the whole text."""
    texts, matched = in_pieces(stops, pieces)
    assert ("".join(texts), matched) == naive(stops, "".join(pieces))


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=12))
def test_holds_back_no_more_than_a_prefix(stops: tuple[str, ...], pieces: list[str]) -> None:
    """Before a match, what is held back is the longest suffix that may still become a stop."""
    matcher = StopMatcher(stops)
    seen = released = ""
    for piece in pieces:
        seen += piece
        result = matcher.add(piece)
        released += result.text
        if result.matched is not None:
            return
        starts = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((start for start in starts if seen.endswith(start)), key=len, default="")
        assert released + held == seen


@pytest.mark.parametrize(
    ("stops", "text", "kept", "matched"),
    [
        (("a d", "zzz", "pha b"), "alpha beta gamma delta eps", "al", "pha b"),
        (("7 8",), "Count: 5 6 7 8 9", "Count: 5 6 ", "7 8"),
        (("abcd", "bc"), "xabcd", "xa", "bc"),
        (("b", "ab"), "xab", "x", "ab"),
        (("aab",), "aaab", "a", "aab"),
        (("\U0001f600",), "Face \U0001f600 ok", "Face ", "\U0001f600"),
        ((), "all of it", "all of it", None),
    ],
)
def test_examples(stops: tuple[str, ...], text: str, kept: str, matched: str | None) -> None:
    """The first end decides; at one end the longest; self-overlapping strings are found."""
    texts, found = in_pieces(stops, list(text))
    assert ("".join(texts), found) == (kept, matched)


def test_nothing_after_match() -> None:
    """After a match no text comes out any more, neither added nor flushed."""
    matcher = StopMatcher(("END",))
    assert matcher.add("textEN") == StopResult(text="text", matched=None)
    assert matcher.add("D and more") == StopResult(text="", matched="END")
    assert matcher.add("text") == StopResult(text="", matched="END")
    assert matcher.flush() == ""


def test_flush_gives_held_text() -> None:
    """An answer that ends in the beginning of a stop string keeps it."""
    matcher = StopMatcher(("END",))
    assert matcher.add("the EN") == StopResult(text="the ", matched=None)
    assert matcher.flush() == "EN"


def test_empty_stop_is_refused() -> None:
    """An empty stop string would end every answer at once, so it is an error."""
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(("x", ""))
    assert caught.value.param == "stop"


def test_long_self_similar_stops() -> None:
    """A long stop string of one letter, always missed by its last, holds back and lets go."""
    matcher = StopMatcher(("a" * 2_000 + "b", "a" * 1_000 + "c"))
    assert matcher.add("a" * 1_999) == StopResult(text="", matched=None)
    assert matcher.add("aa") == StopResult(text="a", matched=None)
    assert matcher.add("x") == StopResult(text="a" * 2_000 + "x", matched=None)
    assert matcher.add("a" * 3_000 + "c") == StopResult(text="a" * 2_000, matched="a" * 1_000 + "c")
