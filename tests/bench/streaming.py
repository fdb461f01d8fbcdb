"""Decode with streamed experts beside the resident model, in one run.

    python -m tests.bench.streaming FOLDER [--shape half-qwen3-30b|small] [--device gpu|cpu]

Builds the model in FOLDER when it is not there. Prints, for each share of experts in memory and
each schedule: tokens a second as a ratio of resident, hit ratio, bytes read a token, passes, what
was waited for, and the share of the bound min(SSD / bytes missed, resident); warm and cold. Fails
only when a token differs from the resident model's.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.decode_bench import Decode, decode
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.read_rates import ReadRate, measure_reads
from headrace_replicas.engine.experts.schedule import SCHEDULES, Schedule, with_schedule
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


def run(
    model: Any, loaded: LoadedModel, tokens: Sequence[int], *, pages: PageCache | None = None
) -> Decode:
    """Feed tokens one by one after a warm-up; what is fed does not depend on the answers.

    Args:
        model: The model by its schedule.
        loaded: The model.
        tokens: To feed.
        pages: Emptied before each measured token, which are fewer then.
    """
    clock = SystemClock()
    cache = make_prompt_cache(loaded.model)

    def fed(begin: int, count: int, before_each: Callable[[], None]) -> Decode:
        return decode(
            model,
            loaded,
            cache=cache,
            first=tokens[begin],
            count=count,
            clock=clock,
            follow=lambda step, _best: tokens[begin + step + 1],
            before_each=before_each,
        )

    fed(0, WARM_TOKENS, lambda: None)
    if pages is None:
        return fed(WARM_TOKENS, TOKENS, lambda: None)
    return fed(WARM_TOKENS, COLD_TOKENS, pages.drop)


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
    run(resident.model, resident, tokens[1000:])  # compiles kernels
    reference = run(resident.model, resident, tokens)
    del resident
    print(
        f"resident: {reference.tokens_per_s:.1f} tok/s, {mx.get_active_memory() / 1e9:.2f} GB kept"
    )
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
    reference: Decode,
) -> int:
    clock = SystemClock()
    streaming = Streaming(slots=slots, workers=WORKERS, clock=clock, on_progress=lambda: None)
    loaded = load(checkpoint, device=device, dtype="auto", streaming=streaming)
    assert loaded.streamed is not None
    differing = 0
    with closing(loaded.streamed.reader) as reader, PageCache(reader.files) as pages:
        ssd = measure_reads(loaded.streamed, workers=WORKERS, clock=clock, pages=pages).ssd
        assert ssd is not None
        for schedule in SCHEDULES:
            model = with_schedule(loaded.model, loaded.streamed, schedule)
            for emptied in (None, pages):
                # Other tokens before, so that the slots do not hold what is asked for by chance.
                run(model, loaded, tokens[1000:])
                found = run(model, loaded, tokens, pages=emptied)
                same = sum(a == b for a, b in zip(found.chosen, reference.chosen, strict=False))
                differing += len(found.chosen) - same
                _print_row(share, schedule, found, reference, ssd if emptied else None, same)
    print(
        f"       SSD, cold, {ssd.run_bytes / 1e6:.2f} MB records: {ssd.bytes_per_s / 1e9:.2f} GB/s"
    )
    return differing


def _print_row(
    share: float,
    schedule: Schedule,
    found: Decode,
    reference: Decode,
    ssd: ReadRate | None,
    same: int,
) -> None:
    """One line; `ssd` is given where reads came from the disk."""
    bound = reference.tokens_per_s
    if ssd is not None and found.read_bytes:
        bound = min(bound, ssd.bytes_per_s / found.read_bytes)
    print(
        f"{share:>6.1%} {schedule:<10} {'cold' if ssd else 'warm':<5} "
        f"{found.tokens_per_s:>7.2f} {found.tokens_per_s / reference.tokens_per_s:>11.3f} "
        f"{found.hit_ratio:>6.3f} {found.read_bytes / 1e6:>9.1f} {found.passes:>7.2f} "
        f"{found.read_s * 1e3:>9.1f} {found.gate_s * 1e3:>9.1f} "
        f"{found.tokens_per_s / bound:>9.3f}  {same} of {len(found.chosen)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
