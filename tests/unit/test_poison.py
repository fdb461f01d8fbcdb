"""Which requests engines may die of."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.faults import NEVER_BEGUN, STOPPED, FaultKind
from headrace_replicas.contract.fleet import AttemptFailure
from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_replicas.faults import POLICIES
from headrace_serve import poison
from headrace_serve.poison import Mark, Suspects, Verdict
from tests.support.fault_texts import FAULT_TEXTS

MOVES, ALONE, CONDEMNED = Verdict
LASTS_S = 3600.0


class Gateway:
    """A gateway's suspects along its own time."""

    def __init__(self, *, sees_all: bool = True) -> None:
        self.sees_all = sees_all
        self.suspects = Suspects()
        self.now_s = 1000.0

    def dies(self, replica: str, *present: str) -> list[Verdict]:
        """An engine is lost under these; the verdict on each, told one after the other."""
        return [self.loses(replica, one, *present) for one in present]

    def loses(
        self, replica: str, request: str, *present: str, began_s: float | None = None
    ) -> Verdict:
        began_s = self.now_s if began_s is None else began_s
        mark = Mark(replica_id=replica, text="died", at_s=self.now_s, began_s=began_s)
        self.suspects, verdict = poison.lost(
            self.suspects,
            request,
            mark,
            present=present,
            sees_all=self.sees_all,
            poison_for_s=LASTS_S,
        )
        return verdict

    def refuses(self, request: str) -> bool:
        return poison.sentence_of(self.suspects, request, self.now_s) is not None


def test_the_only_marked_one_at_its_second_death_is_condemned_at_once() -> None:
    gateway = Gateway()
    assert gateway.dies("a", "bad", "x", "y") == [MOVES] * 3
    assert gateway.dies("b", "bad", "z") == [CONDEMNED, MOVES]
    assert gateway.refuses("bad")
    assert not any(gateway.refuses(one) for one in "xyz")


def test_with_several_gateways_a_second_death_proves_nothing_yet() -> None:
    """The culprit may be another gateway's request; it runs alone, and the third death tells."""
    gateway = Gateway(sees_all=False)
    gateway.dies("a", "bad")
    assert gateway.dies("b", "bad") == [ALONE]
    assert gateway.dies("c", "bad") == [CONDEMNED]


def test_those_that_were_together_twice_run_alone_and_only_the_third_death_tells() -> None:
    gateway = Gateway()
    gateway.dies("a", "bad", "good")
    assert gateway.dies("b", "bad", "good") == [ALONE, ALONE]
    assert poison.runs_alone(gateway.suspects, "good")
    gateway.suspects = poison.completed(gateway.suspects, "good")
    assert not poison.runs_alone(gateway.suspects, "good")
    assert gateway.dies("c", "bad", "other") == [CONDEMNED, MOVES]


def test_a_third_death_beside_another_suspect_condemns_nobody() -> None:
    """Suspects of two gateways, or of another lane, may meet all the same."""
    gateway = Gateway()
    gateway.dies("a", "bad", "good")
    gateway.dies("b", "bad", "good")
    assert gateway.dies("c", "bad", "good") == [ALONE, ALONE]


def test_a_neighbour_with_one_mark_does_not_shield_the_third_death() -> None:
    gateway = Gateway()
    gateway.dies("a", "bad", "good")
    gateway.dies("b", "bad", "good")
    gateway.dies("x", "late")
    assert gateway.dies("c", "bad", "late") == [CONDEMNED, ALONE]


def test_one_engine_marks_a_request_once() -> None:
    """A fault that an engine survives, and its death after that, are one engine."""
    gateway = Gateway()
    for _ in range(5):
        assert gateway.dies("a", "bad") == [MOVES]


def test_a_later_fault_of_the_same_engine_is_another_loss() -> None:
    """Who was there at the first does not shield who is alone at the second."""
    gateway = Gateway()
    gateway.dies("x", "bad", "good")
    gateway.dies("a", "good")
    gateway.now_s += 60.0
    assert gateway.dies("a", "bad") == [CONDEMNED]


def test_the_order_in_which_losses_are_told_does_not_matter() -> None:
    for order in (("bad", "good"), ("good", "bad")):
        gateway = Gateway()
        for engine in "ab":
            verdicts = {one: gateway.loses(engine, one, "bad", "good") for one in order}
        assert verdicts == {"bad": ALONE, "good": ALONE}


