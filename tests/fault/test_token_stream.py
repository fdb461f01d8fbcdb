"""A token stream over faulty replicas: whatever they do, the reader sees one undisturbed answer."""

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.errors import (
    DeadlineExceededError,
    EngineFaultError,
    HeadraceError,
    InvalidRequestError,
    NoReplicaError,
    ReplicaLostError,
)
from headrace_replicas.contract.fleet import AttemptFailed, AttemptFailure, Notice, RequestMoved
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve.board import Board
from headrace_serve.token_stream import GapsOfProcess, StreamParts, TokenStream
from tests.support.scripted_fleet import (
    HARMLESS,
    LOSSES,
    Fault,
    FaultKind,
    Model,
    Pace,
    Plan,
    ScriptedFleet,
    by_attempt,
    hashing_model,
)
from tests.support.virtual_time import EPOCH_S, VirtualClock, VirtualTimeLoop, run

MAX_TOKENS = 6
CUTS = range(MAX_TOKENS + 1)
SETTINGS = FailoverSettings()
FAILURES: dict[FaultKind, AttemptFailure] = {
    "die": "died",
    "engine_fault": "faulted",
    "refuse_weights": "mismatch",
    "end_cleanly": "ended_early",
    "cancelled_inside": "died",
    "stall": "stalled",
    "never_accept": "stalled",
    "contradict": "mismatch",
    "leave_gap": "faulted",
}
# "length" comes with the limit, "stop" when the model ends before it.
ENDS: dict[FinishReason, Model] = {
    "length": hashing_model(1000),
    "stop": hashing_model(MAX_TOKENS),
}


