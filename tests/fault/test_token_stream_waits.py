"""How long a token stream waits: silence, places, deadlines, and readers who leave."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from headrace_replicas.contract.errors import DeadlineExceededError, NoReplicaError
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve.token_stream import TokenStream
from tests.support.scripted_fleet import Fault, FaultKind, Pace, Plan, by_attempt
from tests.support.stream_scene import (
    MAX_TOKENS,
    SETTINGS,
    SOUND,
    Answer,
    Scene,
    check_notices,
    read,
    request,
    undisturbed,
)
from tests.support.virtual_time import EPOCH_S, VirtualTimeLoop, run

CUTS = range(MAX_TOKENS + 1)


@pytest.mark.parametrize("token_s", [0.02, 0.5])
def test_a_silent_decode_is_left_after_the_floor_and_three_expected_gaps(token_s: float) -> None:
    pace = Pace(token_s=token_s)
    scene = Scene(by_attempt(Fault(kind="stall", at=60)), pace=pace)
    run(scene.answer(request(max_tokens=100)))
    [failed] = scene.failed
    assert failed.silence_s == pytest.approx(SETTINGS.stall_floor_s + 3 * token_s)
    assert scene.moved[0].gap_s == pytest.approx(
        failed.silence_s + pace.accept_s + pace.prefill_s + token_s
    )


@pytest.mark.parametrize("fault", [Fault(kind="never_accept"), Fault(kind="stall", at=0)])
def test_a_replica_that_is_silent_from_the_start_is_left_as_soon_as_an_unknown_one(
    fault: Fault,
) -> None:
    """The wait for a place, which is much longer, has nothing to do with it."""
    scene = Scene(by_attempt(fault))
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
    assert answer == undisturbed("length")
    patience_s = SETTINGS.stall_floor_s + 3 * SETTINGS.first_gap_s
    assert scene.failed[0].silence_s == pytest.approx(patience_s)
    assert ended_s == pytest.approx(29 + patience_s, abs=1)
    assert scene.gaps.deadline_s("prefill") == patience_s, "the wait for a place counts as a gap"


def test_silence_is_counted_from_the_last_sign_of_life_of_the_attempt_itself() -> None:
    """Neither an earlier attempt's silence nor a long prefill is charged to a replica that dies."""
    plan = by_attempt(Fault(kind="stall", at=2), Fault(kind="die", at=2))
    scene = Scene(plan, pace=Pace(prefill_s=20))
    read(scene)
    assert [notice.failure for notice in scene.failed] == ["stalled", "died"]
    assert scene.failed[1].silence_s < 0.21


def test_a_six_minute_prefill_that_shows_life_is_never_moved() -> None:
    """Nor after many short prompts, whose quick signs of life say nothing of its long steps."""

    async def story() -> tuple[Answer, float]:
        for seed in range(20):
            await short.answer(request(seed=seed))
        begun_s = long.clock.monotonic_s()
        return await long.answer(), long.clock.monotonic_s() - begun_s

    short, long = Scene(pace=Pace(prefill_s=0.05)), Scene(pace=Pace(prefill_s=360, sign_s=5.0))
    long.parts = replace(long.parts, gaps=short.gaps)
    answer, took_s = run(story())
    assert answer == undisturbed("length")
    assert took_s > 360
    assert long.notices == []


def test_a_silent_replica_is_kept_while_nobody_else_is_there() -> None:
    """A pause of a minute on the only replica is waited out, and nobody is blamed for it."""
    scene = Scene(by_attempt(Fault(kind="pause", at=3, for_s=60.0)), names="a")
    assert read(scene) == undisturbed("length")
    assert (scene.holders, scene.notices, scene.suspects()) == ("a", [], "")


