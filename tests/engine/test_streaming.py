"""Experts that stream: the engine's answers do not change, and no step waits for a read."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace_replicas.contract.requests import SamplingParams
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.commands import stream_key
from headrace_replicas.engine.experts.pool import _converted
from headrace_replicas.engine.experts.reader import ReadJob
from headrace_replicas.engine.experts.schedule import SCHEDULES
from headrace_replicas.engine.steps import Engine
from tests.support.engines import ask, becomes_idle, request_for, resumed
from tests.support.streaming_engines import StreamingEngine

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
SCENES = [(4, "layers"), (24, "layers"), (4, "overlap"), (20, "overlap"), (20, "speculate")]
STORY = "Tell me a story about a fox named Vera."


@pytest.fixture(scope="module", params=SCENES, ids=str)
def streaming(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[StreamingEngine]:
    running = StreamingEngine(checkpoint, *request.param)
    yield running
    running.stop()


def test_streamed_answers_equal_resident_ones_alone_and_in_a_batch(
    streaming: StreamingEngine, engine: Engine, checkpoint: Checkpoint, chat: Chat
) -> None:
    sampling = SamplingParams(temperature=0.8, logprobs=2)
    requests = [
        request_for(checkpoint, chat(text), request_id=text, seed=i, sampling=sampling)
        for i, text in enumerate((STORY, "Count from 1 to 30.", "What is 9 + 9?"))
    ]
    resident = [ask(engine, request).wait() for request in requests]
    alone = [ask(streaming.engine, request).wait() for request in requests]
    together = [answer.wait() for answer in [ask(streaming.engine, r) for r in requests]]
    for wanted, one, batched in zip(resident, alone, together, strict=True):
        assert one.ids == batched.ids == wanted.ids
        assert one.logprobs == batched.logprobs == wanted.logprobs
    assert streaming.reader.totals.read_bytes > 0


def test_a_stream_moves_between_a_resident_and_a_streaming_engine(
    streaming: StreamingEngine, engine: Engine, checkpoint: Checkpoint, chat: Chat
) -> None:
    request = request_for(checkpoint, chat(STORY), max_tokens=40)
    whole = ask(engine, request).wait()
    for cut in (1, 17, 39):
        rest = ask(streaming.engine, resumed(request, whole.ids[:cut], "fast")).wait()
        assert whole.ids[:cut] + rest.ids == whole.ids


def test_a_cancelled_request_frees_a_streaming_engine(
    streaming: StreamingEngine, checkpoint: Checkpoint, chat: Chat
) -> None:
    request = request_for(checkpoint, chat(STORY * 20), max_tokens=1000)
    answer = ask(streaming.engine, request)
    answer.next()
    streaming.engine.cancel(stream_key(request))
    after = request_for(checkpoint, chat("What is 9 + 9?"), request_id="after", temperature=0.0)
    assert ask(streaming.engine, after).wait().last.finish_reason == "stop"
    assert becomes_idle(streaming.engine)


def test_nothing_is_read_while_the_device_computes(
    streaming: StreamingEngine, checkpoint: Checkpoint, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does an evaluation begin during a read, nor does one hold anything lazily loaded."""
    reads_during_evals: list[str] = []
    for name in ("eval", "async_eval"):
        original: Any = getattr(mx, name)

        def watched(*args: Any, _original: Any = original, _name: str = name) -> Any:
            if streaming.reader.active:
                reads_during_evals.append(_name)
            return _original(*args)

        monkeypatch.setattr(mx, name, watched)
    opened: list[str] = []
    real_open = os.open

    def noted_open(path: Any, *args: Any, **options: Any) -> int:
        if Path(os.fsdecode(path)).is_relative_to(checkpoint.path):
            opened.append(str(path))
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", noted_open)
    before = streaming.reader.totals.read_bytes
    request = request_for(checkpoint, chat(STORY * 3), request_id="watched", seed=99)
    ask(streaming.engine, request).wait()
    assert streaming.reader.totals.read_bytes > before
    assert reads_during_evals == []
    assert opened == []


def test_speculation_needs_several_passes_and_counts_them(
    checkpoint: Checkpoint, chat: Chat
) -> None:
    running = StreamingEngine(checkpoint, slots=16, schedule="speculate")
    ask(running.engine, request_for(checkpoint, chat(STORY), max_tokens=30)).wait()
    counters = running.streamed.counters
    assert counters.speculated >= 29
    assert counters.speculated < counters.passes <= 3 * counters.speculated
    assert 0 < counters.wasted < counters.misses
    running.stop()


@pytest.mark.parametrize("slots", [8, 20])
def test_every_schedule_counts_what_the_same_tokens_need_alike(
    checkpoint: Checkpoint, chat: Chat, slots: int
) -> None:
    """Passes that are done again are no further uses; eight slots often take more than three."""
    needs: dict[str, int] = {}
    for schedule in SCHEDULES:
        running = StreamingEngine(checkpoint, slots=slots, schedule=schedule)
        ask(running.engine, request_for(checkpoint, chat(STORY), max_tokens=20)).wait()
        running.stop()
        counters = running.streamed.counters
        needs[schedule] = counters.hits + counters.misses
    assert len(set(needs.values())) == 1, needs


def test_the_schedule_is_measured_where_nobody_names_one(
    checkpoint: Checkpoint, chat: Chat, engine: Engine
) -> None:
    running = StreamingEngine(checkpoint, slots=16, schedule="auto")
    request = request_for(checkpoint, chat(STORY), max_tokens=20)
    assert ask(running.engine, request).wait().ids == ask(engine, request).wait().ids
    assert running.engine.status.fault is None
    running.stop()


@pytest.mark.parametrize("source", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("target", [mx.bfloat16, mx.float16, mx.float32])
def test_converted_bytes_are_those_that_mlx_converts_to(source: mx.Dtype, target: mx.Dtype) -> None:
    container = {2: mx.uint16, 4: mx.uint32}
    held = mx.random.normal((257,), key=mx.random.key(3)).astype(source)
    raw = bytearray(np.array(held.view(container[source.size])).tobytes())
    wanted = np.array(held.astype(target).view(container[target.size])).tobytes()
    assert _converted(raw, source, target).tobytes() == wanted


def test_read_jobs_of_one_expert_cover_exactly_its_bytes(checkpoint: Checkpoint) -> None:
    running = StreamingEngine(checkpoint, slots=8)
    stream = running.streamed.streams[0]
    jobs: list[ReadJob] = [pool.job(3, 1) for pool in stream._pools]
    assert sum(len(job.target) for job in jobs) == stream.expert_bytes
    assert len(jobs) == 9
    running.stop()
