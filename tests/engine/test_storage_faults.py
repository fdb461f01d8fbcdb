"""Faulty storage under an engine: which requests feel it, and what they are told."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.contract.fleet import ReplicaState
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.steps import Engine
from headrace_replicas.injection.plan import (
    AnyStorageFault,
    ReadError,
    ShortRead,
    SlowRead,
    StalledRead,
)
from headrace_replicas.replica import Replica
from tests.support.engines import DEMO_FOLDER, ask, request_for
from tests.support.fleet import Fleet, told_to_leave
from tests.support.replicas import STREAMING, make_replica
from tests.support.streaming_engines import StreamingEngine, faulty_storage

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
STORY = "Tell me a story about a fox named Vera."
EXPERTS = 32


@pytest.fixture
def copied(tmp_path: Path) -> Checkpoint:
    """A copy of the demo model that a test may damage."""
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    return read_checkpoint(tmp_path / "model")


@pytest.fixture
def request_(checkpoint: Checkpoint, chat: Chat) -> GenerateRequest:
    return request_for(checkpoint, chat(STORY), max_tokens=30)


@pytest.fixture
def answer(engine: Engine, request_: GenerateRequest) -> tuple[int, ...]:
    """What an engine whose experts are all in memory says."""
    return ask(engine, request_).wait().ids


def with_faults(
    checkpoint: Checkpoint, *faults: AnyStorageFault, schedule: str = "layers"
) -> StreamingEngine:
    return StreamingEngine(checkpoint, 8, schedule, storage=faulty_storage(*faults))


@pytest.mark.parametrize("schedule", ["layers", "speculate"])
def test_reads_that_bring_less_than_asked_change_no_token(
    checkpoint: Checkpoint, request_: GenerateRequest, answer: tuple[int, ...], schedule: str
) -> None:
    running = with_faults(checkpoint, ShortRead(ratio=0.5), schedule=schedule)
    assert ask(running.engine, request_).wait().ids == answer
    assert running.reader.health.report(0.0).trouble == ""
    running.stop()


@pytest.mark.parametrize("schedule", ["layers", "speculate"])
def test_a_failed_read_ends_what_is_in_flight_and_not_the_engine(
    tmp_path: Path,
    checkpoint: Checkpoint,
    request_: GenerateRequest,
    answer: tuple[int, ...],
    schedule: str,
) -> None:
    fault = ReadError(times=1, from_read=40, once_exists=tmp_path / "now")
    running = with_faults(checkpoint, fault, schedule=schedule)
    (tmp_path / "now").touch()
    with pytest.raises(ExpertReadError, match=r"model-0000\d-of-00003\.safetensors cannot be read"):
        ask(running.engine, request_).wait()
    assert running.engine.status.fault is None
    assert ask(running.engine, replace(request_, request_id="again")).wait().ids == answer
    running.stop()


def used_experts(checkpoint: Checkpoint, request: GenerateRequest) -> list[set[int]]:
    """The experts that a request needs, by layer."""
    running = StreamingEngine(checkpoint, EXPERTS - 1)
    ask(running.engine, request).wait()
    unused = [set(stream.missing(list(range(EXPERTS)))) for stream in running.streamed.streams]
    running.stop()
    return [set(range(EXPERTS)) - found for found in unused]


def test_only_requests_that_need_the_bytes_feel_a_bad_sector(
    checkpoint: Checkpoint, chat: Chat, engine: Engine
) -> None:
    """One expert cannot be read. Who needs it gets the error each time; the others go on."""
    needs_it, does_not = (
        request_for(checkpoint, chat(text), request_id=text, max_tokens=8)
        for text in (STORY, "What is 9 + 9?")
    )
    used = zip(used_experts(checkpoint, needs_it), used_experts(checkpoint, does_not), strict=True)
    layer, expert = next(
        (layer, min(one - other)) for layer, (one, other) in enumerate(used) if one - other
    )
    probe = StreamingEngine(checkpoint, 8)
    [job, *_] = [pool.job(expert, 0) for pool in probe.streamed.streams[layer]._pools]
    name = probe.reader.files[job.file].name
    probe.stop()
    sector = ReadError(file=name, from_byte=job.offset, to_byte=job.offset + 1)
    running = with_faults(checkpoint, sector)
    expected = ask(engine, does_not).wait().ids
    for attempt in range(1, 4):
        with pytest.raises(ExpertReadError, match=rf"{name} cannot be read"):
            ask(running.engine, replace(needs_it, attempt=attempt)).wait()
        assert running.reader.health.report(0.0).lost is (attempt == 3)
        assert ask(running.engine, replace(does_not, attempt=attempt)).wait().ids == expected
    running.stop()


def write_in_place(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size - 1000)
        file.write(os.urandom(1000))


CHANGES: dict[str, Callable[[Path], object]] = {
    "was cut from": lambda shard: os.truncate(shard, 100_000),
    "was written to": write_in_place,
    "was extended from": lambda shard: os.truncate(shard, shard.stat().st_size + 1),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_file_that_changes_under_the_engine_never_reaches_an_answer(
    copied: Checkpoint, engine: Engine, chat: Chat, words: str
) -> None:
    request = request_for(copied, chat(STORY), max_tokens=150)
    answer = ask(engine, request).wait().ids
    running = StreamingEngine(copied, slots=8)
    streaming = ask(running.engine, request)
    first = streaming.next().ids
    for shard in copied.shards:
        CHANGES[words](shard)
    with pytest.raises(ExpertReadError, match=rf"model-0000\d-of-00003\.safetensors {words}"):
        streaming.wait()
    delivered = streaming.ids
    assert delivered[: len(first)] == first
    assert delivered == answer[: len(delivered)]
    assert len(delivered) < len(answer)
    assert running.engine.status.fault is None
    assert running.reader.health.report(0.0).lost
    running.stop()


def delete(shard: Path) -> None:
    shard.unlink()


def replace_by_another(shard: Path) -> None:
    other = shard.with_suffix(".new")
    other.write_bytes(os.urandom(shard.stat().st_size))
    other.replace(shard)


@pytest.mark.parametrize("act", [delete, replace_by_another])
def test_a_file_that_loses_its_name_is_served_on(
    copied: Checkpoint,
    request_: GenerateRequest,
    answer: tuple[int, ...],
    act: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A download that renames a new file into place changes nothing before the next start."""
    running = StreamingEngine(copied, slots=8)
    for shard in copied.shards:
        act(shard)
    assert ask(running.engine, request_).wait().ids == answer
    told = {record.getMessage() for record in caplog.records if "next start" in record.message}
    assert {str(shard) for shard in copied.shards} == {text.split(" was ")[0] for text in told}
    running.stop()