def request(end: FinishReason = "length", **changes: object) -> GenerateRequest:
    """A request whose answer has `MAX_TOKENS` tokens, whichever way it ends."""
    base = GenerateRequest(
        request_id="q",
        attempt=0,
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(logprobs=2),
        seed=11,
        max_tokens=MAX_TOKENS if end == "length" else MAX_TOKENS + 3,
        stop_ids=frozenset(),
        model="m",
        fingerprint="f",
        deadline_s=EPOCH_S + 3600,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # names are the test's own


@dataclass
class Answer:
    """What a reader has seen."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    # When each piece came, and how many tokens were there then; the finish counts as one.
    arrivals: list[tuple[float, int]] = field(default_factory=list, compare=False)


class Scene:
    """A board, a scripted fleet on it, and what was told to the controller."""

    def __init__(
        self,
        plan: Plan = by_attempt(),
        *,
        model: Model = ENDS["length"],
        pace: Pace = Pace(),
        names: str = "abc",
        limits: FailoverSettings = SETTINGS,
    ) -> None:
        self.board = Board()
        self.clock = VirtualClock()
        self.notices: list[Notice] = []
        self.gaps = GapsOfProcess(limits)
        self.fleet = ScriptedFleet(
            board=self.board, clock=self.clock, model=model, pace=pace, plan=plan, names=names
        )
        self.parts = StreamParts(
            replicas=self.fleet,
            board=self.board,
            gaps=self.gaps,
            tell=self.notices.append,
            settings=limits,
            clock=self.clock,
        )
        self.seen = Answer()

    async def answer(self, base: GenerateRequest | None = None) -> Answer:
        """Read one stream to its end."""
        self.stream = TokenStream(self.parts, base or request())
        self.seen = seen = Answer()
        async with aclosing(self.stream.run()) as arriving:
            async for accepted in arriving:
                assert seen.finish is None, "something follows the finish"
                seen.ids += accepted.ids
                seen.logprobs += accepted.logprobs
                seen.finish, seen.usage = accepted.finish_reason, accepted.usage
                parts = len(seen.ids) + (seen.finish is not None)
                seen.arrivals.append((self.clock.monotonic_s(), parts))
        return seen

    @property
    def failed(self) -> list[AttemptFailed]:
        return [notice for notice in self.notices if isinstance(notice, AttemptFailed)]

    @property
    def moved(self) -> list[RequestMoved]:
        return [notice for notice in self.notices if isinstance(notice, RequestMoved)]

    @property
    def holders(self) -> str:
        """The replicas that got an attempt, one letter each."""
        return "".join(replica for replica, _ in self.fleet.attempts)

    def suspects(self) -> str:
        """The replicas that this process suspects."""
        return "".join(one.replica_id for one in self.board.candidates("abcd") if one.suspected)

    def check_nothing_left(self) -> None:
        """No claim, no open call, no memory of the request; late claims change nothing."""
        for replica, attempt in self.fleet.attempts:
            self.board.claim(attempt, replica, self.clock.now_s())
            assert self.board.failed_on(attempt.request_id) == frozenset()
        assert self.board.in_flight() == {}
        assert self.fleet.open_calls == 0


def read(scene: Scene, base: GenerateRequest | None = None) -> Answer:
    """Run a scene to its end, and check that nothing of it is left."""
    answer = run(scene.answer(base))
    scene.check_nothing_left()
    check_notices(scene)
    return answer


def check_notices(scene: Scene) -> None:
    """One notice for each lost attempt and one for each move, with the right names and counts."""
    attempts = scene.fleet.attempts
    assert [(notice.replica_id, notice.attempt) for notice in scene.failed] == [
        (replica, attempt.attempt) for replica, attempt in attempts[: len(scene.failed)]
    ]
    for notice in scene.moved:
        replica, attempt = attempts[notice.attempt - 1]
        assert notice.to_replica == replica
        assert notice.replayed_tokens == len(attempt.output_ids)
        until = sum(1 for _, held in scene.seen.arrivals if held <= notice.replayed_tokens)
        before_s = scene.seen.arrivals[until - 1][0] if until else 0.0
        after_s = scene.seen.arrivals[until][0]
        assert notice.gap_s == pytest.approx(after_s - before_s)


def undisturbed(end: FinishReason) -> Answer:
    return read(Scene(model=ENDS[end]), request(end))


UNDISTURBED = {end: undisturbed(end) for end in ENDS}


def test_the_undisturbed_answers_are_whole() -> None:
    for end, answer in UNDISTURBED.items():
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
    assert read(scene, request(end)) == UNDISTURBED[end]
    [failed], [moved] = scene.failed, scene.moved
    delivered = 0 if kind == "never_accept" else cut
    expected = "faulted" if (kind, cut) == ("contradict", 0) else FAILURES[kind]
    assert (failed.failure, failed.delivered_tokens) == (expected, delivered)
    assert (moved.from_replica, moved.replayed_tokens) == (failed.replica_id, delivered)
    assert moved.to_replica != moved.from_replica
    assert scene.stream.attempts == 2
    assert scene.stream.resume == ("fast" if delivered else None)
    assert scene.suspects() == failed.replica_id


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("kind", HARMLESS)
def test_odd_chunks_do_not_show_in_the_answer(
    kind: FaultKind, chunk_tokens: int, *, apart: bool
) -> None:
    pace = Pace(chunk_tokens=chunk_tokens, finish_apart=apart)
    for cut, (end, model) in product(CUTS, ENDS.items()):
        scene = Scene(by_attempt(Fault(kind=kind, at=cut, for_s=0.4)), model=model, pace=pace)
        assert read(scene, request(end)) == UNDISTURBED[end]
        assert scene.notices == []
        assert scene.stream.attempts == 1


@pytest.mark.parametrize("kinds", list(product(LOSSES, LOSSES)), ids="-".join)
def test_two_lost_attempts_do_not_show_in_the_answer(kinds: tuple[FaultKind, FaultKind]) -> None:
    for first, second in ((0, 0), (2, 2), (2, 4), (MAX_TOKENS, MAX_TOKENS)):
        plan = by_attempt(Fault(kind=kinds[0], at=first), Fault(kind=kinds[1], at=second))
        scene = Scene(plan)
        assert read(scene) == UNDISTURBED["length"]
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
    assert scene.seen.ids == UNDISTURBED["length"].ids[:3]
    assert len(scene.failed) == 3


@pytest.mark.parametrize("max_moves", [0, 1])
def test_the_setting_bounds_the_moves(max_moves: int) -> None:
    limits = FailoverSettings(max_moves=max_moves)
    scene = Scene(by_attempt(*[Fault(kind="die", at=2)] * 3), limits=limits)
    with pytest.raises(ReplicaLostError):
        read(scene)
    assert len(scene.fleet.attempts) == max_moves + 1


@pytest.mark.parametrize("cut", [2, MAX_TOKENS])
def test_a_silent_replica_is_left_after_the_floor_and_three_expected_gaps(cut: int) -> None:
    scene = Scene(by_attempt(Fault(kind="stall", at=cut)))
    read(scene)
    [failed] = scene.failed
    # 20 ms between tokens and 200 ms between signs, all learned in this very stream.
    assert failed.silence_s < SETTINGS.stall_floor_s + 3 * 0.2
    assert failed.silence_s > SETTINGS.stall_floor_s


def test_a_replica_that_never_answers_is_left_by_its_own_silence_not_by_the_wait_for_a_place() -> (
    None
):
    scene = Scene(by_attempt(Fault(kind="never_accept")))
    read(scene)
    patience_s = SETTINGS.stall_floor_s + 3 * SETTINGS.first_gap_s
    assert scene.failed[0].silence_s == pytest.approx(patience_s)


def test_the_silence_of_a_replica_begins_when_it_got_the_request() -> None:
    """A request that waited 29 s for a place gives the replica that takes it its full time."""

    async def story() -> tuple[Answer, float]:
        scene.fleet.vanish("a", "b", "c")
        asyncio.get_running_loop().call_later(29, scene.fleet.appear, "a", "b")
        answer = await scene.answer()
        return answer, scene.clock.monotonic_s()

    scene = Scene(by_attempt(Fault(kind="never_accept")))
    answer, ended_s = run(story())
    assert answer == UNDISTURBED["length"]
    patience_s = SETTINGS.stall_floor_s + 3 * SETTINGS.first_gap_s
    assert scene.failed[0].silence_s == pytest.approx(patience_s)
    assert ended_s == pytest.approx(29 + patience_s, abs=1)
    assert scene.gaps.deadline_s("prefill") < patience_s, "the wait for a place counts as a gap"


def test_silence_is_counted_from_the_last_sign_of_life_of_the_attempt_itself() -> None:
    """Neither an earlier attempt's silence nor a long prefill is charged to a replica that dies."""
    plan = by_attempt(Fault(kind="stall", at=2), Fault(kind="die", at=2))
    scene = Scene(plan, pace=Pace(prefill_s=20))
    read(scene)
    assert [notice.failure for notice in scene.failed] == ["stalled", "died"]
    assert scene.failed[1].silence_s < 0.21


def test_a_six_minute_prefill_that_shows_life_is_never_moved() -> None:
    scene = Scene(pace=Pace(prefill_s=360, sign_s=4.0))
    assert read(scene) == UNDISTURBED["length"]
    assert scene.notices == []
    assert run(scene_time(scene)) == 0.0  # a new loop begins at zero


async def scene_time(scene: Scene) -> float:
    return scene.clock.monotonic_s()


def test_a_gap_that_slowly_grows_is_no_stall() -> None:
    """Each sign comes 40 % later than the one before, up to minutes."""
    pauses = [0.2 * 1.4**step for step in range(18)]

    async def story() -> None:
        for pause_s in pauses:
            await asyncio.sleep(pause_s)
            scene.gaps.observe("decode", pause_s)
            assert scene.gaps.deadline_s("decode") > 1.4 * pause_s

    scene = Scene()
    run(story())


def test_a_silent_replica_is_kept_while_nobody_else_is_there() -> None:
    """A pause of a minute on the only replica is waited out, and nobody is blamed for it."""
    scene = Scene(by_attempt(Fault(kind="pause", at=3, for_s=60.0)), names="a")
    assert read(scene) == UNDISTURBED["length"]
    assert (scene.holders, scene.notices, scene.suspects()) == ("a", [], "")


@pytest.mark.parametrize("kind", ["stall", "never_accept"])
def test_a_stalled_request_moves_in_the_moment_in_which_another_replica_appears(
    kind: FaultKind,
) -> None:
    async def story() -> Answer:
        asyncio.get_running_loop().call_later(20, scene.fleet.appear, "b")
        return await scene.answer()

    scene = Scene(by_attempt(Fault(kind=kind, at=3)), names="a")
    assert run(story()) == UNDISTURBED["length"]
    scene.check_nothing_left()
    [failed] = scene.failed
    assert failed.at_s == pytest.approx(EPOCH_S + 20)
    assert scene.holders == "ab"


def test_a_stalled_request_without_moves_left_waits_for_its_replica() -> None:
    plan = by_attempt(
        Fault(kind="die", at=1), Fault(kind="die", at=2), Fault(kind="pause", at=3, for_s=90)
    )
    scene = Scene(plan)
    assert read(scene) == UNDISTURBED["length"]
    assert len(scene.failed) == 2


def test_a_process_that_stood_still_does_not_blame_its_replicas() -> None:
    """The event loop is held up longer than the patience; the chunks that came wait outside."""

    async def story() -> Answer:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for at_s in (0.1, 20.0, 40.0):
            loop.call_at(at_s, loop.stand_still, 15.0)
        return await scene.answer()

    scene = Scene(pace=Pace(token_s=8, sign_s=0.2, prefill_s=0.4))
    assert run(story()) == UNDISTURBED["length"]
    assert scene.notices == []


@pytest.mark.parametrize("limit_s", [0.1, 0.35, 3.0, 47.3])
@pytest.mark.parametrize("kind", ["stall", "never_accept", None])
@pytest.mark.parametrize("names", ["a", ""])
def test_the_deadline_ends_a_request_to_the_second(
    names: str, kind: FaultKind | None, limit_s: float
) -> None:
    """Whatever it waits for: a silent replica, a place, or tokens that do come, but too slowly."""

    async def story() -> float:
        with pytest.raises(DeadlineExceededError, match="longer timeout"):
            await scene.answer(request(deadline_s=EPOCH_S + limit_s))
        return scene.clock.monotonic_s()

    fault = None if kind is None else Fault(kind=kind, at=3)
    limits = FailoverSettings(no_replica_wait_s=1000)
    scene = Scene(by_attempt(fault), names=names, pace=Pace(token_s=9.6), limits=limits)
    assert run(story()) == pytest.approx(limit_s, abs=1e-5)
    scene.check_nothing_left()
    assert scene.notices == []
    assert scene.suspects() == ""


def test_a_deadline_that_has_passed_ends_a_stream_whose_tokens_never_wait() -> None:
    """A fast replica does not outrun the deadline: the reader was too slow for it."""

    async def story() -> None:
        stream = TokenStream(scene.parts, request(max_tokens=500, deadline_s=EPOCH_S + 10))
        async with aclosing(stream.run()) as arriving:
            async for _ in arriving:
                await asyncio.sleep(1)

    scene = Scene(pace=Pace(token_s=0, sign_s=0.01))
    with pytest.raises(DeadlineExceededError):
        run(story())


def test_a_request_past_its_deadline_reaches_no_replica() -> None:
    scene = Scene()
    with pytest.raises(DeadlineExceededError):
        read(scene, request(deadline_s=EPOCH_S - 1))
    assert scene.fleet.attempts == []


def test_without_any_replica_a_request_ends_after_the_configured_wait() -> None:
    async def story() -> float:
        with pytest.raises(NoReplicaError, match="within 30 s"):
            await scene.answer()
        return scene.clock.monotonic_s()

    scene = Scene(names="")
    assert run(story()) == pytest.approx(SETTINGS.no_replica_wait_s)
    scene.check_nothing_left()


@pytest.mark.parametrize("cut", [0, 3, MAX_TOKENS])
def test_a_request_that_lost_the_last_replica_ends_after_the_configured_wait(cut: int) -> None:
    async def story() -> float:
        asyncio.get_running_loop().call_at(0.01, scene.fleet.vanish, "a")
        with pytest.raises(NoReplicaError, match="within 30 s"):
            await scene.answer()
        return scene.clock.now_s()

    scene = Scene(by_attempt(Fault(kind="die", at=cut)), names="a")
    ended_s = run(story())
    scene.check_nothing_left()
    [failed] = scene.failed
    assert ended_s == pytest.approx(failed.at_s + SETTINGS.no_replica_wait_s)


@pytest.mark.parametrize("cut", CUTS)
def test_a_request_outlives_a_fleet_that_is_empty_for_a_while(cut: int) -> None:
    async def story() -> Answer:
        asyncio.get_running_loop().call_at(0.01, scene.fleet.vanish, "a")
        asyncio.get_running_loop().call_at(25, scene.fleet.appear, "b")
        return await scene.answer()

    scene = Scene(by_attempt(Fault(kind="die", at=cut)), names="a")
    assert run(story()) == UNDISTURBED["length"]
    scene.check_nothing_left()
    check_notices(scene)
    assert scene.moved[0].gap_s == pytest.approx(25, abs=1)


def test_the_only_replica_gets_the_request_again() -> None:
    """A stream that broke on a replica that lives is resumed there when there is no other."""
    scene = Scene(by_attempt(Fault(kind="end_cleanly", at=3)), names="a")
    assert read(scene) == UNDISTURBED["length"]
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


MOMENTS = [step * 0.0173 for step in range(60)]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    "plan",
    [by_attempt(), by_attempt(Fault(kind="stall", at=3)), by_attempt(Fault(kind="die", at=3))],
    ids=["sound", "stalled", "died"],
)
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(plan: Plan, times: int) -> None:
    """Also when the cancellation is repeated while the stream still cleans up."""

    async def leave(scene: Scene, at_s: float) -> None:
        reading = asyncio.create_task(scene.answer())
        await asyncio.sleep(at_s)
        for _ in range(times):
            reading.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({reading})
        assert reading.cancelled() or reading.result() == UNDISTURBED["length"]
        await asyncio.sleep(1)

    for at_s in MOMENTS:
        scene = Scene(plan, pace=Pace(close_s=0.05))
        blamed = len(scene.failed)
        run(leave(scene, at_s))
        scene.check_nothing_left()
        assert len(scene.suspects()) == len(scene.failed)
        assert blamed == 0


@pytest.mark.parametrize("count", range(MAX_TOKENS + 1))
def test_a_reader_that_stops_after_some_tokens_leaves_nothing_behind(count: int) -> None:
    async def story() -> None:
        async with aclosing(TokenStream(scene.parts, request()).run()) as arriving:
            for _ in range(count):
                await anext(arriving)

    scene = Scene()
    run(story())
    scene.check_nothing_left()
    assert scene.notices == []
    assert scene.suspects() == ""


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
    losses = [fault for fault in plan if fault.kind in LOSSES]
    try:
        assert read(scene, base) == whole
    except HeadraceError:
        assert losses, "an error without a fault"
        assert len(losses) > SETTINGS.max_moves or FAILURES[losses[-1].kind] == "stalled"
        assert scene.seen.finish is None
        assert scene.seen.ids == whole.ids[: len(scene.seen.ids)]
        scene.check_nothing_left()
    assert len(scene.fleet.attempts) <= SETTINGS.max_moves + 1
    assert not math.isnan(scene.gaps.deadline_s("decode"))
