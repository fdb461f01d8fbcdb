"""Decode with streamed experts beside the resident model, in one run.

    python -m tests.bench.streaming FOLDER [--shape half-qwen3-30b|small] [--device gpu|cpu]

Builds the model in FOLDER when it is not there. Prints, for each share of experts in memory and
each schedule: tokens a second as a ratio of resident, hit ratio, bytes read a token, passes, what
was waited for, and the share of the bound min(SSD / bytes missed, resident); warm and cold. Fails
only when a token differs from the resident model's.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob
from headrace_replicas.engine.experts.schedule import SCHEDULES, with_schedule
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from tests.bench.generated_model import HALF_QWEN3_30B, Shape, make_model

SHAPES = {
    "half-qwen3-30b": HALF_QWEN3_30B,
    "small": Shape(layers=6, hidden=512, experts=64, top_k=4, expert_hidden=384),
}
SHARES = (0.5, 0.25, 0.125)
WARM_TOKENS = 24
TOKENS = 32
COLD_TOKENS = 8
WORKERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What some decode steps did.

    Attributes:
        rate: Tokens a second, dropping of the page cache not counted.
        chosen: The most likely token of each step.
        read_bytes: Bytes read a token.
        read_s: Seconds of waiting for reads, a token.
        gate_s: Seconds of waiting for gates, a token.
        hit_ratio: Of the experts needed.
        passes: Passes a token; 0 layer by layer.
    """

    rate: float
    chosen: tuple[int, ...]
    read_bytes: float = 0.0
    read_s: float = 0.0
    gate_s: float = 0.0
    hit_ratio: float = 1.0
    passes: float = 0.0


def decode(model: Any, loaded: LoadedModel, tokens: Sequence[int], *, cold: bool) -> Run:
    """Feed tokens one by one after a warm-up; what is fed does not depend on the answers."""
    cache = make_prompt_cache(loaded.model)
    for token in tokens[:WARM_TOKENS]:
        mx.eval(model(mx.array([[token]]), cache=cache))
    before = _totals(loaded)
    chosen: list[Any] = []
    spent_s = 0.0
    fed = tokens[WARM_TOKENS : WARM_TOKENS + (COLD_TOKENS if cold else TOKENS)]
    for token in fed:
        if cold and loaded.streamed is not None:
            loaded.streamed.reader.drop_page_cache()
        began_s = time.perf_counter()
        best = mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1])
        mx.eval(best)
        spent_s += time.perf_counter() - began_s
        chosen.append(best.tolist())
    done = {name: value - before[name] for name, value in _totals(loaded).items()}
    needed = done["hits"] + done["misses"]
    count = len(fed)
    return Run(
        rate=count / spent_s,
        chosen=tuple(chosen),
        read_bytes=done["read_bytes"] / count,
        read_s=done["read_s"] / count,
        gate_s=done["gate_s"] / count,
        hit_ratio=done["hits"] / needed if needed else 1.0,
        passes=done["passes"] / count,
    )


def _totals(loaded: LoadedModel) -> dict[str, float]:
    if loaded.streamed is None:
        return dict.fromkeys(("hits", "misses", "read_bytes", "read_s", "gate_s", "passes"), 0.0)
    counters, totals = loaded.streamed.counters, loaded.streamed.reader.totals
    return {
        "hits": counters.hits,
        "misses": counters.misses,
        "read_bytes": totals.read_bytes,
        "read_s": totals.busy_s,
        "gate_s": counters.gate_wait_s,
        "passes": counters.passes,
    }


def ssd_bytes_per_s(reader: RangeReader, checkpoint: Checkpoint, record_bytes: int) -> float:
    """Cold random reads of records, as many at a time as the engine makes."""
    generator = np.random.default_rng(5)
    sizes = [shard.stat().st_size for shard in checkpoint.shards]
    jobs = []
    for _ in range(256):
        file = int(generator.integers(len(sizes)))
        offset = int(generator.integers(max(1, sizes[file] - record_bytes)))
        jobs.append(ReadJob(file, offset, memoryview(bytearray(record_bytes))))
    reader.drop_page_cache()
    began_s = time.perf_counter()
    reader.read(jobs)
    return sum(len(job.target) for job in jobs) / (time.perf_counter() - began_s)


def main() -> int:
    """Run the sweep and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if not (options.folder / "config.json").exists():
        make_model(options.folder, shape)
    checkpoint = read_checkpoint(options.folder)
    print(f"{shape}, {checkpoint.tensor_bytes / 1e9:.2f} GB, {options.device}")
    tokens = np.random.default_rng(1).integers(1, shape.vocabulary, 4096).tolist()
    resident = load(checkpoint, device=options.device, dtype="auto")
    decode(resident.model, resident, tokens[1000:], cold=False)  # compiles kernels
    reference = decode(resident.model, resident, tokens, cold=False)
    del resident
    print(f"resident: {reference.rate:.1f} tok/s, {mx.get_active_memory() / 1e9:.2f} GB kept")
    print(
        f"{'slots':>6} {'schedule':<10} {'':<5} {'tok/s':>7} {'of resident':>11} {'hit':>6} "
        f"{'MB/token':>9} {'passes':>7} {'reads ms':>9} {'gates ms':>9} {'of bound':>9}  same"
    )
    differing = 0
    for share in SHARES:
        slots = max(shape.top_k, int(shape.experts * share))
        differing += _sweep(checkpoint, options.device, share, slots, tokens, reference)
    print(f"streaming: {differing} tokens differ from the resident model's")
    return 1 if differing else 0


def _sweep(
    checkpoint: Checkpoint,
    device: Any,
    share: float,
    slots: int,
    tokens: Sequence[int],
    reference: Run,
) -> int:
    streaming = Streaming(
        slots=slots, workers=WORKERS, clock=SystemClock(), on_progress=lambda: None
    )
    loaded = load(checkpoint, device=device, dtype="auto", streaming=streaming)
    assert loaded.streamed is not None
    record_bytes = loaded.streamed.streams[0].expert_bytes
    disk = ssd_bytes_per_s(loaded.streamed.reader, checkpoint, record_bytes // 3)
    differing = 0
    for schedule in SCHEDULES:
        model = with_schedule(loaded.model, loaded.streamed, schedule)
        for cold in (False, True):
            # Other tokens before, so that the slots do not hold what is asked for by chance.
            decode(model, loaded, tokens[1000:], cold=False)
            run = decode(model, loaded, tokens, cold=cold)
            same = sum(a == b for a, b in zip(run.chosen, reference.chosen, strict=False))
            differing += len(run.chosen) - same
            limit = disk / run.read_bytes if run.read_bytes else reference.rate
            bound = min(limit, reference.rate) if cold else reference.rate
            print(
                f"{share:>6.1%} {schedule:<10} {'cold' if cold else 'warm':<5} {run.rate:>7.2f} "
                f"{run.rate / reference.rate:>11.3f} {run.hit_ratio:>6.3f} "
                f"{run.read_bytes / 1e6:>9.1f} {run.passes:>7.2f} {run.read_s * 1e3:>9.1f} "
                f"{run.gate_s * 1e3:>9.1f} {run.rate / bound:>9.3f}  {same} of {len(run.chosen)}",
                flush=True,
            )
    print(f"       SSD, cold, {record_bytes // 3 / 1e6:.2f} MB records: {disk / 1e9:.2f} GB/s")
    loaded.streamed.reader.close()
    return differing


if __name__ == "__main__":
    sys.exit(main())
