"""Reading byte ranges: whole or not at all, and an error that names the file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "model-00001.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def reader(shard: Path) -> Iterator[RangeReader]:
    opened = RangeReader([shard], workers=4, clock=SystemClock())
    yield opened
    opened.close()


def job(target: bytearray, offset: int) -> ReadJob:
    return ReadJob(0, offset, memoryview(target))


def test_every_range_arrives_whole(reader: RangeReader) -> None:
    targets = [bytearray(100 + i) for i in range(40)]
    reader.read([job(target, 7 * i) for i, target in enumerate(targets)])
    for i, target in enumerate(targets):
        assert target == CONTENT[7 * i : 7 * i + 100 + i]
    assert reader.totals.jobs == 40
    assert reader.totals.read_bytes == sum(map(len, targets))


def test_nothing_to_read_is_no_read(reader: RangeReader) -> None:
    reader.read([])
    assert reader.totals.jobs == 0


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_file_that_ends_early_is_named(reader: RangeReader, shard: Path, jobs: int) -> None:
    os.truncate(shard, 1000)
    with pytest.raises(ExpertReadError, match=rf"{shard.name} ends at byte 1000, and 50 more"):
        reader.read([job(bytearray(100), 950) for _ in range(jobs)])
    assert not reader.active


def test_an_io_error_is_named(reader: RangeReader, shard: Path) -> None:
    reader._fds[0], kept = os.open(shard, os.O_WRONLY), reader._fds[0]
    with pytest.raises(ExpertReadError, match="cannot be read at byte 5: Bad file descriptor"):
        reader.read([job(bytearray(10), 5)])
    os.close(kept)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExpertReadError, match=r"gone\.safetensors cannot be opened"):
        RangeReader([tmp_path / "gone.safetensors"], workers=1, clock=SystemClock())


def test_a_file_that_was_replaced_is_still_read_as_it_was(reader: RangeReader, shard: Path) -> None:
    """A download that renames a new file into place does not change what is being served."""
    other = shard.with_suffix(".new")
    other.write_bytes(b"x" * len(CONTENT))
    other.replace(shard)
    target = bytearray(64)
    reader.read([job(target, 0)])
    assert target == CONTENT[:64]
