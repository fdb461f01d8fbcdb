"""Serve a checkpoint at least twice as large as the memory that the kernel allows.

    python -m tests.bench.memory_limit [--shape small|large] [--folder FOLDER] [--limit cgroup|data]

Starts an engine in a memory cgroup of at most half the checkpoint, without swap, its pages of files
counted, on a cold page cache. It plans, streams and answers; the same requests are answered with
all experts in memory outside. Ends with 0 only when nobody was killed, every answer is equal, and
the memory that cannot be taken back stayed below what the plan's lines say.

`--limit data` is for where no memory cgroup can be made: it limits private writable memory alone
(RLIMIT_DATA), so that an allocation beyond the plan fails, but pages of files are free.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.memory_refusal import shown_bytes
from tests.bench.generated_model import Shape, make_model
from tests.bench.memory_limit_run import Served, Workload, serve
from tests.support.memory_cgroup import MemoryCgroup, NoMemoryCgroupError, memory_cgroup
from tests.support.proc_status import status_bytes

LimitKind = Literal["cgroup", "data"]

# Many experts of which a token uses few: large on disk, and quick to compute on a CPU.
_SMALL: Final = Shape(
    layers=4, hidden=512, experts=384, top_k=2, expert_hidden=512, context=1024, skew=0
)
SHAPES: Final = {"small": _SMALL, "large": replace(_SMALL, layers=10, experts=512)}
WORKLOADS: Final = {
    "small": Workload(folder=""),
    # The product's own chunk and cache limit.
    "large": Workload(
        folder="",
        context_tokens=1024,
        prefill_chunk_tokens=512,
        cache_limit_bytes=512 * 2**20,
        rounds=((300,), (120, 80, 40), (20, 20, 20)),
        new_tokens=16,
    ),
}
_SAMPLE_S: Final = 0.005
# A few pages come back at once: somebody looks at the file's end, or the system reads ahead.
_STAYING_RATIO: Final = 0.01
# A thread's stack counts in full under RLIMIT_DATA; usual ones are 8 MiB.
_STACK_KIB: Final = 1024


class PagesStayError(Exception):
    """The page cache cannot be emptied of the checkpoint; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an engine inside a limit.

    Attributes:
        checkpoint_bytes: The files.
        limit_bytes: What the kernel allowed.
        exit_status: Of the process; negative for a signal.
        stderr: What it complained about.
        served: What it gave, if it ended well.
        peak_bytes: Its anonymous memory at the peak, as seen every few milliseconds.
        charged_bytes: The cgroup's own peak, pages of files included; 0 without a cgroup.
        killed: Processes that the kernel ended for memory.
        took_s: Seconds from start to end.
    """

    checkpoint_bytes: int
    limit_bytes: int
    exit_status: int
    stderr: str
    served: Served | None
    peak_bytes: int
    charged_bytes: int = 0
    killed: int = 0
    took_s: float = 0.0

    @property
    def planned_bytes(self) -> int:
        """What the plan's lines allow, without the part of the headroom that nobody claims."""
        if self.served is None:
            return 0
        lines = ("resident", "slot", "kv", "working", "allocator_cache")
        return sum(int(self.served.plan[f"{line}_bytes"]) for line in lines)

    def faults(self, expected: Sequence[Sequence[int]]) -> list[str]:
        """What is not as it should be, in sentences."""
        if self.killed:
            return [f"the kernel killed {self.killed} processes for memory"]
        if self.served is None:
            return [f"the engine ended with {self.exit_status}: {self.stderr[-2000:]}"]
        found = []
        if self.served.answers != [list(answer) for answer in expected]:
            found.append("the answers differ from those with all experts in memory")
        if self.peak_bytes > self.planned_bytes:
            found.append(
                f"{shown_bytes(self.peak_bytes)} of memory were in use, and the plan says "
                f"{shown_bytes(self.planned_bytes)}"
            )
        if self.limit_bytes * 2 > self.checkpoint_bytes:
            found.append("the limit is more than half of the checkpoint")
        if self.served.first_misses < 2 * int(self.served.plan["slots_per_layer"]):
            found.append("the prompt needed hardly more experts than fit; a longer one would")
        if self.charged_bytes and self.served.disk_bytes < self.limit_bytes:
            found.append("less was read than fits: no page of a file had to go")
        return found


def run_limited(workload: Workload, limit_bytes: int, kind: LimitKind) -> Outcome:
    """Serve a workload in a process of its own, within a limit, on a cold page cache.

    Raises:
        NoMemoryCgroupError: No memory cgroup can be made here.
        PagesStayError: The checkpoint lies where its pages never leave memory.
    """
    files = sorted(Path(workload.folder).glob("*.safetensors"))
    _forget_pages(files)
    size = sum(file.stat().st_size for file in files)
    program = [sys.executable, "-W", "ignore", "-m", "tests.bench.memory_limit_run"]
    command = [*program, json.dumps(asdict(workload))]
    if kind == "data":
        limits = f'ulimit -s {_STACK_KIB} && ulimit -d {limit_bytes // 1024} && exec "$@"'
        ended = _watch(["/bin/sh", "-c", limits, "sh", *command], None)
    else:
        with memory_cgroup(limit_bytes) as cgroup:
            ended = _watch(cgroup.command(command), cgroup)
    return replace(ended, checkpoint_bytes=size, limit_bytes=limit_bytes)


