"""Runs one checkpoint resident and streamed with fewer and fewer slots, and compares every bit."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.preload import preload
from headrace_replicas.engine.experts.reader import ReadTotals
from headrace_replicas.engine.experts.schedule import with_schedule
from headrace_replicas.engine.experts.seam import ExpertLayer, expert_layers
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.safetensors_header import read_header
from tests.streaming.model_configs import EXPERTS, Architecture
from tests.streaming.subject import Subject
from tests.streaming.tiny_checkpoints import Mode, Written
from tests.streaming.verdicts import Outcome, Resident, Setting, Verdict

_READERS: Final = 2
# A model that chooses fewer of its experts than this proves little.
_LEAST_HIT_SHARE: Final = 0.5


def settings(architecture: Architecture, mode: Mode) -> tuple[Setting, ...]:
    """All experts, half, a quarter, and as few as one token needs.

    With a quarter, reads overlap. Speculation is tried where most tokens end in it. Dense models
    also try what packing does not change: all experts, and speculation where most batches need more
    experts than fit.
    """
    half, quarter = Setting(slots=EXPERTS // 2), Setting(slots=EXPERTS // 4, schedule="overlap")
    tried = [half, quarter]
    if not architecture.metal_only:
        tried.append(replace(half, schedule="speculate"))
    if mode.packing is None:
        tried.insert(0, Setting(slots=EXPERTS))
        if not architecture.metal_only:
            tried.append(replace(quarter, schedule="speculate"))
    return (*tried, Setting(slots=architecture.top_k))


def compare(architecture: Architecture, mode: Mode, written: Written, what: str = "") -> Verdict:
    """Run a checkpoint resident, then streamed in each setting.

    Before the last run everything in the files that is no expert is overwritten, after loading:
    what was not read by then comes out wrong. The checkpoint is of no use afterwards.
    """
    checkpoint = read_checkpoint(written.folder)
    resident = run_resident(architecture, mode, checkpoint)
    outcomes = []
    chosen = settings(architecture, mode)
    for setting in chosen:
        with loaded(checkpoint, mode, setting.slots) as streamed:
            if setting is chosen[-1]:
                spoil_others(checkpoint, written.expert_tensors)
            outcomes.append(run_streamed(architecture, streamed, setting, resident, written))
    return Verdict(
        what=what or architecture.module,
        mode=mode.name,
        hit_share=resident.hit_share,
        outcomes=tuple(outcomes),
        faults=tuple(_weaknesses(resident)),
    )


def compare_bytes(architecture: Architecture, mode: Mode, written: Written) -> Verdict:
    """Bring half of the experts into slots, and compare them with the resident ones unused."""
    checkpoint = read_checkpoint(written.folder)
    half = EXPERTS // 2
    with loaded(checkpoint, mode, None) as resident, loaded(checkpoint, mode, half) as streamed:
        assert streamed.streamed is not None
        whole, pools = expert_layers(resident.model), expert_layers(streamed.model)
        # The last named comes into the first slot.
        wanted = range(EXPERTS - 1, half - 1, -1)
        missed = preload(streamed.streamed, [wanted for _ in streamed.streamed.streams])
        pairs = [
            (f"{layer.path}.{one.projection}.{one.name}", one.array[half:], pool.array)
            for layer, pooled in zip(whole, pools, strict=True)
            for one, pool in zip(layer.tensors, pooled.tensors, strict=True)
        ]
        differing = [f"{name} differs" for name, one, other in pairs if not _same(one, other)]
    outcome = Outcome(
        setting=Setting(slots=half),
        equal=len(pairs) - len(differing),
        compared=len(pairs),
        missed=missed,
        faults=tuple(differing),
    )
    return Verdict(
        what=f"{architecture.module}, {mode.name} (bytes only)",
        mode=mode.name,
        hit_share=1.0,
        outcomes=(outcome,),
        faults=(),
    )


def _weaknesses(resident: Resident) -> Iterator[str]:
    if resident.hit_share < _LEAST_HIT_SHARE:
        yield f"the prompt chose only {resident.hit_share:.0%} of a layer's experts"
    for name, logits in resident.results.items():
        if not mx.all(mx.isfinite(logits)).item():
            yield f"{name} is not finite"


@contextmanager
def loaded(checkpoint: Checkpoint, mode: Mode, slots: int | None) -> Iterator[LoadedModel]:
    """The product's own loading; None keeps all experts in memory."""
    streaming = None
    if slots is not None:
        streaming = Streaming(
            slots=slots, workers=_READERS, clock=SystemClock(), on_progress=lambda: None
        )
    result = load(checkpoint, device="cpu", dtype=mode.computed, streaming=streaming)
    try:
        yield result
    finally:
        if result.streamed is not None:
            result.streamed.reader.close()


