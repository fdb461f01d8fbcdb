"""`make seed1`: a cold page cache, slow storage and a stalled read under prompts of growing length.

    python -m tests.streaming.seed1 [--short] [--folder FOLDER]

The crash that this repeats: a server streamed experts from a cold SSD while command buffers that
needed them were waiting on the GPU, and the GPU's watchdog ended them one after the other. Here the
same prompts go to an engine whose reads share 50 MB/s, one of which does not come back for a
minute, in every schedule. A request is good when its tokens are those of the engine with all
experts in memory. The run fails when one is not, when an evaluation was submitted before its bytes
were there (`SlotLedger`), or when reads that were waited for made no mark of progress for three
seconds, outside of the stalled one; one second is what the engine should keep. The computation on
a CPU takes its time too, without marks: `silence` is what a client saw.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import GenerateRequest, TokenChunk
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.schedule import SCHEDULES, Schedule
from headrace_replicas.engine.experts.storage import SystemStorage
from headrace_replicas.injection.plan import SlowRead, StalledRead
from headrace_replicas.injection.storage_faults import FaultyStorage
from headrace_serve.text.tokenizer import TextTokenizer
from tests.bench.generated_model import Shape, make_model
from tests.support.engines import DEMO_FOLDER, PATIENCE_S, Answer, ask, request_for, start_engine
from tests.support.item_prompts import item_prompts
from tests.support.read_waits import ReadWaits
from tests.support.stream_watch import StreamWatch
from tests.support.streaming_engines import StreamingEngine

BYTES_PER_S: Final = 50e6
# What the engine should keep, and what fails a run: the machine may be busy with other things.
GOOD_PAUSE_S: Final = 1.0
WORST_PAUSE_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a run is.

    Attributes:
        shape: Of the generated model.
        slots: Experts of a layer in memory; a quarter.
        stall_s: How long the stalled read takes.
        from_read: Which read stalls.
        chunk_tokens: Prompt tokens of a prefill step.
        new_tokens: Tokens that each request generates.
    """

    shape: Shape
    slots: int
    stall_s: float
    from_read: int
    chunk_tokens: int
    new_tokens: int


