"""Injected faults of storage: which reads they strike, and what a struck read does."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.experts.storage import SystemStorage
from headrace_replicas.injection.plan import (
    AnyStorageFault,
    ReadError,
    ShortRead,
    SlowRead,
    StalledRead,
    TruncatedFile,
)
from headrace_replicas.injection.storage_faults import FaultyStorage
from headrace_replicas.injection.strikes import FaultCount, draw_of, strike

CONTENT = bytes(range(200))


class ManualClock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


class Bench:
    """One file behind injected faults."""

    def __init__(self, folder: Path, *faults: AnyStorageFault) -> None:
        self.path = folder / "model-00001.safetensors"
        self.path.write_bytes(CONTENT)
        self.clock = ManualClock()
        self.storage = FaultyStorage(
            SystemStorage(),
            list(enumerate(faults)),
            seed=0,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.fd = self.storage.open(self.path)

    def read(self, length: int, offset: int = 0, parts: int = 1) -> bytes:
        """What one call brings, into targets of equal length."""
        targets = [bytearray(length // parts) for _ in range(parts)]
        count = self.storage.read(self.fd, [memoryview(target) for target in targets], offset)
        return b"".join(targets)[:count]


def strikes(fault: AnyStorageFault, draws: Sequence[float]) -> list[int]:
    """Numbers of the reads that a fault strikes, counted from 1."""
    count, struck = FaultCount(), []
    for number, draw in enumerate(draws, start=1):
        count, hit = strike(fault, count, draw=draw)
        if hit:
            struck.append(number)
    assert (count.occasions, count.strikes) == (len(draws), len(struck))
    return struck


@given(
    st.integers(1, 30),
    st.none() | st.integers(1, 10),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=60),
    st.floats(0.01, 1),
)
def test_a_fault_strikes_from_its_read_on_as_often_as_it_may(
    from_read: int, times: int | None, draws: list[float], ratio: float
) -> None:
    fault = ShortRead(from_read=from_read, times=times, ratio=ratio)
    eligible = [n for n, draw in enumerate(draws, start=1) if n >= from_read and draw < ratio]
    assert strikes(fault, draws) == eligible[:times]


def test_draws_are_spread_and_the_same_in_each_run() -> None:
    draws = [draw_of(3, 0, read) for read in range(2000)]
    assert draws == [draw_of(3, 0, read) for read in range(2000)]
    assert 0.45 < sum(draws) / len(draws) < 0.55
    assert all(0 <= draw < 1 for draw in draws)
    assert draws != [draw_of(4, 0, read) for read in range(2000)]
    assert draws != [draw_of(3, 1, read) for read in range(2000)]


def test_without_a_strike_a_read_is_the_systems(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ReadError(from_read=99), ReadError(file="*.bin"))
    assert bench.read(150, 20, parts=3) == CONTENT[20:170]
    assert bench.storage.stat(bench.fd).st_size == len(CONTENT)
    bench.storage.close(bench.fd)


def test_slow_reads_share_one_link(tmp_path: Path) -> None:
    """Ten reads of 100 bytes at 50 bytes a second take 20 s, and an idle link saves nothing up."""
    bench = Bench(tmp_path, SlowRead(bytes_per_s=50))
    for _ in range(10):
        assert bench.read(100) == CONTENT[:100]
    assert bench.clock.at_s == pytest.approx(120.0)
    bench.clock.sleep(1000)
    bench.read(100)
    assert bench.clock.at_s == pytest.approx(1122.0)


def test_a_read_in_the_queue_of_a_slow_link_waits_for_those_before_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SlowRead(bytes_per_s=50))
    waits: list[float] = []
    bench.storage._sleep = waits.append
    for _ in range(3):
        bench.read(100)
    assert waits == pytest.approx([2.0, 4.0, 6.0])


def test_a_stalled_read_comes_back_whole_and_late(tmp_path: Path) -> None:
    bench = Bench(tmp_path, StalledRead(stall_s=60, from_read=2, times=1))
    bench.read(10)
    assert bench.clock.at_s == 100.0
    assert bench.read(10) == CONTENT[:10]
    assert bench.clock.at_s == 160.0
    bench.read(10)
    assert bench.clock.at_s == 160.0


def test_a_read_error_is_the_systems_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ReadError(errno="ESTALE", times=1))
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        bench.read(10)
    assert bench.read(10) == CONTENT[:10]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_short_read_brings_the_first_half(tmp_path: Path, parts: int) -> None:
    bench = Bench(tmp_path, ShortRead())
    assert bench.read(100, 7, parts) == CONTENT[7:57]
    assert bench.read(1) == CONTENT[:1]


@pytest.mark.parametrize("offset", [0, 49, 50, 80])
def test_a_truncated_file_ends_where_it_says(tmp_path: Path, offset: int) -> None:
    bench = Bench(tmp_path, TruncatedFile(size_bytes=50))
    assert bench.read(20, offset) == CONTENT[offset : min(50, offset + 20)]


def test_a_fault_can_wait_for_a_file(tmp_path: Path) -> None:
    """Reads before do not count."""
    signal = tmp_path / "now"
    bench = Bench(tmp_path, ReadError(once_exists=signal, from_read=2, times=1))
    for _ in range(5):
        bench.read(10)
    signal.touch()
    bench.read(10)
    with pytest.raises(OSError, match="Input/output error"):
        bench.read(10)
    assert bench.read(10) == CONTENT[:10]


def test_faults_add_up_in_the_plans_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SlowRead(bytes_per_s=100), ShortRead(), StalledRead(stall_s=5))
    assert bench.read(100) == CONTENT[:50]
    assert bench.clock.at_s == 106.0


def test_a_bad_sector_strikes_reads_that_touch_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ReadError(from_byte=50, to_byte=60))
    assert bench.read(50, 0) == CONTENT[:50]
    assert bench.read(40, 60) == CONTENT[60:100]
    for offset in (41, 55, 59):
        with pytest.raises(OSError, match="Input/output error"):
            bench.read(10, offset)
