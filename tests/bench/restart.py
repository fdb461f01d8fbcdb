"""The first 64 tokens after a restart, with and without a list of hot experts and a warm-up.

    python -m tests.bench.restart [--slots 8] [--rounds 3]

Lets the demo model answer half of its prompts, keeps the list of hot experts, and then starts it
again and again with a quarter of its experts in memory, as a replica starts: load, canary, preload,
ready, and then one prompt that it has not answered before. The files are in the page cache (warm)
or were dropped from it before the start (cold). One way leaves the canary out, so that the slots
are empty: no replica starts so. Fails only when a token differs from the resident model's.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from headrace_replicas.canary import CANARY_TOKENS, QUESTION
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.experts.hot_list import HotList
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.popularity import Popularity, hottest
from headrace_replicas.engine.experts.preload import preload
from headrace_replicas.engine.experts.warm_up import WarmUp, without_slots
from headrace_replicas.engine.experts.warm_up_plan import within
from tests.bench.demo_trace import PROMPTS, answer, load_streaming, prompt_ids
from tests.support.engines import demo_checkpoint, load_on_cpu

TOKENS = 64
NEW_PROMPTS = (
    "Count down from 20 to 1.",
    "Count from 40 to 70.",
    "Tell me a story about a lighthouse and a lamp.",
    "Tell me a story about a mill and a river.",
)
"""Each has an answer of 64 tokens or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One way to start.

    Attributes:
        holds: What the slots hold when the first request comes.
        is_cold: Whether the page cache held nothing of the files before the start.
        warms_up: Whether the warm-up has ended before the first request.
    """

    holds: Literal["nothing", "canary's", "hot list"]
    is_cold: bool = False
    warms_up: bool = False

    @property
    def base(self) -> "Start":
        """What it is compared with: no list and no warm-up."""
        return Start(holds="canary's", is_cold=self.is_cold)

    def __str__(self) -> str:
        warmth = "cold" if self.is_cold else "warm"
        return f"{warmth}, {self.holds}{', warm-up' if self.warms_up else ''}"


STARTS = (
    Start(holds="nothing"),
    Start(holds="canary's"),
    Start(holds="hot list"),
    Start(holds="canary's", is_cold=True),
    Start(holds="hot list", is_cold=True),
    Start(holds="canary's", is_cold=True, warms_up=True),
    Start(holds="hot list", is_cold=True, warms_up=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start and its first request.

    Attributes:
        ready_s: Seconds of preloading and warming up.
        first_s: Seconds to the first token.
        all_s: Seconds to the 64th.
        hit_ratio: Of all experts that were needed for them.
        read_bytes: Read for them.
        disk_bytes: Of these, what the page cache did not have; None where the system does not tell.
        ids: The tokens.
    """

    ready_s: float
    first_s: float
    all_s: float
    hit_ratio: float
    read_bytes: int
    disk_bytes: int | None
    ids: tuple[int, ...]


def learn(path: Path, slots: int) -> None:
    """Answer every other known prompt, and keep the list."""
    loaded = load_streaming(slots)
    assert loaded.streamed is not None
    held = _hot_list(path, loaded.streamed)
    for text in PROMPTS[::2]:
        for _token in answer(loaded, prompt_ids(text), TOKENS):
            pass
    held.save()
    loaded.streamed.reader.close()


def _hot_list(path: Path, streamed: StreamedModel) -> HotList:
    return HotList(
        path,
        fingerprint=demo_checkpoint().fingerprint,
        shapes=streamed.shapes,
        uses=streamed.uses,
    )


def run(start: Start, path: Path, slots: int, text: str) -> Run:
    """Start in one way, and answer one prompt."""
    loaded = load_streaming(slots)
    streamed = loaded.streamed
    assert streamed is not None
    if start.is_cold:
        with PageCache(streamed.reader.files) as pages:
            pages.drop()
    if start.holds != "nothing":
        list(answer(loaded, prompt_ids(QUESTION), CANARY_TOKENS))
    began_s = time.perf_counter()
    known = _hot_list(path, streamed).popularity
    if start.holds == "hot list":
        preload(streamed, [hottest(known.layers[one.path], slots) for one in streamed.streams])
    if start.warms_up:
        _warm_up(streamed, known)
    counters, read_bytes = streamed.counters, streamed.reader.totals.read_bytes
    hits, misses = counters.hits, counters.misses
    from_disk = _disk_bytes()
    asked_s = time.perf_counter()
    ids: list[int] = []
    first_s = 0.0
    for token in answer(loaded, prompt_ids(text), TOKENS):
        first_s = first_s or time.perf_counter() - asked_s
        ids.append(token)
    all_s = time.perf_counter() - asked_s
    hits, misses = counters.hits - hits, counters.misses - misses
    streamed.reader.close()
    return Run(
        ready_s=asked_s - began_s,
        first_s=first_s,
        all_s=all_s,
        hit_ratio=hits / (hits + misses),
        read_bytes=streamed.reader.totals.read_bytes - read_bytes,
        disk_bytes=None if from_disk is None else (_disk_bytes() or 0) - from_disk,
        ids=tuple(ids),
    )


def _disk_bytes() -> int | None:
    """What this process has had read from disks since it began; Linux tells."""
    io_counters = getattr(psutil.Process(), "io_counters", None)
    return None if io_counters is None else io_counters().read_bytes


def _warm_up(streamed: StreamedModel, known: Popularity) -> None:
    ranges = within(without_slots(streamed, known), sys.maxsize)
    files, clock = streamed.reader.files, SystemClock()
    warm_up = WarmUp(files, ranges, bytes_per_s=1e12, is_busy=lambda: False, clock=clock)
    warm_up.run(_sleep)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def main() -> int:
    """Run all starts in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=8, help="of each layer, for its 32 experts")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    resident = load_on_cpu(demo_checkpoint())
    wanted = {text: tuple(answer(resident, prompt_ids(text), TOKENS)) for text in NEW_PROMPTS}
    del resident
    runs: dict[Start, list[Run]] = {start: [] for start in STARTS}
    differing = 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        path = Path(name) / "hot_list.json"
        learn(path, options.slots)
        for _ in range(options.rounds):
            for text in NEW_PROMPTS:
                for start in STARTS:
                    one = run(start, path, options.slots, text)
                    differing += one.ids != wanted[text]
                    runs[start].append(one)
    _print(runs, options.slots)
    print(f"restart: {differing} answers differ from the resident model's")
    return 1 if differing else 0


def _print(runs: dict[Start, list[Run]], slots: int) -> None:
    print(f"{slots} of 32 experts of a layer in memory, {TOKENS} tokens, median of all runs")
    print(
        f"{'start':24} {'hit ratio':>9} {'MB read':>8} {'from disk':>9} {'first token':>12} "
        f"{'64 tokens':>10} {'ratio':>7} {'before, s':>10}"
    )
    for start, done in runs.items():
        ratios = [a.all_s / b.all_s for a, b in zip(done, runs[start.base], strict=True)]
        print(
            f"{start!s:24} {statistics.mean(one.hit_ratio for one in done):>9.3f} "
            f"{_median([one.read_bytes / 1e6 for one in done]):>8.1f} "
            f"{_median([(one.disk_bytes or 0) / 1e6 for one in done]):>9.1f} "
            f"{_median([one.first_s for one in done]):>10.3f} s "
            f"{_median([one.all_s for one in done]):>8.3f} s {_median(ratios):>7.2f} "
            f"{_median([one.ready_s for one in done]):>10.3f}"
        )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    sys.exit(main())
