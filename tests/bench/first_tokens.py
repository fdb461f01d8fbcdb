"""A prompt's way to its first token through the engine: how long, and what it reads on the way."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.requests import SamplingParams, TokenLogprob
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.decode_bench import Work, work_so_far
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.steps import Engine
from tests.bench.decoding import read_through, record_choices
from tests.bench.routing import Trace
from tests.bench.work_clock import WorkClock
from tests.support.engines import Answer, becomes_idle, request_for

# One prompt of the longest bench on a busy machine.
_PATIENCE_S: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """An engine to be started.

    Attributes:
        folder: The checkpoint.
        chunk_tokens: Prompt tokens for each prefill step.
        slots: Experts of a layer in memory; None keeps all.
    """

    folder: Path
    chunk_tokens: int
    slots: int | None = None

    def __call__(self) -> "Served":
        """Start it."""
        return Served(self)


class Served:
    """A running engine in a process of its own.

    Attributes:
        loaded: What it serves.
        engine: The engine.
        chosen: Chosen experts of each call of each layer, in order, where experts stream. (Where
            all are resident some are never computed: a prefill chunk drops its last layer's.)
    """

    def __init__(self, how: Serve) -> None:
        self.checkpoint = read_checkpoint(how.folder)
        self.chosen: list[Any] = []
        self._how = how
        self.engine = Engine(
            load=self._load,
            settings=EngineSettings(
                device="cpu", prefill_chunk_tokens=how.chunk_tokens, schedule="layers"
            ),
            clock=SystemClock(),
        )
        self.loaded = self.engine.start()

    def _load(self) -> LoadedModel:
        if self._how.slots is None:
            return load(self.checkpoint, device="cpu", dtype="auto")
        streaming = Streaming(
            slots=self._how.slots,
            workers=EngineSettings().read_workers,
            clock=SystemClock(),
            on_progress=self.engine.progressed,
        )
        loaded = load(self.checkpoint, device="cpu", dtype="auto", streaming=streaming)
        record_choices(loaded.model, self.chosen)
        return loaded

    @property
    def expert_bytes(self) -> int:
        """What bringing one expert reads, mean of all layers."""
        assert self.loaded.streamed is not None
        streams = self.loaded.streamed.streams
        return sum(stream.expert_bytes for stream in streams) // len(streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """What one prompt gave.

    Attributes:
        ttft_s: Seconds from handing the request to the engine to its first token.
        work_s: Processor time of the engine's threads, and waits for reads: what it would take if
            no other program ran.
        ids: The token.
        logprobs: Its log probability and the best others', bit for bit.
        work: What streaming did for it.
        expert_bytes: What bringing one expert reads; 0 where all are resident.
        touched: Experts of all layers that were chosen; 0 where all are resident.
        needed: The same, counted anew in each call of the model.
    """

    ttft_s: float
    work_s: float
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    work: Work
    expert_bytes: int
    touched: int
    needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Ask for one token.

    Attributes:
        prompt: Token ids.
        cold: Whether the page cache is dropped before; else all files are brought there.
    """

    prompt: Sequence[int]
    cold: bool = False

    def run(self, served: Served) -> First:
        """Ask, and wait until the engine is idle again."""
        self._prepare(served)
        served.chosen.clear()
        before = work_so_far(served.loaded)
        request = request_for(
            served.checkpoint,
            tuple(self.prompt),
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, logprobs=5),
        )
        answer = Answer(patience_s=_PATIENCE_S)
        with WorkClock() as clock:
            began = clock.seconds(), time.perf_counter()
            served.engine.submit(request, answer)
            answer.wait()
            ttft_s, work_s = time.perf_counter() - began[1], clock.seconds() - began[0]
            read_s = (work_so_far(served.loaded) - before).read_s
        if not becomes_idle(served.engine):  # the step that gave the token ends
            raise RuntimeError("the engine did not end its step")
        touched, needed = _used(served)
        streamed = served.loaded.streamed
        return First(
            ttft_s=ttft_s,
            work_s=work_s + read_s,
            ids=answer.ids,
            logprobs=answer.logprobs,
            work=work_so_far(served.loaded) - before,
            expert_bytes=served.expert_bytes if streamed is not None else 0,
            touched=touched,
            needed=needed,
        )

    def _prepare(self, served: Served) -> None:
        for shard in served.checkpoint.shards:
            read_through(shard)
        if self.cold:
            with PageCache(served.checkpoint.shards) as pages:
                pages.drop()


def _used(served: Served) -> tuple[int, int]:
    """Experts that were chosen: each once, and each once for each call."""
    if not served.chosen:
        return 0, 0
    layers = len(expert_layers(served.loaded.model))
    calls = [np.unique(np.array(indices)) for indices in served.chosen]
    touched = sum(np.unique(np.concatenate(calls[layer::layers])).size for layer in range(layers))
    return int(touched), sum(call.size for call in calls)


@dataclass(frozen=True, slots=True)
class PromptRouting:
    """What the last prompt chose, where experts stream."""

    def run(self, served: Served) -> Trace:
        """Shape (tokens, layers, top_k)."""
        layers = len(expert_layers(served.loaded.model))
        calls = [np.array(indices) for indices in served.chosen]
        joined = [
            np.concatenate([call.reshape(-1, call.shape[-1]) for call in calls[layer::layers]])
            for layer in range(layers)
        ]
        return np.stack(joined, axis=1).astype(np.int64)
