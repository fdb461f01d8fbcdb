"""Requests that engines die of, on virtual time: stopped, refused, and their neighbours served."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from headrace_replicas.contract.errors import (
    DeadlineExceededError,
    HeadraceError,
    PoisonRequestError,
)
from headrace_replicas.contract.fleet import (
    FleetView,
    PoisonFound,
    ReplicaState,
    ReplicaStatus,
)
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import FailoverSettings, FleetSettings
from headrace_serve.poison import fingerprint_of
from headrace_serve.token_stream import TokenStream
from tests.support.gateway_scene import GatewayScene
from tests.support.scripted_fleet import Fault, Plan, by_attempt
from tests.support.stream_scene import Scene, read, request, undisturbed
from tests.support.virtual_time import EPOCH_S, run

ALWAYS = by_attempt(*[Fault(kind="die", at=2)] * 9)


@dataclass
class Outcome:
    """What one reader saw, and when."""

    ids: tuple[int, ...] = ()
    times: list[float] = field(default_factory=list)
    error: HeadraceError | None = None


async def outcome(scene: Scene, base: GenerateRequest, result: Outcome) -> None:
    stream = TokenStream(scene.parts, base)
    try:
        async with aclosing(stream.run()) as arriving:
            async for accepted in arriving:
                result.ids += accepted.ids
                result.times.append(scene.clock.monotonic_s())
    except HeadraceError as error:
        result.error = error


def found(scene: Scene) -> list[PoisonFound]:
    return [notice for notice in scene.notices if isinstance(notice, PoisonFound)]


def test_a_request_that_kills_two_engines_is_stopped_and_refused_from_then_on() -> None:
    scene = Scene(ALWAYS, guarded=True)
    with pytest.raises(PoisonRequestError, match=r"2 engines were lost.*another 60 minutes"):
        read(scene)
    assert len(scene.fleet.attempts) == 2
    (notice,) = found(scene)
    assert notice.until_s == pytest.approx(notice.at_s + FleetSettings().poison_for_s)
    assert [text.split()[1] for text in notice.losses] == list(scene.holders)
    scene.check_nothing_left()

    async def again() -> Outcome:
        result = Outcome()
        await outcome(scene, request(request_id="again", seed=99), result)
        return result

    assert isinstance(run(again()).error, PoisonRequestError)
    assert len(scene.fleet.attempts) == 2, "it reached an engine"


@pytest.mark.parametrize("kind", ["stall", "end_cleanly", "refuse_weights"])
def test_losses_that_blame_nobody_stop_nobody(kind: str) -> None:
    plan = by_attempt(*[Fault(kind=kind, at=2)] * 2)  # type: ignore[arg-type]  # one of the kinds
    scene = Scene(plan, guarded=True)
    assert read(scene) == undisturbed("length")
    assert found(scene) == []


def test_a_replica_that_was_told_to_go_blames_nobody() -> None:
    scene = Scene(by_attempt(*[Fault(kind="die", at=2)] * 2), guarded=True)
    statuses = tuple(
        ReplicaStatus(
            replica_id=name,
            generation=1,
            state=ReplicaState.DRAINING if name in "ab" else ReplicaState.READY,
            reason="",
            since_s=0.0,
            last_probe=None,
            snapshot=None,
        )
        for name in "abc"
    )
    # The orders to leave arrive at this gateway after it has given the request away.
    scene.fleet.vanish("c")

    async def main() -> Outcome:
        result = Outcome()
        reading = asyncio.ensure_future(outcome(scene, request(), result))
        await asyncio.sleep(0.1)
        scene.board.publish(FleetView(version=1, at_s=EPOCH_S, replicas=statuses))
        scene.fleet.appear("c")
        await reading
        return result

    assert run(main()).error is None
    assert found(scene) == []


def test_two_clients_with_one_prompt_on_two_engines_of_a_host_that_goes_down() -> None:
    """The engines are lost together, and the prompt has nothing to do with it."""
    scene = Scene(by_attempt(Fault(kind="die", at=2)), guarded=True, names="ab")
    results = [Outcome(), Outcome()]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number, result in enumerate(results):
                one = request(request_id=f"q{number}", seed=number)
                group.create_task(outcome(scene, one, result))

    run(main())
    assert sorted(scene.holders[:2]) == ["a", "b"]
    assert [result.error for result in results] == [None, None]
    assert found(scene) == []


def test_an_answer_that_ends_well_clears_its_request() -> None:
    """One death for each of many runs of the same prompt is not the prompt's."""
    scene = Scene(by_attempt(Fault(kind="die", at=2)), guarded=True)
    for number in range(4):
        assert read_again(scene, number).error is None
    assert found(scene) == []