# Few experts for a token and many to read: the storage is what a run waits for.
SHORT: Final = Scale(  # 110 MB
    shape=Shape(layers=2, hidden=512, experts=36, top_k=2, expert_hidden=192, skew=0.2),
    slots=9,
    stall_s=4.0,
    from_read=60,
    chunk_tokens=512,
    new_tokens=6,
)
FULL: Final = Scale(  # 2.5 GB
    shape=Shape(layers=4, hidden=1024, experts=96, top_k=2, expert_hidden=512, skew=0.2),
    slots=24,
    stall_s=60.0,
    from_read=1000,
    chunk_tokens=384,
    new_tokens=12,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one request.

    Attributes:
        tokens: Of its prompt.
        same: Whether its answer is that of the resident engine.
        seconds: From asking to the last token.
        read_bytes: Bytes read meanwhile.
        signs: Chunks that came: tokens, or signs of life.
        silence_s: Longest time without one, for whatever reason.
    """

    tokens: int
    same: bool
    seconds: float
    read_bytes: int
    signs: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All requests under one schedule.

    Attributes:
        marks: Marks of progress that reads have made.
        pause_s: Longest time without one while reads were waited for, the stalled read not counted.
        stalled_s: How long the stalled read took; 0 when none was.
        trouble: What the engine said of its storage.
        violations: From the `SlotLedger`.
        evaluations: That were checked.
        graphs: Computations over slots that were checked.
    """

    schedule: Schedule
    rows: tuple[Row, ...]
    marks: int
    pause_s: float
    stalled_s: float
    trouble: str
    violations: tuple[str, ...]
    evaluations: int
    graphs: int

    @property
    def read_bytes(self) -> int:
        """Bytes read in all."""
        return sum(row.read_bytes for row in self.rows)


class TimedAnswer(Answer):
    """An answer that knows when its chunks came."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(patience_s)
        self.came_s = [time.monotonic()]

    def __call__(self, item: TokenChunk | HeadraceError) -> None:
        self.came_s.append(time.monotonic())
        super().__call__(item)


def requests_for(checkpoint: Checkpoint, scale: Scale) -> list[GenerateRequest]:
    """The item prompts as requests, sampled, each with a seed of its own."""
    tokenizer = TextTokenizer.from_folder(DEMO_FOLDER)
    return [
        request_for(
            checkpoint,
            prompt.ids,
            request_id=f"{len(prompt.ids)} tokens",
            seed=number,
            max_tokens=scale.new_tokens,
        )
        for number, prompt in enumerate(item_prompts(tokenizer))
    ]


def resident_answers(
    checkpoint: Checkpoint, scale: Scale, requests: Sequence[GenerateRequest]
) -> list[tuple[int, ...]]:
    """What an engine with all experts in memory says."""
    settings = EngineSettings(device="cpu", prefill_chunk_tokens=scale.chunk_tokens)
    engine = start_engine(checkpoint, settings)
    answers = [ask(engine, request).wait().ids for request in requests]
    engine.stop()
    return answers


def run_schedule(
    checkpoint: Checkpoint,
    scale: Scale,
    schedule: Schedule,
    requests: Sequence[GenerateRequest],
    expected: Sequence[tuple[int, ...]],
) -> Run:
    """The requests one after the other, each with a cold page cache, on one streaming engine."""
    waits = ReadWaits(scale.stall_s)
    faults = (
        SlowRead(bytes_per_s=BYTES_PER_S),
        StalledRead(stall_s=scale.stall_s, from_read=scale.from_read, times=1),
    )
    storage = FaultyStorage(
        SystemStorage(), list(enumerate(faults)), seed=0, clock=SystemClock(), sleep=waits.sleep
    )
    watch = StreamWatch(storage)
    marks_s: list[float] = []
    running = StreamingEngine(
        checkpoint,
        scale.slots,
        schedule,
        storage=watch,
        on_progress=lambda: marks_s.append(time.monotonic()),
        chunk_tokens=scale.chunk_tokens,
        workers=12,
    )
    watch.follow(running)
    with watch.over_evaluations(running):
        rows = [
            _row(running, request, ids, scale.stall_s + PATIENCE_S)
            for request, ids in zip(requests, expected, strict=True)
        ]
    trouble = running.reader.health.report(time.monotonic()).trouble
    running.stop()
    return Run(
        schedule=schedule,
        rows=tuple(rows),
        marks=len(marks_s),
        pause_s=waits.longest_pause_s(marks_s),
        stalled_s=waits.stalled_s,
        trouble=trouble,
        violations=tuple(watch.ledger.violations),
        evaluations=watch.ledger.totals.evaluations,
        graphs=watch.ledger.totals.submitted,
    )


def _row(
    running: StreamingEngine,
    request: GenerateRequest,
    expected: tuple[int, ...],
    patience_s: float,
) -> Row:
    with PageCache(running.reader.files) as pages:
        pages.drop()
    before_bytes = running.reader.totals.read_bytes
    answer = TimedAnswer(patience_s)
    running.engine.submit(request, answer)
    ids = answer.wait().ids
    came_s = answer.came_s
    return Row(
        tokens=len(request.prompt_ids),
        same=ids == expected,
        seconds=came_s[-1] - came_s[0],
        read_bytes=running.reader.totals.read_bytes - before_bytes,
        signs=len(came_s) - 1,
        silence_s=max(end_s - begin_s for begin_s, end_s in pairwise(came_s)),
    )


def faults_of(run: Run, scale: Scale) -> list[str]:
    """Why a run is not good; empty when it is."""
    found = [f"{row.tokens} tokens: another answer" for row in run.rows if not row.same]
    found += run.violations[:5]
    if run.stalled_s < scale.stall_s or " took " not in run.trouble:
        found.append(f"no read was stalled for {scale.stall_s} s and told of: {run.trouble!r}")
    if run.marks < run.read_bytes / BYTES_PER_S:
        found.append(f"{run.marks} marks of progress over {run.read_bytes} bytes")
    if run.pause_s > WORST_PAUSE_S:
        found.append(f"no mark of progress for {run.pause_s:.2f} s outside of the stalled read")
    if not run.evaluations or not run.graphs:
        found.append("nothing was checked")
    return found


def main() -> int:
    """Run every schedule and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a model of 110 MB, a stall of 4 s")
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be, kept")
    options = parser.parse_args()
    scale = SHORT if options.short else FULL
    with tempfile.TemporaryDirectory(prefix="headrace-seed1-") as made:
        folder = options.folder or Path(made) / "model"
        if not (folder / "config.json").exists():
            make_model(folder, scale.shape, dense=True)
        return _table(read_checkpoint(folder), scale)


def _table(checkpoint: Checkpoint, scale: Scale) -> int:
    requests = requests_for(checkpoint, scale)
    expected = resident_answers(checkpoint, scale, requests)
    print(
        f"{checkpoint.tensor_bytes / 1e9:.2f} GB, {scale.slots} of {scale.shape.experts} experts a "
        f"layer in memory, {BYTES_PER_S / 1e6:.0f} MB/s, one read stalls {scale.stall_s:.0f} s"
    )
    print("schedule    prompt  same       s      MB  signs  silence s")
    good = total = 0
    faults: list[str] = []
    for schedule in SCHEDULES:
        run = run_schedule(checkpoint, scale, schedule, requests, expected)
        _print_run(run)
        good, total = good + sum(row.same for row in run.rows), total + len(run.rows)
        faults += [f"{schedule}: {fault}" for fault in faults_of(run, scale)]
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"seed1: {good} of {total} requests complete and unchanged")
    return 1 if faults else 0


def _print_run(run: Run) -> None:
    for row in run.rows:
        print(
            f"{run.schedule:<10} {row.tokens:>7} {row.same!s:>5} {row.seconds:>7.1f} "
            f"{row.read_bytes / 1e6:>7.0f} {row.signs:>6} {row.silence_s:>10.2f}"
        )
    kept = "" if run.pause_s <= GOOD_PAUSE_S else f", more than {GOOD_PAUSE_S:.0f} s"
    print(
        f"  stalled read: {run.trouble}\n"
        f"  {run.marks} marks of progress, longest pause in other reads {run.pause_s:.2f} s{kept}\n"
        f"  {run.evaluations} evaluations, {run.graphs} expert computations, "
        f"{len(run.violations)} before their bytes",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