@pytest.mark.parametrize("kind", ["stall", "never_accept"])
def test_a_stalled_request_moves_in_the_moment_in_which_another_replica_appears(
    kind: FaultKind,
) -> None:
    async def story() -> Answer:
        asyncio.get_running_loop().call_later(20, scene.fleet.appear, "b")
        return await scene.answer()

    scene = Scene(by_attempt(Fault(kind=kind, at=3)), names="a")
    assert run(story()) == undisturbed("length")
    scene.check_nothing_left()
    [failed] = scene.failed
    assert failed.at_s == pytest.approx(EPOCH_S + 20)
    assert scene.holders == "ab"


def test_a_stalled_request_without_moves_left_waits_for_its_replica() -> None:
    plan = by_attempt(
        Fault(kind="die", at=1), Fault(kind="die", at=2), Fault(kind="pause", at=3, for_s=90)
    )
    scene = Scene(plan)
    assert read(scene) == undisturbed("length")
    assert len(scene.failed) == 2


def test_a_process_that_stood_still_does_not_blame_its_replicas() -> None:
    """The event loop is held up longer than the patience; the chunks that came wait outside."""

    async def story() -> Answer:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for at_s in (0.1, 15.6, 31.2):
            loop.call_at(at_s, loop.stand_still, 15.0)
        return await scene.answer()

    scene = Scene(pace=Pace(token_s=0.3, prefill_s=0.4, hops=5))
    assert run(story()) == undisturbed("length")
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
        asyncio.get_running_loop().call_at(0.001, scene.fleet.vanish, "a")
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
        asyncio.get_running_loop().call_at(0.001, scene.fleet.vanish, "a")
        asyncio.get_running_loop().call_at(25, scene.fleet.appear, "b")
        return await scene.answer()

    scene = Scene(by_attempt(Fault(kind="die", at=cut)), names="a")
    assert run(story()) == undisturbed("length")
    scene.check_nothing_left()
    check_notices(scene)
    assert scene.moved[0].gap_s == pytest.approx(25, abs=1)


MOMENTS = [step * 0.0241 for step in range(40)]


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize(
    "plan",
    [SOUND, by_attempt(Fault(kind="stall", at=3)), by_attempt(Fault(kind="die", at=3))],
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
        assert reading.cancelled() or reading.result() == undisturbed("length")
        await asyncio.sleep(1)

    for at_s in MOMENTS:
        scene = Scene(plan, pace=Pace(close_s=0.05))
        run(leave(scene, at_s))
        scene.check_nothing_left()
        assert len(scene.suspects()) == len(scene.failed)
        assert scene.failed == [] or plan is not SOUND


def test_a_call_that_is_taken_back_is_left_the_time_to_close() -> None:
    """Repeated cancellation does not reach into it."""

    async def leave() -> None:
        reading = asyncio.create_task(scene.answer())
        await asyncio.sleep(0.2)
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({reading})
        await asyncio.sleep(1)

    scene = Scene(pace=Pace(close_s=0.05))
    run(leave())
    scene.check_nothing_left()
    assert scene.fleet.cut_short == 0


@pytest.mark.parametrize("turns", range(12))
def test_a_client_that_leaves_as_the_replica_dies_leaves_nothing_behind(turns: int) -> None:
    """At any turn of the loop between the failure and the moment in which it is seen."""
    readers: list[asyncio.Task[Answer]] = []

    def leave(rest: int) -> None:
        if rest:
            asyncio.get_running_loop().call_soon(leave, rest - 1)
        else:
            readers[0].cancel()

    def model(asked: GenerateRequest, output: tuple[int, ...]) -> int | None:
        if len(output) == 2 and asked.attempt == 1:
            leave(turns)
        return len(output)

    async def story() -> None:
        readers.append(asyncio.create_task(scene.answer()))
        await asyncio.wait(readers)
        assert readers[0].cancelled()
        # A failure that nobody has seen complains once nobody holds it any more.
        readers.clear()
        del scene.stream

    scene = Scene(by_attempt(Fault(kind="die", at=3)), model=model, pace=Pace(token_s=0))
    run(story())
    scene.check_nothing_left()


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
