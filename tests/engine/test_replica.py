"""A replica without Ray: its canary, its probes, and what it refuses to become ready on."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.contract.fleet import ReplicaState
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.origin import Origin
from headrace_replicas.replica import Replica
from tests.support.checkpoints import make_checkpoint
from tests.support.device_faults import end_process
from tests.support.engines import request_for
from tests.support.replicas import make_replica

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    return make_replica(tmp_path_factory.mktemp("state"))


def test_an_idle_replica_proves_itself_by_its_canary(replica: Replica) -> None:
    result = asyncio.run(replica.probe())
    assert (result.kind, result.passed, result.got) == ("canary", True, result.expected)
    assert result.replica_id == "abc123"
    assert len(result.got) == 12


def test_a_busy_replica_is_proved_by_its_work(
    replica: Replica, checkpoint: Checkpoint, chat: Chat
) -> None:
    async def probe_while_busy() -> str:
        request = request_for(checkpoint, chat("Tell me a story."), max_tokens=300)
        stream = replica.generate(replace(request, stop_ids=frozenset()))
        async for chunk in stream:
            if chunk.ids:
                break
        kind = (await replica.probe()).kind
        await stream.aclose()
        return kind

    assert asyncio.run(probe_while_busy()) == "work"


def test_the_first_chunk_says_that_the_replica_has_the_request(
    replica: Replica, checkpoint: Checkpoint, chat: Chat
) -> None:
    async def first() -> Any:
        stream = replica.generate(request_for(checkpoint, chat("What is 9 + 9?")))
        chunk = await anext(stream)
        await stream.aclose()
        return chunk

    chunk = asyncio.run(first())
    assert chunk.ids == ()
    assert chunk.progress is not None
    assert chunk.progress.prefill_total_tokens == len(chat("What is 9 + 9?"))


def test_a_replica_that_was_told_to_leave_says_so(tmp_path: Path) -> None:
    leaving = make_replica(tmp_path)
    assert leaving.snapshot().state is ReplicaState.READY
    assert leaving.unhealthy_reason == ""
    leaving.leave("the operator said so")
    leaving.leave("a second reason does not matter")
    assert leaving.unhealthy_reason == "the operator said so"
    assert leaving.snapshot().state is ReplicaState.STOPPING


def test_snapshots_count_up_and_name_process_and_device(replica: Replica) -> None:
    first, second = replica.snapshot(), replica.snapshot()
    assert second.sequence == first.sequence + 1
    assert (first.host, first.device, first.generation) == ("here", 0, 1)
    assert first.rss_bytes > 0


def test_a_replica_that_nobody_asks_probes_itself(tmp_path: Path) -> None:
    lonely = make_replica(tmp_path, fleet={"probe_period_s": 0.05})

    async def watch_for_a_while() -> int:
        watch = asyncio.create_task(lonely.watch_itself())
        before = lonely.snapshot().engine_steps
        async with asyncio.timeout(30):
            while lonely.snapshot().engine_steps < before + 12:  # noqa: ASYNC110  engine thread
                await asyncio.sleep(0.01)
        watch.cancel()
        return lonely.snapshot().engine_steps - before

    assert asyncio.run(watch_for_a_while()) >= 12
    assert lonely.unhealthy_reason == ""


def test_weights_that_changed_since_they_were_verified_never_become_ready(tmp_path: Path) -> None:
    """All sizes and headers are right, so that only the recorded canary can tell."""
    folder = tmp_path / "model"
    make_checkpoint(folder)
    make_replica(tmp_path / "state", model={"path": str(folder)})
    shutil.rmtree(folder)
    make_checkpoint(folder, breaks=("flipped_bytes",))
    with pytest.raises(CheckpointError, match="answers its canary wrongly"):
        make_replica(tmp_path / "state", model={"path": str(folder)})


def test_a_busy_replica_is_asked_for_a_known_answer_too(
    replica: Replica, checkpoint: Checkpoint, chat: Chat
) -> None:
    async def probe_while_busy() -> str:
        request = request_for(checkpoint, chat("Tell me a story."), max_tokens=200)
        chunks = replica.generate(request)
        await anext(chunks)
        result = await replica.probe(exact=True)
        await chunks.aclose()
        assert result.passed
        return result.kind

    assert asyncio.run(probe_while_busy()) == "canary"


def test_a_replica_whose_engine_is_gone_is_unhealthy(
    tmp_path: Path, checkpoint: Checkpoint, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the end of the process itself fail, nothing may look well."""
    import mlx.core as mx

    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    failing = make_replica(tmp_path, options={"origin": Origin(end_process=end_process)})

    def fail(*_args: Any) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang Error")

    async def ask() -> None:
        async with asyncio.timeout(2):
            async for _chunk in failing.generate(request_for(checkpoint, chat("What is 9 + 9?"))):
                monkeypatch.setattr(mx, "async_eval", fail)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    assert not failing.is_alive
    assert "gone" in failing.unhealthy_reason
    assert failing.snapshot().state is ReplicaState.STOPPING
