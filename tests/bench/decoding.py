"""Decode steps of one loaded model: what they take, what they read, and what they answer."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.decode_bench import Work, work_so_far
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.preload import preload
from headrace_replicas.engine.experts.read_rates import ReadRates, measure_reads
from headrace_replicas.engine.experts.schedule import Schedule, measured, with_schedule
from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from tests.bench.routing import Trace
from tests.bench.work_clock import WorkClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a subject gets its model.

    Attributes:
        folder: The checkpoint.
        by: Our loader, or mlx-lm's own with the compute type that ours picks on a CPU.
        slots: Experts of a layer in memory; None keeps all.
        records: Whether it notes which experts are chosen.
    """

    folder: Path
    by: Literal["headrace", "mlx-lm"] = "headrace"
    slots: int | None = None
    records: bool = False

    def __call__(self) -> "Subject":
        """Load it."""
        return Subject(self)


class Subject:
    """One model in a process of its own.

    Attributes:
        loaded: What our loader gives; None by mlx-lm's.
        model: mlx-lm's model.
        pages: What the system keeps in memory of the checkpoint.
        chosen: Chosen experts of each call of each layer, in order; shape (batch, tokens, top_k).
        before_bytes: Memory of the process before the model was loaded.
    """

    def __init__(self, how: Load) -> None:
        mx.set_default_device(mx.cpu)
        mx.set_cache_limit(EngineSettings().cache_limit_bytes)
        self.before_bytes = psutil.Process().memory_info().rss
        self.checkpoint = read_checkpoint(how.folder)
        self.pages = PageCache(self.checkpoint.shards)
        self.loaded = None if how.by == "mlx-lm" else self._ours(how)
        self.model: Any = self.loaded.model if self.loaded else self._mlx_lm(how)
        self.chosen: list[Any] = []
        self.cache: list[Any] = make_prompt_cache(self.model)
        if how.records:
            record_choices(self.model, self.chosen)

    @property
    def streamed(self) -> StreamedModel | None:
        """What streams the experts; None when they are resident."""
        return self.loaded.streamed if self.loaded else None

    @property
    def work(self) -> Work:
        """What streaming has done so far."""
        return work_so_far(self.loaded) if self.loaded else Work()

    def _ours(self, how: Load) -> LoadedModel:
        streaming = None
        if how.slots is not None:
            streaming = Streaming(
                slots=how.slots,
                workers=EngineSettings().read_workers,
                clock=SystemClock(),
                on_progress=lambda: None,
            )
        return load(self.checkpoint, device="cpu", dtype="auto", streaming=streaming)

    def _mlx_lm(self, how: Load) -> Any:
        model: Any = load_model(how.folder)[0]
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model


