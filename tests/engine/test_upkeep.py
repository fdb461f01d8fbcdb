"""Hot experts over a restart, and what a streaming replica does beside its requests."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import EngineFaultError, ExpertReadError
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.budget import draw_up
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.hot_list import hot_list_path, read_hot_list
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.popularity import Popularity, hottest
from headrace_replicas.engine.experts.preload import preload
from headrace_replicas.engine.experts.streaming import ExpertStream
from headrace_replicas.engine.experts.upkeep import Upkeep, save_is_due
from headrace_replicas.engine.experts.warm_up import without_slots
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.steps import Engine
from headrace_replicas.replica import Replica
from tests.support.engines import DEMO_FOLDER, ask, request_for
from tests.support.replicas import STREAMING, make_replica
from tests.support.waiting import comes_true

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
STORY = "Tell me a story about a fox named Vera."


def load_streaming(checkpoint: Checkpoint, slots: int = 8) -> LoadedModel:
    streaming = Streaming(slots=slots, workers=4, clock=SystemClock(), on_progress=lambda: None)
    return load(checkpoint, device="cpu", dtype="auto", streaming=streaming)


def streamed_by(loaded: LoadedModel) -> StreamedModel:
    assert loaded.streamed is not None
    return loaded.streamed


def running(loaded: LoadedModel, schedule: str = "layers") -> Engine:
    settings = EngineSettings.model_validate({"device": "cpu", "schedule": schedule})
    engine = Engine(load=lambda: loaded, settings=settings, clock=SystemClock())
    engine.start()
    return engine


async def answer(replica: Replica, request: Any) -> tuple[int, ...]:
    return tuple([token async for chunk in replica.generate(request) for token in chunk.ids])


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Makes replicas of one host, one after the other."""
    made: list[Replica] = []

    def make(**engine: Any) -> Replica:
        made.append(make_replica(tmp_path, engine={**STREAMING, **engine}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_experts_count_once_for_each_token_whatever_the_schedule(
    checkpoint: Checkpoint, chat: Chat
) -> None:
    counts = []
    for schedule in ("layers", "speculate"):
        loaded = load_streaming(checkpoint, slots=20)
        engine = running(loaded, schedule)
        request = request_for(checkpoint, chat(STORY), max_tokens=40, temperature=0.0)
        ids = ask(engine, replace(request, stop_ids=frozenset())).wait().ids
        engine.stop()
        counts.append(streamed_by(loaded).uses.read())
    assert counts[0] == counts[1]
    # A prompt, then four experts for each token; one step more than tokens may have begun.
    for layer in counts[0]:
        assert 4 * (len(ids) - 1) < sum(layer) <= 4 * (len(ids) + 1) + 32


def test_what_only_probes_ask_for_does_not_count(checkpoint: Checkpoint, chat: Chat) -> None:
    loaded = load_streaming(checkpoint)
    engine = running(loaded)
    uses = streamed_by(loaded).uses
    request = request_for(checkpoint, chat("Count from 1 to 30."), max_tokens=12)
    ask(engine, replace(request, is_probe=True)).wait()
    assert not any(map(any, uses.read()))
    ask(engine, request).wait()
    assert all(map(any, uses.read()))
    engine.stop()


def test_a_replica_that_starts_again_has_the_hottest_experts_in_their_slots(
    replicas: Callable[..., Replica],
    tmp_path: Path,
    checkpoint: Checkpoint,
    chat: Chat,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of each layer the eight that requests used most, and not what the canary asks for."""
    caplog.set_level(logging.INFO)
    request = request_for(checkpoint, chat(STORY), max_tokens=60)
    first = replicas()
    said = asyncio.run(answer(first, request))
    first.leave("to be started again")
    first.close()
    path = hot_list_path(tmp_path, checkpoint.fingerprint)
    second = replicas()
    streamed = streamed_by(second._loaded)
    known = read_hot_list(path, checkpoint.fingerprint, streamed.shapes)
    for stream in streamed.streams:
        wanted = hottest(known.layers[stream.path], 8)
        assert len(wanted) == stream.capacity == 8
        assert stream.missing(list(wanted)) == []
    assert asyncio.run(answer(second, request)) == said
    lines = [line for line in caplog.messages if "hot experts" in line]
    assert lines[0] == f"there is no list of hot experts yet: {path}"
    assert lines[1].startswith("preloaded: 64 hot experts have slots, ")
    assert len(lines) == 2


def test_preloading_is_one_batch_of_reads_and_neither_hit_nor_miss(checkpoint: Checkpoint) -> None:
    streamed = streamed_by(load_streaming(checkpoint))
    calls: list[int] = []
    original = streamed.reader.read

    def counted(jobs: Any) -> None:
        calls.append(len(jobs))
        original(jobs)

    streamed.reader.read = counted  # type: ignore[method-assign]
    wanted = [tuple(range(layer, layer + 10)) for layer in range(8)]
    assert preload(streamed, wanted) == 64
    assert calls == [64 * 9]
    assert preload(streamed, wanted) == 0
    assert (streamed.counters.hits, streamed.counters.misses) == (0, 0)
    for layer, stream in enumerate(streamed.streams):
        assert stream.missing(list(range(32))) == [
            expert for expert in range(32) if not layer <= expert < layer + 8
        ]


def test_layers_of_which_nothing_is_known_keep_what_they_have(checkpoint: Checkpoint) -> None:
    streamed = streamed_by(load_streaming(checkpoint))
    preload(streamed, [(1, 2)] * 8)
    assert preload(streamed, [()] * 7 + [(3,)]) == 1
    assert streamed.streams[0].missing([1, 2, 3]) == [3]
    assert streamed.streams[7].missing([1, 2, 3]) == []


def test_an_expert_that_cannot_be_preloaded_is_an_error_and_in_no_slot(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    streamed = streamed_by(load_streaming(read_checkpoint(folder)))
    preload(streamed, [(30, 31)] * 8)
    for shard in folder.glob("*.safetensors"):
        os.truncate(shard, 100_000)
    with pytest.raises(ExpertReadError, match=r"was cut from \d+ to 100000 bytes"):
        preload(streamed, [(5, 31)] * 8)
    for stream in streamed.streams:
        assert stream.missing([5, 31]) == [5]


def test_an_error_between_two_steps_goes_to_whoever_asked(checkpoint: Checkpoint) -> None:
    engine = running(load_streaming(checkpoint))

    def fail() -> None:
        raise ExpertReadError("no such expert")

    with pytest.raises(ExpertReadError, match="no such expert"):
        engine.between_steps(fail)
    assert engine.status.fault is None
    engine.stop()
    with pytest.raises(EngineFaultError, match="stopped"):
        engine.between_steps(fail)


def test_the_warm_up_takes_what_has_no_slot_hottest_first_and_the_rest_as_it_lies(
    checkpoint: Checkpoint,
) -> None:
    streamed = streamed_by(load_streaming(checkpoint))
    preload(streamed, [(1, 2, 3)] * 8)
    uses = {path: [0.0] * 32 for path in streamed.shapes}
    last, first = streamed.streams[7], streamed.streams[0]
    uses[last.path][2:5] = [9.0, 1.0, 5.0]
    uses[first.path][30:32] = [1.0, 9.0]
    known = Popularity(layers={path: tuple(counts) for path, counts in uses.items()})
    order = list(without_slots(streamed, known))

    def ranges(stream: ExpertStream, expert: int) -> list[tuple[int, int]]:
        return [(one.file, one.offset) for one in stream.ranges(expert)]

    found = [[(one.file, one.offset) for one in expert] for expert in order]
    # Of its layer's uses the one has nine tenths, the other a third; 2 and 3 have slots.
    assert found[:3] == [ranges(first, 31), ranges(last, 4), ranges(first, 30)]
    rest = [expert[0] for expert in found[3:]]
    assert rest == sorted(rest)
    assert len(found) == len({tuple(expert) for expert in found}) == 8 * 29
    assert all(sum(one.size_bytes for one in expert) == first.expert_bytes for expert in order)


def wait_for(done: Callable[[], bool]) -> None:
    assert comes_true(done)


def test_an_idle_replica_warms_up_what_has_no_slot_and_says_how_far_it_is(
    replicas: Callable[..., Replica],
) -> None:
    """All but a quarter of the experts, whose slots the canary has filled."""
    one = replicas(warm_up_bytes_per_s=10**10)
    streamed = streamed_by(one._loaded)
    whole = sum(stream.experts * stream.expert_bytes for stream in streamed.streams)
    assert one.snapshot().warm_up_planned_bytes == pytest.approx(whole * 3 / 4, rel=1e-6)
    wait_for(lambda: one.snapshot().warm_up_done_bytes == one.snapshot().warm_up_planned_bytes)


@pytest.mark.parametrize("rate", [None, 0])
def test_a_warm_up_that_is_off_reads_nothing(
    replicas: Callable[..., Replica], rate: int | None
) -> None:
    one = replicas(warm_up_bytes_per_s=rate)
    assert one.snapshot().warm_up_planned_bytes == one.snapshot().warm_up_done_bytes == 0


def test_a_replica_that_leaves_ends_its_warm_up(replicas: Callable[..., Replica]) -> None:
    """At this rate it would take hours."""
    one = replicas(warm_up_bytes_per_s=1000)
    upkeep = one._upkeep
    assert upkeep is not None
    outcomes = [upkeep.warm_up.outcome]
    for _ in range(2):
        one.close()
        outcomes.append(upkeep.warm_up.outcome)
    assert outcomes == ["under way", "stopped", "stopped"]


# Ray's schema module itself uses an old form of pydantic's Field.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
def test_an_actor_that_is_stopped_in_an_orderly_way_closes_its_replica(
    replicas: Callable[..., Replica],
) -> None:
    """Ray Serve calls `__del__`, also when the constructor has failed."""
    from headrace_replicas.actor import MoEReplica

    actor = MoEReplica.__new__(MoEReplica)
    actor.__del__()
    actor._replica = replicas(warm_up_bytes_per_s=1000)
    actor.__del__()
    assert actor._replica._upkeep is not None
    assert actor._replica._upkeep.warm_up.outcome == "stopped"


def test_a_resident_replica_keeps_no_list(replicas: Callable[..., Replica], tmp_path: Path) -> None:
    one = replicas(slots="all")
    one.close()
    assert not (tmp_path / "hot_lists").exists()
    assert one.snapshot().warm_up_planned_bytes == 0


class SteppedClock(SystemClock):
    """Monotonic time by hand."""

    time_s = 0.0

    def monotonic_s(self) -> float:
        return self.time_s


def test_the_list_is_written_in_pauses_and_beside_requests_only_after_long(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    streamed = streamed_by(load_streaming(checkpoint))
    clock, busy = SteppedClock(), [False]
    settings = EngineSettings(device="cpu", slots="25%")
    upkeep = Upkeep(
        streamed,
        plan=draw_up(checkpoint, settings, context_tokens=None, on_gpu=False).plan,
        fingerprint=checkpoint.fingerprint,
        state_dir=tmp_path,
        warm_up_bytes_per_s=None,
        is_busy=lambda: busy[0],
        clock=clock,
    )
    path = hot_list_path(tmp_path, checkpoint.fingerprint)
    written: list[bool] = []
    for at_s, is_busy in (
        (59, False),
        (61, True),
        (62, False),
        (100, False),
        (661, True),
        (663, True),
    ):
        clock.time_s, busy[0] = float(at_s), is_busy
        streamed.uses.note(0, [1])
        path.unlink(missing_ok=True)
        upkeep.look()
        written.append(path.exists())
    assert written == [False, False, True, False, False, True]


@pytest.mark.parametrize(("is_busy", "due_s"), [(False, 60), (True, 600)])
def test_a_busy_engine_writes_its_list_ten_times_as_seldom(is_busy: bool, due_s: float) -> None:
    assert not save_is_due(0, is_busy=is_busy)
    assert not save_is_due(due_s - 0.1, is_busy=is_busy)
    assert save_is_due(due_s, is_busy=is_busy)