def run_resident(architecture: Architecture, mode: Mode, checkpoint: Checkpoint) -> Resident:
    """Run it with everything in memory, and note which experts each call chooses."""
    with loaded(checkpoint, mode, None) as resident:
        layers = expert_layers(resident.model)
        calls: list[frozenset[int]] = []
        for layer in layers:
            _watch(layer, calls.append)
        subject = Subject(architecture, resident.model)
        prefill = subject.prefill()
        in_prefill = tuple(calls)
        decoded = subject.decode()
        needs = sum(map(len, calls))
        return Resident(
            results=_named(prefill, decoded, subject),
            prefill_needs=sum(map(len, in_prefill)),
            needs=needs,
            hit_share=min(map(len, in_prefill)) / EXPERTS,
            ranges_per_expert=len(layers[0].tensors),
            layers=len(in_prefill),
        )


def _named(prefill: mx.array, decoded: Sequence[mx.array], subject: Subject) -> dict[str, mx.array]:
    """All results by what they are; those that nobody counts reads for are made here."""
    parts = {
        "decode step": decoded,
        "waiting result": subject.wait(),
        "sequence of the batch": subject.batch(),
    }
    numbered = {
        f"{name} {number}": one for name, part in parts.items() for number, one in enumerate(part)
    }
    return {"prefill": prefill, **numbered}


def _watch(layer: ExpertLayer, note: Callable[[frozenset[int]], None]) -> None:
    kind = type(layer.module)

    def call(self: Any, x: mx.array, indices: mx.array) -> Any:
        note(frozenset(np.unique(np.array(indices)).tolist()))
        return kind.__call__(self, x, indices)

    layer.module.__class__ = type(f"Watched{kind.__name__}", (kind,), {"__call__": call})


def run_streamed(
    architecture: Architecture,
    streamed: LoadedModel,
    setting: Setting,
    resident: Resident,
    written: Written,
) -> Outcome:
    """Run it with slots, count what is read, and compare."""
    assert streamed.streamed is not None
    counters, reader = streamed.streamed.counters, streamed.streamed.reader
    model: Any = with_schedule(streamed.model, streamed.streamed, setting.schedule)
    subject = Subject(architecture, model)
    prefill = subject.prefill()
    in_prefill, read = counters.misses, reader.totals
    decoded = subject.decode()
    missed, seen = counters.misses, counters.misses + counters.hits
    results = _named(prefill, decoded, subject)
    differing = [
        f"{name} differs" for name, one in resident.results.items() if not _same(one, results[name])
    ]
    laws = list(_sizes(streamed, setting.slots))
    if setting.slots >= EXPERTS:
        laws.extend(["experts were read although all fit"] if seen else [])
    else:
        laws.extend(_reads(resident, written, in_prefill, read))
    if seen != resident.needs and setting.slots < EXPERTS and setting.schedule != "speculate":
        laws.append(f"{resident.needs} experts were needed and {seen} looked up")
    return Outcome(
        setting=setting,
        equal=len(results) - len(differing),
        compared=len(results),
        missed=missed,
        faults=(*differing, *laws),
    )


def _same(one: mx.array, other: mx.array) -> bool:
    return one.dtype == other.dtype and bool(mx.array_equal(one, other).item())


def _reads(resident: Resident, written: Written, missed: int, read: ReadTotals) -> Iterator[str]:
    """The prompt reads each expert that it needs once in each layer, and not a byte more."""
    if missed != resident.prefill_needs:
        yield f"the prompt needs {resident.prefill_needs} experts and brought {missed}"
    if read.jobs != missed * resident.ranges_per_expert:
        yield f"{read.jobs} ranges were read for {missed} experts"
    if read.read_bytes != missed * written.bytes_per_expert(resident.layers):
        yield f"{read.read_bytes} bytes were read for {missed} experts"


def _sizes(streamed: LoadedModel, slots: int) -> Iterator[str]:
    for layer in expert_layers(streamed.model):
        if layer.experts != min(slots, EXPERTS):
            yield f"{layer.path} holds {layer.experts} experts in memory"


def spoil_others(checkpoint: Checkpoint, expert_tensors: frozenset[str]) -> None:
    """Overwrite every tensor in the files that no expert is made of.

    The files keep their times: an engine does not use a file that was written to.
    """
    for shard in checkpoint.shards:
        kept = shard.stat()
        with shard.open("r+b") as file:
            for name, entry in read_header(shard).tensors.items():
                if name not in expert_tensors:
                    file.seek(entry.start)
                    file.write(b"\xff" * entry.size_bytes)
        os.utime(shard, ns=(kept.st_atime_ns, kept.st_mtime_ns))