def _watch(command: Sequence[str], cgroup: MemoryCgroup | None) -> Outcome:
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True)
        peak = 0
        try:
            while process.poll() is None:
                mine = cgroup.anonymous_bytes() if cgroup else _anonymous_bytes(process.pid)
                peak = max(peak, mine)
                time.sleep(_SAMPLE_S)
        finally:  # interrupted, say: a group with a process in it cannot be removed
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        said, complained = out.read(), err.read()
    sound = process.returncode == 0
    return Outcome(
        checkpoint_bytes=0,
        limit_bytes=0,
        exit_status=process.returncode,
        stderr=complained,
        served=Served(**json.loads(said.splitlines()[-1])) if sound else None,
        peak_bytes=peak,
        charged_bytes=cgroup.peak_bytes() if cgroup else 0,
        killed=cgroup.killed() if cgroup else 0,
        took_s=time.monotonic() - began_s,
    )


def _anonymous_bytes(pid: int) -> int:
    try:
        return status_bytes("RssAnon", str(pid))
    except OSError:  # it ended just now
        return 0


def _forget_pages(files: Sequence[Path]) -> None:
    """Let the files' pages go: one that is there is charged to nobody else who reads it."""
    sizes = [file.stat().st_size for file in files]
    with PageCache(files) as pages:
        pages.drop()
        whole = [FileRange(number, 0, size) for number, size in enumerate(sizes)]
        stayed = pages.resident_ratio(whole)
    if stayed is None or stayed > _STAYING_RATIO:
        share = "an unknown share" if stayed is None else f"{stayed:.0%}"
        raise PagesStayError(
            f"{share} of the checkpoint's pages stay in memory whatever is done, as on tmpfs, and "
            "nothing could be shown. Put it on a disk: --folder, or TMPDIR for the tests."
        )


def half_of(folder: Path) -> int:
    """Half the size of a checkpoint's shards, in whole MiB."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2**21 * 2**20


def report(outcome: Outcome, faults: Sequence[str], kind: LimitKind) -> None:
    """Print what was planned beside what was measured."""
    ratio = outcome.limit_bytes / outcome.checkpoint_bytes
    print(
        f"checkpoint {shown_bytes(outcome.checkpoint_bytes)}, {kind} limit "
        f"{shown_bytes(outcome.limit_bytes)} ({ratio:.0%}), no swap"
    )
    if outcome.served is not None:
        _print_lines(outcome, outcome.served)
    for fault in faults:
        print(f"FAULT: {fault}")
    print(
        f"memory-limit: {shown_bytes(outcome.peak_bytes)} at the peak of "
        f"{shown_bytes(outcome.planned_bytes)} planned, {outcome.killed} killed, "
        f"{'all answers equal' if not faults else 'see above'}"
    )


def _print_lines(outcome: Outcome, served: Served) -> None:
    plan = served.plan
    print(f"{plan['slots_per_layer']} of {plan['experts_per_layer']} experts of a layer in memory")
    process = f"{shown_bytes(served.process_bytes)} before loading"
    rows = (
        ("weights and slots", plan["resident_bytes"] + plan["slot_bytes"], served.loaded_bytes),
        ("KV cache and computing", plan["kv_bytes"] + plan["working_bytes"], served.serving_bytes),
        ("freed, kept by MLX", plan["allocator_cache_bytes"], served.kept_bytes),
    )
    print(f"{'':24} {'planned':>11} {'taken':>11}   (computing includes the process: {process})")
    for name, planned, taken in rows:
        print(f"{name:24} {shown_bytes(planned):>11} {shown_bytes(taken):>11}")
    together = shown_bytes(outcome.planned_bytes), shown_bytes(outcome.peak_bytes)
    room = shown_bytes(plan["limit_bytes"])
    print(f"{'together':24} {together[0]:>11} {together[1]:>11}   of {room} that were left")
    if outcome.charged_bytes:
        print(f"{shown_bytes(outcome.charged_bytes)} charged at the peak", end="; ")
    print(
        f"{shown_bytes(served.disk_bytes)} from the disk, hit ratio {served.hit_ratio:.3f}, "
        f"{served.first_misses:.0f} experts of a layer read for the first request, "
        f"{outcome.took_s:.0f} s"
    )


@contextmanager
def _folder(given: Path | None, shape: Shape) -> Iterator[Path]:
    if given is not None:
        if not (given / "config.json").exists():
            make_model(given, shape)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="headrace-memory-limit-") as name:
        make_model(Path(name), shape)
        yield Path(name)


def main() -> int:
    """Make the checkpoint, run it inside the limit and outside, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint; made when not there")
    parser.add_argument("--limit", choices=["cgroup", "data"], default="cgroup")
    options = parser.parse_args()
    with _folder(options.folder, SHAPES[options.shape]) as folder:
        workload = replace(WORKLOADS[options.shape], folder=str(folder))
        try:
            outcome = run_limited(workload, half_of(folder), options.limit)
        except NoMemoryCgroupError as error:
            print(f"error: {error}\nOr limit private memory alone: --limit data", file=sys.stderr)
            return 1
        except PagesStayError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        expected = serve(replace(workload, slots="all")).answers
    faults = outcome.faults(expected)
    report(outcome, faults, options.limit)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