def record_choices(model: Any, chosen: list[Any]) -> None:
    """Let every expert layer of a model note the experts that it is called with."""
    for layer in expert_layers(model):
        kind: Any = type(layer.module)

        def call(self: Any, x: Any, indices: Any, _kind: Any = kind) -> Any:
            chosen.append(indices)
            return _kind.__call__(self, x, indices)

        layer.module.__class__ = type(f"Recorded{kind.__name__}", (kind,), {"__call__": call})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What feeding some tokens gave.

    Attributes:
        wall_s: Seconds, without dropping pages.
        work_s: Processor time of the engine's threads, and waits for reads: what it would take if
            no other program ran.
        logits: A digest of each token's logits.
        work: What streaming did.
    """

    wall_s: float
    work_s: float
    logits: tuple[str, ...]
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Feed tokens one by one, and wait for each one's logits.

    Attributes:
        tokens: What is fed does not depend on the answers, so that all subjects do the same.
        cold: Whether the page cache is dropped before each token.
        schedule: Of a model that streams.
    """

    tokens: Sequence[int]
    cold: bool = False
    schedule: Schedule = "layers"

    def run(self, subject: Subject) -> Fed:
        """Feed them."""
        model = subject.model
        if subject.streamed is not None:
            model = with_schedule(model, subject.streamed, self.schedule)
        before = subject.work
        wall_s = work_s = 0.0
        digests: list[str] = []
        with WorkClock() as clock:
            for token in self.tokens:
                if self.cold:
                    subject.pages.drop()
                began = clock.seconds(), time.perf_counter()
                logits = model(mx.array([[token]]), cache=subject.cache)
                mx.eval(logits)
                wall_s += time.perf_counter() - began[1]
                work_s += clock.seconds() - began[0]
                raw = np.array(logits).tobytes()
                digests.append(hashlib.blake2b(raw, digest_size=8).hexdigest())
        work = subject.work - before
        return Fed(
            wall_s=wall_s,
            work_s=work_s + work.read_s,
            logits=tuple(digests),
            work=work,
        )


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin a new text; slots keep what they hold."""

    def run(self, subject: Subject) -> None:
        """Drop the KV cache and what was recorded."""
        subject.cache = make_prompt_cache(subject.model)
        subject.chosen.clear()


@dataclass(frozen=True, slots=True)
class Settle:
    """Fill all slots, as they are in an engine that has served, and bring all files to memory."""

    def run(self, subject: Subject) -> None:
        """Do both."""
        for shard in subject.checkpoint.shards:
            read_through(shard)
        if subject.streamed is not None:
            fitting = [range(stream.capacity) for stream in subject.streamed.streams]
            preload(subject.streamed, fitting)


def read_through(file: Path) -> None:
    """Have the system read a whole file, so that it is in the page cache."""
    with file.open("rb", buffering=0) as opened:
        while opened.read(1 << 24):
            pass


@dataclass(frozen=True, slots=True)
class Routing:
    """What was recorded since the restart, of tokens that were fed one by one."""

    def run(self, subject: Subject) -> Trace:
        """Shape (tokens, layers, top_k)."""
        layers = len(expert_layers(subject.model))
        chosen = [np.array(indices).reshape(-1) for indices in subject.chosen]
        return np.array(chosen, dtype=np.int64).reshape(-1, layers, chosen[0].size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What a process takes.

    Attributes:
        arrays_bytes: All arrays that MLX keeps.
        weights_bytes: Those of them that are the model's parameters, slots among them.
        cache_bytes: The KV cache.
        freed_bytes: Freed memory that MLX's allocator keeps.
        grown_bytes: Growth of the process (resident set) since before the load.
        peak_arrays_bytes: The most that arrays took at a time, the load included.
    """

    arrays_bytes: int
    weights_bytes: int
    cache_bytes: int
    freed_bytes: int
    grown_bytes: int
    peak_arrays_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What the process takes now."""

    def run(self, subject: Subject) -> MemoryUse:
        """Measure it."""
        weights: Any = tree_flatten(subject.model.parameters())
        return MemoryUse(
            arrays_bytes=mx.get_active_memory(),
            weights_bytes=sum(array.nbytes for _, array in weights),
            cache_bytes=sum(layer.nbytes for layer in subject.cache),
            freed_bytes=mx.get_cache_memory(),
            grown_bytes=psutil.Process().memory_info().rss - subject.before_bytes,
            peak_arrays_bytes=mx.get_peak_memory(),
        )


@dataclass(frozen=True, slots=True)
class PickSchedule:
    """What `engine.schedule = auto` picks here."""

    def run(self, subject: Subject) -> Schedule:
        """Let it measure."""
        assert subject.streamed is not None
        return measured(subject.model, subject.streamed, SystemClock())


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """What reading experts takes here.

    Attributes:
        rates: How fast they come.
        expert_bytes: What bringing one reads.
    """

    rates: ReadRates
    expert_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """From the disk, cold, at the depth that is fastest."""
        assert self.rates.ssd is not None
        return self.rates.ssd.bytes_per_s

    def __str__(self) -> str:
        cold = ", ".join(f"{r.bytes_per_s / 1e6:.0f} ({r.at_once})" for r in self.rates.cold)
        return (
            f"disk: {cold} MB/s cold for so many experts of {self.expert_bytes / 1e6:.2f} MB at "
            f"once, {self.rates.warm.bytes_per_s / 1e6:.0f} from the page cache"
        )


@dataclass(frozen=True, slots=True)
class MeasureDisk:
    """Read experts of a model that streams, as the engine does."""

    def run(self, subject: Subject) -> Disk:
        """Measure it; slots are left alone."""
        assert subject.streamed is not None
        rates = measure_reads(
            subject.streamed,
            workers=EngineSettings().read_workers,
            clock=SystemClock(),
            pages=subject.pages,
        )
        return Disk(rates=rates, expert_bytes=subject.streamed.streams[0].expert_bytes)