def test_a_file_that_is_put_back_with_its_time_is_read_again(
    copied: Checkpoint, request_: GenerateRequest, answer: tuple[int, ...]
) -> None:
    running = StreamingEngine(copied, slots=8)
    shard = copied.shards[-1]
    content, before = shard.read_bytes(), shard.stat()
    os.truncate(shard, 100_000)
    with pytest.raises(ExpertReadError):
        ask(running.engine, request_).wait()
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ask(running.engine, replace(request_, request_id="again")).wait().ids == answer
    running.stop()


@pytest.mark.parametrize("schedule", ["layers", "speculate"])
def test_a_slow_volume_shows_that_the_engine_is_alive(
    checkpoint: Checkpoint, chat: Chat, answer: tuple[int, ...], schedule: str
) -> None:
    """One prefill step takes seconds at 8 MB/s; signs of life go on, and the answer is the same."""
    running = with_faults(checkpoint, SlowRead(bytes_per_s=8e6), schedule=schedule)
    request = request_for(checkpoint, chat(STORY), max_tokens=4)
    slow = ask(running.engine, request).wait()
    assert slow.ids == answer[:4]
    before_tokens = [chunk for chunk in slow.chunks if chunk.progress is not None]
    steps = [chunk.progress.engine_steps for chunk in before_tokens if chunk.progress is not None]
    assert len(steps) >= 3
    assert steps == sorted(set(steps))
    running.stop()


def test_a_read_that_does_not_come_back_is_named_while_it_waits(
    tmp_path: Path, checkpoint: Checkpoint, request_: GenerateRequest, answer: tuple[int, ...]
) -> None:
    """The report does not wait for the engine thread, which waits for the read."""
    fault = StalledRead(stall_s=4.0, times=1, once_exists=tmp_path / "now")
    running = with_faults(checkpoint, fault)
    (tmp_path / "now").touch()
    late = ask(running.engine, request_)
    clock, health = SystemClock(), running.reader.health
    give_up_s = clock.monotonic_s() + 60
    while not (report := health.report(clock.monotonic_s())).trouble:
        assert clock.monotonic_s() < give_up_s
        threading.Event().wait(0.02)
    assert "has not come back for" in report.trouble
    assert late.wait().ids == answer
    after = health.report(clock.monotonic_s())
    assert after.troubles == report.troubles == 1
    assert " took 4." in after.trouble
    assert not after.lost
    running.stop()


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    """A replica whose volume is unplugged once `now` exists."""
    plan = tmp_path / "faults.yaml"
    plan.write_text(f"faults: [{{kind: read_error, errno: ENODEV, once_exists: {tmp_path}/now}}]")
    return make_replica(
        tmp_path / "state",
        engine=STREAMING,
        host="host-a",
        injection={"armed": True, "plan": plan},
    )


async def _drain(stream: Any) -> None:
    async for _chunk in stream:
        pass


def test_an_unplugged_volume_leads_from_the_probe_to_a_replacement_that_names_the_file(
    replica: Replica, tmp_path: Path, checkpoint: Checkpoint, chat: Chat
) -> None:
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    assert asyncio.run(replica.probe()).passed
    (tmp_path / "now").touch()
    with pytest.raises(ExpertReadError, match="its volume was taken away"):
        asyncio.run(_drain(replica.generate(request_for(checkpoint, chat(STORY)))))
    told: list[str] = []
    for _ in range(2):
        result = asyncio.run(replica.probe())
        assert (result.passed, result.unreadable, result.got) == (False, True, ())
        told += told_to_leave(fleet_.answer("a", passed=False, unreadable=result.detail))
        seen = replica.snapshot()
        assert seen.state is ReplicaState.READY
        told += told_to_leave(fleet_.says("a", **_storage_of(seen)))
    assert seen.storage_lost
    assert "read_error" in seen.injecting
    assert told == ["a"]
    assert fleet_.state_of("a") is ReplicaState.DRAINING
    [incident] = fleet_.incidents.values()
    assert incident.cause == "storage_fault"
    assert all(".safetensors cannot be read" in text for text in incident.evidence)


def _storage_of(seen: Any) -> dict[str, object]:
    names = ("storage_trouble", "storage_troubles", "storage_lost")
    return {name: getattr(seen, name) for name in names}