def read_again(scene: Scene, number: int) -> Outcome:
    async def main() -> Outcome:
        result = Outcome()
        await outcome(scene, request(request_id=f"q{number}"), result)
        return result

    return run(main())


def kills(*culprits: str, deaths: int = 2) -> Plan:
    """An engine is lost under everybody but `w` so many times; under the culprits each time."""

    def plan(asked: GenerateRequest) -> Fault | None:
        if asked.request_id == "w":
            return None
        if asked.attempt <= deaths or asked.request_id in culprits:
            return Fault(kind="die", at=2 * asked.attempt)
        return None

    return plan


async def together(
    scene: Scene, names: str, deadline_s: float = EPOCH_S + 3600
) -> dict[str, Outcome]:
    """Several requests that are on the same engine at two deaths: one engine at a time is there."""
    results = {name: Outcome() for name in names}
    readings = []
    for name, result in results.items():
        base = request(request_id=name, prompt_ids=(ord(name),), deadline_s=deadline_s)
        readings.append(asyncio.ensure_future(outcome(scene, base, result)))
    for after_s, old, new in ((0.2, "a", "b"), (0.4, "b", "c")):
        await asyncio.sleep(after_s)
        scene.fleet.appear(new)
        scene.fleet.vanish(old)
    await asyncio.gather(*readings)
    return results


@pytest.mark.parametrize("max_moves", [1, 2])
def test_neighbours_run_one_at_a_time_and_only_the_culprit_is_stopped(max_moves: int) -> None:
    """Of three that died together twice, two get their whole answers."""
    limits = FailoverSettings(max_moves=max_moves)
    scene = Scene(kills("y"), names="a", limits=limits, guarded=True)
    results = run(together(scene, "xyz"))
    scene.check_nothing_left()
    assert {name: type(one.error) for name, one in results.items()} == {
        "x": type(None),
        "y": PoisonRequestError,
        "z": type(None),
    }
    assert "3 engines" in str(results["y"].error)
    assert [notice.request_id for notice in found(scene)] == ["y"]
    assert len(results["x"].ids) == len(results["z"].ids) == 6
    third = [(one.request_id, where) for where, one in scene.fleet.attempts if one.attempt == 3]
    assert sorted(third) == [("x", "c"), ("y", "c"), ("z", "c")]
    lasts = sorted((one.times[4], one.times[-1]) for one in (results["x"], results["z"]))
    assert lasts[0][1] < lasts[1][0], "they ran beside each other"


def test_a_suspect_does_not_wait_longer_than_its_deadline() -> None:
    scene = Scene(kills(), names="a", guarded=True)
    results = run(together(scene, "xy", deadline_s=EPOCH_S + 1.1))
    scene.check_nothing_left()
    assert {type(one.error) for one in results.values()} == {type(None), DeadlineExceededError}


def test_a_suspect_whose_client_leaves_frees_the_lane() -> None:
    scene = Scene(kills(), names="a", guarded=True)

    async def main() -> Outcome:
        leaving = asyncio.ensure_future(together(scene, "xy"))
        await asyncio.sleep(0.8)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        result = Outcome()
        await outcome(scene, request(request_id="w", prompt_ids=(ord("x"),)), result)
        return result

    assert run(main()).error is None
    scene.check_nothing_left()


def test_what_another_gateway_condemned_is_refused_here() -> None:
    scene = Scene(guarded=True)
    notice = PoisonFound(
        fingerprint=fingerprint_of(request()),
        request_id="there",
        replica_id="z",
        losses=("replica z died",) * 2,
        until_s=EPOCH_S + 60.0,
        at_s=EPOCH_S,
    )
    scene.board.publish(FleetView(version=1, at_s=EPOCH_S, replicas=(), poison=(notice,)))
    with pytest.raises(PoisonRequestError, match="another 1 minutes"):
        read(scene)
    assert scene.fleet.attempts == []


def test_over_http_the_client_gets_one_clear_error_that_no_client_retries() -> None:
    scene = GatewayScene(ALWAYS, guarded=True)
    first, second = scene.chat(), scene.chat()
    for reply in (first, second):
        assert reply.status == 422
        assert (reply.error["code"], reply.error["type"]) == (
            "poison_request",
            "invalid_request_error",
        )
        assert "retry-after" not in reply.headers
    assert len(scene.fleet.attempts) == 2
    assert scene.chat(messages=[{"role": "user", "content": "else"}]).status == 422
    assert len(scene.fleet.attempts) > 2, "another request is judged by itself"
