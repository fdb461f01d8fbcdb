"""The warm-up of the page cache: real files, a clock of the test's, and a stop at any moment."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.experts.file_range import FileRange
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.warm_up import WarmUp, WarmUpProgress
from headrace_replicas.engine.experts.warm_up_plan import CHUNK_BYTES

SIZE = 3 * CHUNK_BYTES + 5


class ScriptedClock:
    """Stands still but for the pauses that are asked for."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        return self.time_s

    def pause(self, seconds: float) -> bool:
        """Let time pass; never says stop."""
        self.time_s += seconds
        return False


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    return paths


def ranges_of(files: list[Path]) -> list[FileRange]:
    return [FileRange(number, 0, SIZE) for number in range(len(files))]


def warm_up(
    files: list[Path],
    clock: ScriptedClock,
    is_busy: Callable[[], bool] = lambda: False,
    rate: float = CHUNK_BYTES,
) -> WarmUp:
    return WarmUp(files, ranges_of(files), bytes_per_s=rate, is_busy=is_busy, clock=clock)


def test_everything_planned_is_read_and_said(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = ScriptedClock()
    one = warm_up(files, clock)
    assert one.progress == WarmUpProgress(planned_bytes=2 * SIZE)
    one.run(clock.pause)
    assert one.progress == WarmUpProgress(
        done_bytes=2 * SIZE, planned_bytes=2 * SIZE, outcome="complete"
    )
    begin, end = caplog.messages
    assert begin == "warm-up: 0.01 GB of experts into the page cache, at most 0.00 GB/s"
    assert end == "warm-up: complete, 0.01 of 0.01 GB in 5.0 s"


def test_it_takes_as_long_as_its_rate_says(files: list[Path]) -> None:
    clock = ScriptedClock()
    warm_up(files, clock, rate=CHUNK_BYTES / 2).run(clock.pause)
    assert clock.time_s - 100 == pytest.approx(2 * (2 * SIZE / CHUNK_BYTES - 1), abs=0.01)


def test_nothing_is_read_while_a_request_runs_and_the_rest_afterwards(files: list[Path]) -> None:
    """Requests come and go: from second 1 to 3, and from 4 to 20."""
    clock = ScriptedClock()

    def is_busy() -> bool:
        return 1 <= clock.time_s - 100 < 3 or 4 <= clock.time_s - 100 < 20

    seen: list[tuple[float, int]] = []

    def pause(seconds: float) -> bool:
        seen.append((clock.time_s - 100, one.progress.done_bytes))
        return clock.pause(seconds)

    one = warm_up(files, clock, is_busy)
    one.run(pause)
    during = {done for at_s, done in seen if 1 <= at_s < 3}
    later = {done for at_s, done in seen if 4 <= at_s < 20}
    assert len(during) == len(later) == 1
    assert 0 < min(during) < min(later) < 2 * SIZE
    assert one.progress.outcome == "complete"


def test_it_stops_between_two_reads_when_told(files: list[Path]) -> None:
    clock = ScriptedClock()
    one = warm_up(files, clock)
    one.run(lambda seconds: clock.pause(seconds) or one.progress.done_bytes >= 2 * CHUNK_BYTES)
    assert one.progress.outcome == "stopped"
    assert one.progress.done_bytes == 2 * CHUNK_BYTES


def test_it_ends_while_it_waits_for_a_request_to_end(files: list[Path]) -> None:
    """A thread of its own, as in a replica; the request never ends."""
    leaving = threading.Event()
    one = WarmUp(
        files, ranges_of(files), bytes_per_s=1e9, is_busy=lambda: True, clock=SystemClock()
    )
    thread = threading.Thread(target=lambda: one.run(leaving.wait))
    thread.start()
    leaving.set()
    thread.join(30)
    assert not thread.is_alive()
    assert one.progress.outcome == "stopped"
    assert one.progress.done_bytes == 0


def spoil(how: str, file: Path) -> None:
    if how == "missing":
        file.unlink()
    elif how == "cut":
        os.truncate(file, CHUNK_BYTES // 2)
    else:
        file.unlink()
        file.mkdir()


@pytest.mark.parametrize("how", ["missing", "cut", "a folder"])
def test_a_file_that_cannot_be_read_ends_it_for_good_in_one_line(
    files: list[Path], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    clock = ScriptedClock()
    spoil(how, files[1])
    one = warm_up(files, clock)
    one.run(clock.pause)
    assert one.progress == WarmUpProgress(done_bytes=SIZE, planned_bytes=2 * SIZE, outcome="failed")
    [warning] = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert warning.startswith("warm-up: given up: ")
    assert str(files[1]) in warning


def test_no_file_stays_open(files: list[Path]) -> None:
    clock = ScriptedClock()
    before = os.listdir("/dev/fd")  # noqa: PTH208  names alone
    warm_up(files, clock).run(clock.pause)
    assert len(os.listdir("/dev/fd")) == len(before)  # noqa: PTH208


@pytest.mark.skipif(sys.platform != "linux", reason="not run on other systems yet")
def test_what_was_read_is_in_the_page_cache(files: list[Path]) -> None:
    """And nothing but what was planned: the first file, and a third of the second."""
    first, second = ranges_of(files)
    planned = [first, FileRange(1, 0, CHUNK_BYTES)]
    clock = ScriptedClock()
    with PageCache(files) as pages:
        pages.drop()
        kept = pages.resident_ratio([first, second])
        if kept != 0:
            pytest.skip(f"{files[0].parent}: this file system keeps pages of files (tmpfs does)")
        one = WarmUp(files, planned, bytes_per_s=1e9, is_busy=lambda: False, clock=clock)
        one.run(clock.pause)
        assert pages.resident_ratio(planned) == 1
        rest = FileRange(1, CHUNK_BYTES, SIZE - CHUNK_BYTES)
        assert pages.resident_ratio([rest]) == 0
