"""The delivered tokens of a choice, over late, repeated and overlapping chunks."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.requests import (
    GenerateRequest,
    Progress,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from headrace_serve.journal import Accepted, Journal, Refused

BASE = GenerateRequest(
    request_id="q",
    attempt=1,
    prompt_ids=(5, 6),
    sampling=SamplingParams(),
    seed=1,
    max_tokens=100,
    stop_ids=frozenset(),
    model="m",
    fingerprint="f",
)


def logprobs_of(ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=token, logprob=-float(token)) for token in ids)


def chunk(position: int, *ids: int, attempt: int = 1, last: bool = False) -> TokenChunk:
    return TokenChunk(
        request_id="q",
        attempt=attempt,
        position=position,
        ids=ids,
        logprobs=logprobs_of(ids),
        finish_reason="stop" if last else None,
        usage=Usage(prompt_tokens=2, completion_tokens=position + len(ids)) if last else None,
    )


def begun(*ids: int) -> Journal:
    """A journal in its first attempt that holds these ids."""
    journal = Journal()
    journal.begin_attempt()
    if ids:
        journal.record(chunk(0, *ids))
    return journal


@dataclass(frozen=True)
class Story:
    """An answer, and chunks of several attempts that together bring it."""

    answer: tuple[int, ...]
    attempts: list[list[TokenChunk]]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Each attempt cuts the answer anew, from at or below where it starts, up to some point."""
    answer = tuple(draw(st.lists(st.integers(0, 3), max_size=30)))
    attempts = []
    reached = 0
    for number in range(1, draw(st.integers(1, 4)) + 1):
        start = draw(st.integers(0, reached))
        cuts = sorted(draw(st.sets(st.integers(start, len(answer)), max_size=6)) | {start})
        chunks = [chunk(begin, *answer[begin:end], attempt=number) for begin, end in pairwise(cuts)]
        attempts.append(chunks)
        reached = max(reached, cuts[-1])
    attempts[-1].append(chunk(reached, *answer[reached:], attempt=len(attempts), last=True))
    return Story(answer=answer, attempts=attempts)


@given(stories(), st.data())
def test_any_delivery_gives_the_answer_exactly_once(story: Story, data: st.DataObject) -> None:
    """Duplicates, overlaps and late chunks of older attempts change nothing in the answer."""
    journal = Journal()
    taken: list[Accepted] = []
    said: list[TokenChunk] = []
    for number, chunks in enumerate(story.attempts, start=1):
        assert journal.begin_attempt() == number
        for one in chunks:
            again = data.draw(st.lists(st.sampled_from([*said, one]), max_size=3))
            for heard in (*again, one, *again):
                result = journal.record(heard)
                assert not isinstance(result, Refused), result
                if result is not None:
                    taken.append(result)
            said.append(one)
            assert journal.output_ids == story.answer[: journal.delivered]
    ids = tuple(token for one in taken for token in one.ids)
    assert ids == journal.output_ids == story.answer
    assert tuple(entry for one in taken for entry in one.logprobs) == logprobs_of(ids)
    finishes = [one for one in taken if one.finish_reason is not None]
    assert finishes == taken[-1:]
    assert finishes[0].usage is not None


def test_an_older_attempt_is_fenced_off() -> None:
    """Once a new attempt begins, the older one's tokens are dropped, right or wrong."""
    journal = begun(1, 2)
    assert journal.begin_attempt() == 2
    assert journal.record(chunk(2, 3, attempt=1)) is None
    assert journal.record(chunk(2, 9, attempt=2)) is not None
    assert journal.output_ids == (1, 2, 9)


def test_an_overlap_brings_its_new_end_only() -> None:
    """A chunk that starts below what is held adds what lies beyond it, logprobs included."""
    accepted = begun(1, 2).record(chunk(1, 2, 3, 4))
    assert isinstance(accepted, Accepted)
    assert accepted.ids == (3, 4)
    assert accepted.logprobs == logprobs_of((3, 4))


@pytest.mark.parametrize(
    ("wrong", "failure"),
    [
        (chunk(1, 7, 3), "mismatch"),
        (chunk(0, 1, last=True), "mismatch"),
        (chunk(3, 4), "faulted"),
        (chunk(-1, 4), "faulted"),
        (chunk(2, 3, attempt=2), "faulted"),
        (replace(chunk(2, 3), logprobs=logprobs_of((3, 4))), "faulted"),
        (replace(chunk(2, 3, last=True), usage=None), "faulted"),
        (replace(chunk(2), progress=None, position=4), "faulted"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(wrong: TokenChunk, failure: str) -> None:
    """A contradiction or a broken rule changes nothing and ends its attempt, not the answer."""
    journal = begun(1, 2)
    refused = journal.record(wrong)
    assert isinstance(refused, Refused)
    assert refused.failure == failure
    assert "request q" in refused.detail
    assert journal.record(chunk(2, 3)) is None, "the attempt is fenced off"
    assert journal.output_ids == (1, 2)
    journal.begin_attempt()
    assert journal.record(chunk(2, 3, attempt=2)) is not None


def test_nothing_comes_after_the_finish() -> None:
    """There is one finish, and what follows is dropped, a second finish too."""
    journal = begun(1)
    first = journal.record(chunk(1, 2, last=True))
    assert isinstance(first, Accepted)
    assert journal.finished
    assert journal.record(chunk(2, 3)) is None
    assert journal.record(chunk(1, 2, last=True)) is None
    assert journal.output_ids == (1, 2)


def test_a_finish_without_tokens_is_accepted() -> None:
    """A resume at the very end brings only the finish."""
    journal = begun(1, 2)
    journal.begin_attempt()
    accepted = journal.record(chunk(2, attempt=2, last=True))
    assert accepted == Accepted(
        ids=(),
        logprobs=(),
        finish_reason="stop",
        usage=Usage(prompt_tokens=2, completion_tokens=2),
    )


def test_a_sign_of_life_brings_nothing_new() -> None:
    """A chunk with progress alone is taken without a word."""
    journal = begun(1)
    life = Progress(engine_steps=4, prefill_done_tokens=1, prefill_total_tokens=2)
    assert journal.record(replace(chunk(1), progress=life)) is None
    assert journal.record(chunk(1, 2)) is not None


def test_a_chunk_before_any_attempt_is_dropped() -> None:
    """A journal that began no attempt takes nothing."""
    assert Journal().record(chunk(0, 1)) is None


def test_the_next_attempt_carries_what_was_delivered() -> None:
    """The request for an attempt has its number, and the delivered ids as output."""
    journal = begun(1, 2)
    journal.begin_attempt()
    assert journal.request_for_attempt(BASE) == replace(BASE, attempt=2, output_ids=(1, 2))
