"""Joining reads that touch: every byte arrives where it was asked for, with as few calls as pay."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob, join_adjacent

KIB = 1024
CONTENT = bytes(range(251)) * 40


def jobs_of(*ranges: tuple[int, int, int]) -> list[ReadJob]:
    """Jobs by (file, offset, length)."""
    return [ReadJob(file, at, memoryview(bytearray(length))) for file, at, length in ranges]


def shape(jobs: list[ReadJob], workers: int = 1) -> list[tuple[int, int, list[int]]]:
    """Runs as (file, offset, lengths of their targets)."""
    return [
        (run.file, run.offset, [len(target) for target in run.targets])
        for run in join_adjacent(jobs, workers=workers)
    ]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[RangeReader]:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(CONTENT)
    opened = RangeReader([tmp_path / "a", tmp_path / "b"], workers=3, clock=SystemClock())
    yield opened
    opened.close()


def test_ranges_that_touch_become_one_run_in_whatever_order_they_are_asked_for() -> None:
    assert shape(jobs_of((0, 30, 5), (0, 10, 20), (1, 35, 5), (0, 36, 1))) == [
        (0, 10, [20, 5]),
        (0, 36, [1]),
        (1, 35, [5]),
    ]


def test_ranges_that_overlap_stay_apart() -> None:
    assert shape(jobs_of((0, 0, 10), (0, 5, 10), (0, 5, 10))) == [
        (0, 0, [10]),
        (0, 5, [10]),
        (0, 5, [10]),
    ]


def test_an_empty_range_is_no_read() -> None:
    assert shape(jobs_of((0, 0, 0), (0, 10, 5))) == [(0, 10, [5])]
    assert shape(jobs_of((0, 0, 0))) == []


@pytest.mark.parametrize(("workers", "runs"), [(1, 2), (2, 2), (4, 4), (8, 8), (64, 16)])
def test_joining_leaves_work_for_all_workers(workers: int, runs: int) -> None:
    """8 MiB that touch: runs are 4 MiB at most, and 256 KiB at least."""
    pieces = [(0, number * 128 * KIB, 128 * KIB) for number in range(64)]
    found = shape(jobs_of(*pieces), workers)
    if workers < 64:
        assert len(found) == runs
    else:
        assert all(sum(lengths) == 256 * KIB for _file, _at, lengths in found)


def test_no_call_has_more_targets_than_the_system_allows() -> None:
    pieces = [(0, number, 1) for number in range(2500)]
    assert [len(lengths) for _file, _at, lengths in shape(jobs_of(*pieces))] == [1024, 1024, 452]
    assert os.sysconf("SC_IOV_MAX") >= 1024


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 9_000), st.integers(0, 700)),
        max_size=30,
    ),
    st.integers(1, 16),
)
def test_every_job_is_in_exactly_one_run_at_its_place(
    ranges: list[tuple[int, int, int]], workers: int
) -> None:
    jobs = jobs_of(*ranges)
    found: list[tuple[int, int, int]] = []
    for run in join_adjacent(jobs, workers=workers):
        at = run.offset
        for target in run.targets:
            found.append((run.file, at, id(target)))
            at += len(target)
    assert sorted(found) == sorted(
        (job.file, job.offset, id(job.target)) for job in jobs if job.target
    )


def test_joined_reads_fill_each_target_with_its_own_bytes(reader: RangeReader) -> None:
    jobs = jobs_of((1, 500, 7), (0, 0, 100), (0, 100, 1), (0, 101, 999), (1, 507, 3))
    reader.read(jobs)
    for job in jobs:
        assert bytes(job.target) == CONTENT[job.offset : job.offset + len(job.target)]
    assert (reader.totals.jobs, reader.totals.runs) == (5, 2)
    assert reader.totals.read_bytes == 1110


@pytest.mark.parametrize("limit", [1, 3, 100, 101, 150])
def test_a_read_that_comes_in_pieces_goes_on_in_the_middle_of_a_target(
    reader: RangeReader, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may give fewer bytes than asked for, at any boundary."""
    whole = os.preadv

    def some(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        room = limit
        taken: list[memoryview] = []
        for buffer in buffers:
            taken.append(buffer[:room])
            room -= len(taken[-1])
        return whole(fd, [one for one in taken if one], offset, *flags)

    monkeypatch.setattr(os, "preadv", some)
    jobs = jobs_of((0, 10, 100), (0, 110, 1), (0, 111, 49))
    reader.read(jobs)
    assert b"".join(bytes(job.target) for job in jobs) == CONTENT[10:160]


def test_a_joined_read_beyond_the_end_of_the_file_is_named(reader: RangeReader) -> None:
    last = len(CONTENT) - 10
    with pytest.raises(ExpertReadError, match=rf"ends at byte {last + 10}, and 25 more bytes"):
        reader.read(jobs_of((0, last, 5), (0, last + 5, 30)))
