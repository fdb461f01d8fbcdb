"""Faults: the right kind for every wording, and an answer that never gets milder."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.faults import (
    POLICIES,
    FaultAnswer,
    FaultWindow,
    classify,
    classify_exit,
    decide,
)
from tests.support.fault_texts import FAULT_TEXTS

KINDS = st.sampled_from(FaultKind)
SEVERITY = list(FaultAnswer)


@pytest.mark.parametrize(("text", "kind"), FAULT_TEXTS)
def test_a_published_text_has_its_kind(text: str, kind: FaultKind) -> None:
    assert classify(text) is kind


@given(st.sampled_from(FAULT_TEXTS), st.sampled_from([str.lower, str.upper, str.title]), st.data())
def test_case_spacing_and_the_last_dot_do_not_matter(
    pair: tuple[str, FaultKind], change: Callable[[str], str], data: st.DataObject
) -> None:
    text, kind = pair
    spaces = data.draw(st.sampled_from([" ", "  ", "\t"]))
    drifted = change(re.sub(" ", spaces, text)).rstrip(".")
    assert classify(drifted) is kind


@given(st.lists(st.sampled_from(FAULT_TEXTS), min_size=2, max_size=5))
def test_submissions_ignored_is_never_hidden_by_other_faults(
    pairs: list[tuple[str, FaultKind]],
) -> None:
    kinds = {kind for _, kind in pairs}
    told = classify("\n".join(text for text, _ in pairs))
    assert told in kinds
    if FaultKind.SUBMISSIONS_IGNORED in kinds:
        assert told is FaultKind.SUBMISSIONS_IGNORED


@pytest.mark.parametrize(
    ("returncode", "tail", "kind"),
    [
        (-6, "", FaultKind.ABORTED),
        (134, "", FaultKind.ABORTED),
        (-11, "", FaultKind.ABORTED),
        (-9, "", FaultKind.KILLED),
        (137, "", FaultKind.KILLED),
        (0, "", FaultKind.EXITED),
        (1, "Traceback (most recent call last):\nKeyError: 3", FaultKind.EXITED),
        (-6, FAULT_TEXTS[2][0], FaultKind.TIMEOUT),
    ],
)
def test_an_exit_is_told_by_its_last_words_or_else_by_its_status(
    returncode: int, tail: str, kind: FaultKind
) -> None:
    assert classify_exit(returncode, tail) is kind


def test_every_kind_has_a_policy_that_advises() -> None:
    assert set(POLICIES) == set(FaultKind)
    assert all(policy.advice.endswith(".") for policy in POLICIES.values())


@given(KINDS, st.lists(st.tuples(KINDS, st.floats(0, 30_000)), max_size=8), st.booleans())
def test_more_faults_in_the_window_never_give_a_milder_answer(
    kind: FaultKind, earlier: list[tuple[FaultKind, float]], timeouts_replace: bool
) -> None:
    now_s = 30_000.0
    alone = FaultWindow().with_fault(kind, now_s)
    crowded = FaultWindow(faults=tuple(earlier)).with_fault(kind, now_s)
    answers = [
        decide(kind, window, at_s=now_s, timeouts_replace=timeouts_replace)
        for window in (alone, crowded)
    ]
    assert SEVERITY.index(answers[0]) <= SEVERITY.index(answers[1])
    assert (answers[0] is FaultAnswer.EXIT) == POLICIES[kind].terminal


def test_a_timeout_replaces_at_once_unless_a_canary_may_decide_the_first() -> None:
    first = FaultWindow().with_fault(FaultKind.TIMEOUT, 0.0)
    second = first.with_fault(FaultKind.IMPACTING_INTERACTIVITY, 85 * 60.0)
    timeout, late = FaultKind.TIMEOUT, FaultKind.IMPACTING_INTERACTIVITY
    assert decide(timeout, first, at_s=0.0, timeouts_replace=True) is FaultAnswer.REPLACE
    assert decide(timeout, first, at_s=0.0, timeouts_replace=False) is FaultAnswer.CANARY
    assert decide(late, second, at_s=5100.0, timeouts_replace=False) is FaultAnswer.REPLACE


def test_a_fault_leaves_the_window_after_its_length() -> None:
    first = FaultWindow().with_fault(FaultKind.TIMEOUT, 0.0)
    later = first.with_fault(FaultKind.TIMEOUT, 21_600.0)
    assert later.faults == ((FaultKind.TIMEOUT, 21_600.0),)
    answer = decide(FaultKind.TIMEOUT, later, at_s=21_600.0, timeouts_replace=False)
    assert answer is FaultAnswer.CANARY


def test_a_victim_goes_on_and_memory_that_ran_out_twice_replaces() -> None:
    victim = FaultWindow().with_fault(FaultKind.INNOCENT_VICTIM, 0.0)
    for _ in range(5):
        victim = victim.with_fault(FaultKind.INNOCENT_VICTIM, 1.0)
    answer = decide(FaultKind.INNOCENT_VICTIM, victim, at_s=1.0, timeouts_replace=True)
    assert answer is FaultAnswer.GO_ON
    once = FaultWindow().with_fault(FaultKind.OUT_OF_MEMORY, 0.0)
    twice = once.with_fault(FaultKind.OUT_OF_MEMORY, 60.0)
    out = FaultKind.OUT_OF_MEMORY
    assert decide(out, once, at_s=0.0, timeouts_replace=True) is FaultAnswer.CANARY
    assert decide(out, twice, at_s=60.0, timeouts_replace=True) is FaultAnswer.REPLACE
