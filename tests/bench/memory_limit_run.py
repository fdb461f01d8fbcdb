"""One engine that plans its own memory, serves some requests, and tells what it took.

    python -m tests.bench.memory_limit_run '{"folder": ..., ...}'

Started inside a memory limit by `tests.bench.memory_limit`; prints one line of JSON.
"""

import json
import os
import queue
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import TokenChunk
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.budget import draw_up
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.footprint import HostMemory
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.steps import Engine
from tests.support.engines import request_for
from tests.support.proc_status import status_bytes

# Longer than any answer takes on a host that is busy with other work; a hang ends the run.
_PATIENCE_S: Final = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is served.

    Attributes:
        folder: The checkpoint.
        slots: `engine.slots`.
        context_tokens: `model.context_tokens`.
        max_batch: `engine.max_batch`.
        prefill_chunk_tokens: `engine.prefill_chunk_tokens`.
        cache_limit_bytes: `engine.cache_limit_bytes`.
        rounds: Prompt lengths of the requests that run together, round after round.
        new_tokens: Tokens of each answer.
    """

    folder: str
    slots: str = "auto"
    context_tokens: int = 512
    max_batch: int = 3
    prefill_chunk_tokens: int = 128
    cache_limit_bytes: int = 8 * 2**20
    rounds: Sequence[Sequence[int]] = ((150,), (100, 60, 20))
    new_tokens: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a workload gave and took.

    Attributes:
        plan: The engine's memory plan, as plain data.
        answers: Token ids of each request.
        process_bytes: Anonymous memory of the process when it made its plan.
        loaded_bytes: What MLX held after loading.
        serving_bytes: What it held at its peak, on top of that.
        kept_bytes: Freed memory in its cache at the end.
        disk_bytes: Bytes that came from the disk, not from pages in memory.
        hit_ratio: Needed experts that were in their slots.
        first_misses: Experts read by the first round, in a layer on average.
    """

    plan: dict[str, Any]
    answers: list[list[int]]
    process_bytes: int
    loaded_bytes: int
    serving_bytes: int
    kept_bytes: int
    disk_bytes: int
    hit_ratio: float
    first_misses: float


@dataclass(slots=True)
class _Start:
    """What is known of an engine once it has planned."""

    plan: list[MemoryPlan] = field(default_factory=list)
    process_bytes: int = 0


def serve(workload: Workload) -> Served:
    """Plan, load, and answer everything that is asked."""
    checkpoint = read_checkpoint(Path(workload.folder))
    settings = EngineSettings(
        device="cpu",
        slots=workload.slots,
        max_batch=workload.max_batch,
        prefill_chunk_tokens=workload.prefill_chunk_tokens,
        cache_limit_bytes=workload.cache_limit_bytes,
    )
    start = _Start()

    def planned() -> LoadedModel:
        start.process_bytes = status_bytes("RssAnon")
        start.plan.append(_plan(checkpoint, settings, workload.context_tokens))
        return _load(checkpoint, settings, start.plan[0])

    engine = Engine(load=planned, settings=settings, clock=SystemClock())
    loaded = engine.start()
    loaded_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    answers = _answers(engine, checkpoint, workload.rounds[:1], workload.new_tokens)
    streamed = loaded.streamed
    first = 0.0 if streamed is None else streamed.counters.misses / len(streamed.streams)
    answers += _answers(engine, checkpoint, workload.rounds[1:], workload.new_tokens)
    engine.stop()
    return Served(
        plan=asdict(start.plan[0]) | {"total_bytes": start.plan[0].total_bytes},
        answers=answers,
        process_bytes=start.process_bytes,
        loaded_bytes=loaded_bytes,
        serving_bytes=mx.get_peak_memory() - loaded_bytes,
        kept_bytes=mx.get_cache_memory(),
        disk_bytes=_from_disk(),
        hit_ratio=1.0 if streamed is None else streamed.counters.hit_ratio,
        first_misses=first,
    )


def _plan(checkpoint: Checkpoint, settings: EngineSettings, context_tokens: int) -> MemoryPlan:
    host = _within_data_limit()
    return draw_up(
        checkpoint, settings, context_tokens=context_tokens, on_gpu=False, host=host
    ).plan


def _load(checkpoint: Checkpoint, settings: EngineSettings, plan: MemoryPlan) -> LoadedModel:
    streaming = Streaming(
        slots=plan.slots_per_layer,
        workers=settings.read_workers,
        clock=SystemClock(),
        on_progress=lambda: None,
    )
    return load(
        checkpoint, device="cpu", dtype="auto", streaming=streaming if plan.streams else None
    )


def _answers(
    engine: Engine, checkpoint: Checkpoint, rounds: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    answers: list[list[int]] = []
    for number, lengths in enumerate(rounds):
        draw = np.random.default_rng(list(lengths))
        together: list[queue.SimpleQueue[TokenChunk | HeadraceError]] = []
        for place, length in enumerate(lengths):
            prompt = tuple(draw.integers(1, checkpoint.vocab_size - 1, length).tolist())
            request = request_for(
                checkpoint, prompt, request_id=f"{number}.{place}", max_tokens=new_tokens
            )
            together.append(queue.SimpleQueue())
            engine.submit(request, together[-1].put)
        answers += [_collected(arrived) for arrived in together]
    return answers


def _collected(arrived: "queue.SimpleQueue[TokenChunk | HeadraceError]") -> list[int]:
    """All tokens of an answer. A cold disk and other work on the host may make it slow."""
    ids: list[int] = []
    while True:
        item = arrived.get(timeout=_PATIENCE_S)
        if isinstance(item, HeadraceError):
            raise item
        ids += item.ids
        if item.finish_reason is not None:
            return ids


def _within_data_limit() -> HostMemory | None:
    """What RLIMIT_DATA leaves, which plans know nothing of; None where it is not set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return None
    room = limit - status_bytes("VmData")
    return HostMemory(limit_bytes=room, total_bytes=limit, source="what RLIMIT_DATA leaves")


def _from_disk() -> int:
    found = re.search(r"(?m)^read_bytes: (\d+)$", Path("/proc/self/io").read_text())
    return int(found[1]) if found else 0


if __name__ == "__main__":
    print(json.dumps(asdict(serve(Workload(**json.loads(sys.argv[1]))))), flush=True)
    # As a replica ends: MLX's threads are not asked to.
    os._exit(0)
