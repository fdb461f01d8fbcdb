"""A token stream over faulty replicas: whatever they do, the reader sees one undisturbed answer."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.errors import (
    DeadlineExceededError,
    EngineFaultError,
    HeadraceError,
    InvalidRequestError,
    ReplicaLostError,
)
from headrace_replicas.contract.fleet import (
    AttemptFailure,
    FleetView,
    Notice,
    ProbeResult,
    ReplicaState,
    ReplicaStatus,
)
from headrace_replicas.contract.requests import FinishReason, GenerateRequest, Usage
from headrace_replicas.contract.settings import FailoverSettings
from tests.support.fleet import verdict
from tests.support.scripted_fleet import (
    HARMLESS,
    LOSSES,
    Fault,
    FaultKind,
    Pace,
    by_attempt,
)
from tests.support.stream_scene import (
    ENDS,
    MAX_TOKENS,
    SETTINGS,
    Answer,
    Scene,
    check_notices,
    read,
    request,
    undisturbed,
)
from tests.support.virtual_time import EPOCH_S, run

CUTS = range(MAX_TOKENS + 1)
FAILURES: dict[FaultKind, AttemptFailure] = {
    "die": "died",
    "engine_fault": "faulted",
    "refuse_weights": "mismatch",
    "end_cleanly": "ended_early",
    "stall": "stalled",
    "never_accept": "stalled",
    "contradict": "mismatch",
    "leave_gap": "faulted",
}


def test_the_undisturbed_answers_are_whole() -> None:
    for end in ENDS:
        answer = undisturbed(end)
        assert (len(answer.ids), answer.finish) == (MAX_TOKENS, end)
        assert [entry.token_id for entry in answer.logprobs] == list(answer.ids)
        assert answer.usage == Usage(prompt_tokens=3, completion_tokens=MAX_TOKENS)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_lost_attempt_does_not_show_in_the_answer(
    cut: int, kind: FaultKind, end: FinishReason
) -> None:
    scene = Scene(by_attempt(Fault(kind=kind, at=cut)), model=ENDS[end])
    assert read(scene, request(end)) == undisturbed(end)
    [failed], [moved] = scene.failed, scene.moved
    delivered = 0 if kind == "never_accept" else cut
    expected = "faulted" if (kind, cut) == ("contradict", 0) else FAILURES[kind]
    assert (failed.failure, failed.delivered_tokens) == (expected, delivered)
    assert (moved.from_replica, moved.replayed_tokens) == (failed.replica_id, delivered)
    assert moved.to_replica != moved.from_replica
    assert scene.stream.attempts == 2
    assert scene.stream.resume == ("fast" if delivered else None)
    assert scene.suspects() == failed.replica_id


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_call_that_was_taken_back_blames_nobody(cut: int, end: FinishReason) -> None:
    """Ray Serve takes it back when a client leaves, and the gateway may hear of that later."""
    scene = Scene(by_attempt(Fault(kind="cancelled_inside", at=cut)), model=ENDS[end])
    assert read(scene, request(end)) == undisturbed(end)
    assert scene.notices == []
    assert scene.suspects() == ""
    assert scene.stream.attempts == 2


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("kind", HARMLESS)
def test_odd_chunks_do_not_show_in_the_answer(
    kind: FaultKind, chunk_tokens: int, *, apart: bool
) -> None:
    pace = Pace(chunk_tokens=chunk_tokens, finish_apart=apart)
    for cut, (end, model) in product(CUTS, ENDS.items()):
        scene = Scene(by_attempt(Fault(kind=kind, at=cut, for_s=0.4)), model=model, pace=pace)
        assert read(scene, request(end)) == undisturbed(end)
        assert scene.notices == []
        assert scene.stream.attempts == 1


@pytest.mark.parametrize("kinds", list(product(LOSSES, LOSSES)), ids="-".join)
def test_two_lost_attempts_do_not_show_in_the_answer(kinds: tuple[FaultKind, FaultKind]) -> None:
    for first, second in ((0, 0), (2, 2), (2, 4), (MAX_TOKENS, MAX_TOKENS)):
        plan = by_attempt(Fault(kind=kinds[0], at=first), Fault(kind=kinds[1], at=second))
        scene = Scene(plan)
        assert read(scene) == undisturbed("length")
        assert len(scene.failed) == 2
        assert len(set(scene.holders)) == 3, "it went back to where it failed"
        # Without a token in between, the two losses are one pause, and one move ends it.
        delivered = {0: 1} | {n: len(a.output_ids) for n, (_, a) in enumerate(scene.fleet.attempts)}
        assert len(scene.moved) == (1 if delivered[1] == delivered[2] else 2)
        assert scene.moved[0].from_replica == scene.holders[0]


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if FAILURES[kind] != "stalled"])
def test_a_third_loss_ends_the_request_with_one_error_that_tells_its_story(kind: FaultKind) -> None:
    scene = Scene(by_attempt(*(Fault(kind=kind, at=at) for at in (1, 2, 3))))
    wanted = EngineFaultError if FAILURES[kind] == "faulted" else ReplicaLostError
    with pytest.raises(wanted, match=rf"replica \w {FAILURES[kind]}.* after 3 tokens and 2 moves"):
        read(scene)
    scene.check_nothing_left()
    assert scene.seen.finish is None
    assert scene.seen.ids == undisturbed("length").ids[:3]
    assert len(scene.failed) == 3


@pytest.mark.parametrize("max_moves", [0, 1])
def test_the_setting_bounds_the_moves(max_moves: int) -> None:
    limits = FailoverSettings(max_moves=max_moves)
    scene = Scene(by_attempt(*[Fault(kind="die", at=2)] * 3), limits=limits)
    with pytest.raises(ReplicaLostError):
        read(scene)
    assert len(scene.fleet.attempts) == max_moves + 1


@pytest.mark.parametrize("seed", range(6))
def test_a_request_goes_back_to_where_it_failed_last_of_all(seed: int) -> None:
    """Even when a probe has cleared that replica of all suspicion meanwhile."""

    def clear(notice: Notice) -> None:
        scene.notices.append(notice)
        proved = [status(name, verdict(name, at_s=EPOCH_S + 1000)) for name in "abc"]
        scene.board.publish(FleetView(version=1, at_s=EPOCH_S, replicas=tuple(proved)))

    scene = Scene(by_attempt(Fault(kind="die", at=2), Fault(kind="die", at=4)))
    scene.parts = replace(scene.parts, tell=clear)
    read(scene, request(seed=seed))
    assert scene.suspects() == ""
    assert len(set(scene.holders)) == 3


def status(name: str, probe: ProbeResult) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id=name,
        generation=1,
        state=ReplicaState.READY,
        reason="",
        since_s=0.0,
        last_probe=probe,
        snapshot=None,
    )


def test_the_only_replica_gets_the_request_again() -> None:
    """A stream that broke on a replica that lives is resumed there when there is no other."""
    scene = Scene(by_attempt(Fault(kind="end_cleanly", at=3)), names="a")
    assert read(scene) == undisturbed("length")
    assert scene.holders == "aa"


def test_an_error_of_the_request_itself_is_final() -> None:
    """What a replica refuses on purpose is no loss: nobody is blamed, and nobody else is tried."""
    scene = Scene(by_attempt(Fault(kind="refuse_request", at=2)))
    with pytest.raises(InvalidRequestError):
        read(scene)
    scene.check_nothing_left()
    assert scene.notices == []
    assert scene.suspects() == ""
    assert len(scene.fleet.attempts) == 1


def test_an_exact_resume_is_named_so() -> None:
    scene = Scene(by_attempt(Fault(kind="die", at=3)))
    read(scene, request(resume_mode="exact"))
    assert scene.stream.resume == "exact"
    assert scene.fleet.attempts[1][1].resume_mode == "exact"


faults = st.builds(
    Fault,
    kind=st.sampled_from((*LOSSES, *HARMLESS)),
    at=st.integers(0, MAX_TOKENS),
    for_s=st.floats(0, 30),
)
paces = st.builds(
    Pace,
    accept_s=st.floats(0, 2),
    prefill_s=st.floats(0.01, 30),
    sign_s=st.floats(0.1, 1),
    token_s=st.floats(0, 0.4),
    chunk_tokens=st.integers(1, 8),
    finish_apart=st.booleans(),
    close_s=st.floats(0, 0.5),
)


@given(
    plan=st.lists(faults, max_size=3),
    pace=paces,
    end=st.sampled_from(sorted(ENDS)),
    seed=st.integers(0, 2**63 - 1),
    names=st.sampled_from(["a", "ab", "abc", "abcd"]),
)
@example(plan=[], pace=Pace(), end="stop", seed=0, names="a")
@settings(deadline=None, max_examples=150)
def test_every_story_ends_with_the_whole_answer_or_with_one_error(
    plan: list[Fault], pace: Pace, end: FinishReason, seed: int, names: str
) -> None:
    """And what was delivered before an error is the beginning of the answer."""
    base = request(end, seed=seed)
    whole = read(Scene(model=ENDS[end]), base)
    scene = Scene(by_attempt(*plan), model=ENDS[end], pace=pace, names=names)
    answer, error = run(outcome(scene, base))
    scene.check_nothing_left()
    assert len(scene.fleet.attempts) <= SETTINGS.max_moves + 1
    if error is None:
        assert answer == whole
        check_notices(scene)
        return
    # Three lost attempts, or a stall that nobody else was there to end.
    may_lose = [fault for fault in plan if fault.kind in (*LOSSES, "pause")]
    assert len(may_lose) > SETTINGS.max_moves or isinstance(error, DeadlineExceededError)
    assert may_lose, "an error without a fault"
    assert answer.finish is None
    assert answer.ids == whole.ids[: len(answer.ids)]


async def outcome(scene: Scene, base: GenerateRequest) -> tuple[Answer, HeadraceError | None]:
    """What was read, and the error that ended it."""
    try:
        await scene.answer(base)
    except HeadraceError as error:
        return scene.seen, error
    return scene.seen, None
