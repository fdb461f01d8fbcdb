"""Slots that shrink and grow while an engine serves: nobody sees it in an answer."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.experts.governor import QUIET_S
from headrace_replicas.engine.experts.schedule import SCHEDULES
from headrace_replicas.engine.footprint import HostPressure
from headrace_replicas.engine.steps import Engine
from tests.support.engines import ask, request_for
from tests.support.replicas import STREAMING, make_replica
from tests.support.shared_host import SharingEngine, wait_until

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
STORY = "Tell me a story about a fox named Vera."
PLANNED, TOP_K = 24, 4


@pytest.fixture(params=SCHEDULES)
def sharing(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[SharingEngine]:
    running = SharingEngine(checkpoint, slots=PLANNED, top_k=TOP_K, schedule=request.param)
    yield running
    running.engine.stop()


def test_answers_stay_the_same_with_fewer_slots_and_with_more_again(
    sharing: SharingEngine, engine: Engine, checkpoint: Checkpoint, chat: Chat
) -> None:
    """Between requests, down to one token's experts, half the way back, and up to the plan."""
    request = request_for(checkpoint, chat(STORY), max_tokens=24)
    wanted = ask(engine, request).wait().ids
    assert ask(sharing.engine, request).wait().ids == wanted
    sharing.others_take(1000)
    sharing.wait_for_slots(TOP_K)
    assert ask(sharing.engine, request).wait().ids == wanted
    sharing.others_take(10)
    sharing.quiet_time()
    sharing.wait_for_slots(PLANNED - 10)
    assert ask(sharing.engine, request).wait().ids == wanted
    assert "left for a headroom of" in sharing.keeper.report.reason
    sharing.others_take(0)
    sharing.quiet_time()
    sharing.wait_for_slots(PLANNED)
    assert ask(sharing.engine, request).wait().ids == wanted
    assert (sharing.keeper.report.resizes, sharing.keeper.report.reason) == (3, "")


def test_neither_shrink_nor_growth_waits_for_the_end_of_an_answer(
    sharing: SharingEngine,
    engine: Engine,
    checkpoint: Checkpoint,
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests may never leave a gap; and the device is not drained for it."""
    request = replace(request_for(checkpoint, chat(STORY), max_tokens=40), stop_ids=frozenset())
    wanted = ask(engine, request).wait().ids
    running_at: list[tuple[int, int]] = []

    def script() -> Iterator[None]:
        while not sharing.engine.status.running:
            yield
        for others, slots in ((12, PLANNED - 12), (0, PLANNED)):
            sharing.others_take(others)
            yield  # there is room from here on, or none
            yield
            sharing.clock.leap(QUIET_S)
            while sharing.keeper.report.slots != slots:
                yield
            running_at.append((slots, sharing.engine.status.running))

    calls = counted_calls(monkeypatch, "synchronize", "clear_cache")
    sharing.host.script = script()
    assert ask(sharing.engine, request).wait().ids == wanted
    assert running_at == [(PLANNED - 12, 1), (PLANNED, 1)]
    assert calls == []


def counted_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Names of MLX's functions as they are called from now on."""
    calls: list[str] = []
    for name in names:
        original: Any = getattr(mx, name)

        def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            return _original(*args)

        monkeypatch.setattr(mx, name, counted)
    return calls


def test_what_fits_into_the_headroom_moves_nothing(sharing: SharingEngine) -> None:
    sharing.others_take(3.5)
    sharing.wait_for_reading()
    assert sharing.keeper.report.resizes == 0


def test_a_host_that_stops_telling_leaves_the_slots_and_the_engine_alone(
    checkpoint: Checkpoint, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and watched again when it tells."""
    running = SharingEngine(checkpoint, slots=PLANNED, top_k=TOP_K)
    tells = running.keeper._read

    def silent() -> HostPressure:
        running.host.readings += 1
        raise MemoryPlanError("/proc/meminfo cannot be read: Too many open files")

    caplog.set_level(logging.WARNING)
    running.keeper._read = silent
    running.wait_for_reading()
    running.wait_for_reading()
    request = request_for(checkpoint, chat("What is 9 + 9?"), temperature=0.0)
    assert ask(running.engine, request).wait().last.finish_reason == "stop"
    said = [record.message for record in caplog.records]
    assert said == [
        "the host's memory is not watched: /proc/meminfo cannot be read: Too many open files"
    ]
    running.keeper._read = tells
    running.others_take(12)
    running.wait_for_slots(PLANNED - 12)
    running.engine.stop()


def test_a_replica_tells_what_became_of_its_slots(
    tmp_path: Path, checkpoint: Checkpoint, chat: Chat
) -> None:
    level = "normal"

    def pressure() -> HostPressure:
        return HostPressure(available_bytes=2**40, source="a Mac of the test's", level=level)  # type: ignore[arg-type]

    engine_settings = {**STREAMING, "memory_check_s": 0.005}
    replica = make_replica(tmp_path, engine=engine_settings, options={"pressure": pressure})
    before = replica.snapshot()
    assert (before.expert_slots, before.expert_slots_planned) == (8, 8)
    assert (before.expert_slots_reason, before.expert_resizes) == ("", 0)
    level = "critical"
    wait_until(lambda: replica.snapshot().expert_resizes > 0)
    after = replica.snapshot()
    assert (after.expert_slots, after.expert_slots_planned) == (4, 8)
    assert after.expert_slots_reason.endswith("the system's level of pressure is critical")
    assert asyncio.run(replica.probe()).passed