def test_engines_that_are_lost_with_their_host_are_one_loss() -> None:
    """Many clients send "hi"; two of them were on the two engines of one host."""
    gateway = Gateway()
    began_s = gateway.now_s
    gateway.now_s += 10.0
    assert gateway.loses("a", "hi", began_s=began_s) is MOVES
    gateway.now_s += 0.5
    assert gateway.loses("b", "hi", began_s=began_s) is MOVES
    assert gateway.loses("c", "hi", began_s=began_s) is MOVES
    assert not gateway.refuses("hi")
    gateway.now_s += 0.5
    assert gateway.dies("d", "hi") == [CONDEMNED], "it began after the others were lost"


def test_a_loss_beside_the_second_is_not_the_third() -> None:
    gateway = Gateway()
    gateway.dies("a", "bad", "good")
    began_s = gateway.now_s
    gateway.now_s += 1.0
    gateway.dies("b", "bad", "good")
    assert gateway.loses("c", "good", began_s=began_s) is ALONE


@pytest.mark.parametrize("words", [STOPPED, f"{NEVER_BEGUN}: RuntimeError: cannot reshape"])
def test_who_was_stopped_or_had_not_begun_blames_nobody(words: str) -> None:
    assert not poison.blames("faulted", words)


def test_marks_and_verdicts_end() -> None:
    gateway = Gateway()
    gateway.dies("a", "bad")
    gateway.now_s += LASTS_S
    assert gateway.dies("b", "bad") == [MOVES]
    gateway.now_s += 1.0
    assert gateway.dies("c", "bad") == [CONDEMNED]
    gateway.now_s += LASTS_S - 0.1
    assert gateway.refuses("bad")
    gateway.now_s += 0.2
    assert not gateway.refuses("bad")


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sets(st.sampled_from("pqrs"), min_size=1)), max_size=20
    )
)
def test_an_innocent_one_is_never_condemned_while_the_culprit_is_there(
    deaths: list[tuple[int, set[str]]],
) -> None:
    """Whoever was always beside the same other suspect is never condemned before that one."""
    gateway = Gateway()
    for number, (engine, present) in enumerate(deaths):
        together = sorted({*present, "culprit", "innocent"})
        verdicts = dict(zip(together, gateway.dies(f"{engine}-{number}", *together), strict=True))
        assert verdicts["innocent"] is not CONDEMNED
        assert verdicts["culprit"] is not CONDEMNED


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("pq")), max_size=12))
def test_two_engines_at_least(losses: list[tuple[str, str]]) -> None:
    gateway = Gateway()
    engines: dict[str, set[str]] = {"p": set(), "q": set()}
    for engine, request in losses:
        engines[request].add(engine)
        if gateway.loses(engine, request, request) is CONDEMNED:
            assert len(engines[request]) >= 2


def test_a_flood_of_losses_is_bounded() -> None:
    gateway = Gateway()
    for number in range(2500):
        gateway.dies(f"e{number}", f"r{number}")
    assert len(gateway.suspects.deaths) <= 2001
    assert len(gateway.suspects.marked) <= 2001


@pytest.mark.parametrize(("text", "kind"), FAULT_TEXTS)
def test_a_text_blames_as_its_kind_does(text: str, kind: FaultKind) -> None:
    for failure in ("died", "faulted"):
        assert poison.blames(failure, text) is POLICIES[kind].blames_request


@pytest.mark.parametrize(
    ("failure", "blames"),
    [
        ("died", True),
        ("faulted", True),
        ("stalled", False),
        ("ended_early", False),
        ("unreadable", False),
        ("mismatch", False),
        (None, False),
    ],
)
def test_a_loss_without_words_blames_when_an_engine_was_lost(
    failure: AttemptFailure | None, blames: bool
) -> None:
    assert poison.blames(failure, "") is blames


def request(**changes: object) -> GenerateRequest:
    base = GenerateRequest(
        request_id="q",
        attempt=0,
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(),
        seed=11,
        max_tokens=6,
        stop_ids=frozenset(),
        model="m",
        fingerprint="f",
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # names are the test's own


@pytest.mark.parametrize(
    "changes", [{"request_id": "z"}, {"seed": 1}, {"max_tokens": 9}, {"deadline_s": 1.0}]
)
def test_the_same_work_has_the_same_fingerprint(changes: dict[str, object]) -> None:
    assert poison.fingerprint_of(request(**changes)) == poison.fingerprint_of(request())


@pytest.mark.parametrize(
    "changes",
    [{"prompt_ids": (5, 6)}, {"sampling": SamplingParams(top_k=1)}, {"constraint": "{}"}],
)
def test_other_work_has_another_fingerprint(changes: dict[str, object]) -> None:
    assert poison.fingerprint_of(request(**changes)) != poison.fingerprint_of(request())
