"""Reading byte ranges: whole or not at all, and an error that names the file."""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.engine.experts.reader import RangeReader, ReadJob
from headrace_replicas.engine.experts.storage import SystemStorage
from headrace_replicas.injection.plan import AnyStorageFault, ReadError, ShortRead, TruncatedFile
from headrace_replicas.injection.storage_faults import FaultyStorage

CONTENT = bytes(range(256)) * 64
MIB = 1024 * 1024


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
def test_a_file_that_was_cut_is_named(reader: RangeReader, shard: Path, jobs: int) -> None:
    os.truncate(shard, 1000)
    with pytest.raises(ExpertReadError, match=rf"{shard.name} was cut from 16384 to 1000 bytes"):
        reader.read([job(bytearray(100), 950) for _ in range(jobs)])
    assert not reader.active


@pytest.mark.parametrize("offset", [0, 500])
def test_bytes_of_a_file_that_was_written_to_are_refused(
    reader: RangeReader, shard: Path, offset: int
) -> None:
    """Also those that were not touched: a download that runs over an old copy is half of each."""
    reader.read([job(bytearray(64), 0)])
    with shard.open("r+b") as file:
        file.seek(offset)
        file.write(b"new")
    with pytest.raises(ExpertReadError, match=r"was written to while it was served.*rename it"):
        reader.read([job(bytearray(64), 0)])
    assert reader.health.report(0.0).lost


def test_a_file_that_grew_is_refused(reader: RangeReader, shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ExpertReadError, match="was extended from 16384 to 16388 bytes"):
        reader.read([job(bytearray(64), 0), job(bytearray(64), 100)])


def test_a_file_that_was_deleted_is_read_on_and_told_of_once(
    reader: RangeReader, shard: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard.unlink()
    target = bytearray(64)
    reader.read([job(target, 0)])
    reader.read([job(target, 0)])
    assert target == CONTENT[:64]
    told = [record for record in caplog.records if "was deleted or replaced" in record.message]
    assert len(told) == 1
    assert not reader.health.report(0.0).lost


def faulty(
    shard: Path, *faults: AnyStorageFault, workers: int = 2, failures: int = 3
) -> RangeReader:
    """A reader whose reads meet with these faults."""
    storage = FaultyStorage(SystemStorage(), list(enumerate(faults)), seed=0, clock=SystemClock())
    return RangeReader(
        [shard], workers=workers, clock=SystemClock(), storage=storage, failures=failures
    )


@pytest.mark.parametrize(
    ("errno", "words"),
    [
        (
            "EIO",
            "Input/output error .the disk or its connection fails.. Check the cable",
        ),
        ("ENXIO", "its volume was taken away.. Attach the volume again"),
        ("ENODEV", "its volume was taken away.. Attach the volume again"),
        ("ESTALE", "no longer on its network volume.. Put the checkpoint back"),
        ("ENOTCONN", "server is gone.. Bring the server back"),
        ("ETIMEDOUT", "server does not answer.. Bring the server back"),
    ],
)
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_refused_read_names_file_place_and_remedy(
    shard: Path, errno: str, words: str, jobs: int
) -> None:
    reader = faulty(shard, ReadError.model_validate({"errno": errno}))
    with pytest.raises(ExpertReadError, match=rf"{shard.name} cannot be read at byte 5.*{words}"):
        reader.read([job(bytearray(10), 5) for _ in range(jobs)])
    assert reader.health.report(0.0).troubles == 1
    reader.close()


def test_a_read_that_brings_less_is_asked_for_the_rest(shard: Path) -> None:
    reader = faulty(shard, ShortRead())
    targets = [bytearray(100 + i) for i in range(9)]
    reader.read([job(target, 7 * i) for i, target in enumerate(targets)])
    for i, target in enumerate(targets):
        assert target == CONTENT[7 * i : 7 * i + 100 + i]
    assert reader.health.report(0.0).trouble == ""
    reader.close()


def test_a_file_that_ends_early_is_named(shard: Path) -> None:
    """Nothing happened to it while it was served: it was too short from the start."""
    reader = faulty(shard, TruncatedFile(size_bytes=1000))
    with pytest.raises(ExpertReadError, match=rf"{shard.name} ends at byte 1000, and 50 more"):
        reader.read([job(bytearray(100), 950)])
    reader.close()


def test_a_file_that_fails_again_and_again_is_lost(shard: Path) -> None:
    reader = faulty(shard, ReadError(times=6), failures=3)
    for number in range(1, 4):
        assert not reader.health.report(0.0).lost
        with pytest.raises(ExpertReadError):
            reader.read([job(bytearray(10), 0), job(bytearray(10), 100)])
        assert reader.health.report(0.0).troubles == number
    assert reader.health.report(0.0).lost
    assert "failure 3" in reader.health.report(0.0).trouble
    reader.close()


class GatedStorage(SystemStorage):
    """Lets one read through for each permission, and counts them."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.lengths: list[int] = []

    def read(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        self.permits.acquire()
        self.lengths.append(sum(map(len, targets)))
        return super().read(fd, targets, offset)

    def read_cached(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:  # noqa: ARG002  the seam's signature
        return 0


@pytest.mark.parametrize("jobs", [1, 4])
def test_each_arrival_inside_a_batch_is_a_mark_of_progress(tmp_path: Path, jobs: int) -> None:
    """No mark without an arrival, one for each that comes by itself, all on the caller's thread."""
    shard = tmp_path / "large"
    shard.write_bytes(bytes(8 * MIB))
    storage, marks = GatedStorage(), threading.Semaphore(0)
    threads: set[int] = set()

    def mark() -> None:
        threads.add(threading.get_ident())
        marks.release()

    reader = RangeReader([shard], workers=4, clock=SystemClock(), storage=storage, on_arrival=mark)
    length = 8 * MIB // jobs
    work = [job(bytearray(length), number * length) for number in range(jobs)]
    caller = threading.Thread(target=reader.read, args=[work])
    caller.start()
    assert not marks.acquire(timeout=0.2)
    for _ in range(8):
        storage.permits.release()
        assert marks.acquire(timeout=30)
    caller.join(timeout=30)
    assert threads == {caller.ident}
    assert storage.lengths == [MIB] * 8
    reader.close()


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


class HalfCached(SystemStorage):
    """Has the first half of what it is asked for in memory, and counts what the disk must give."""

    def __init__(self) -> None:
        self.from_disk = 0

    def read_cached(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        half = sum(map(len, targets)) // 2
        parts: list[memoryview] = []
        for target in targets:
            parts.append(target[:half])
            half -= len(parts[-1])
        return os.preadv(fd, [part for part in parts if part], offset)

    def read(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        count = super().read(fd, targets, offset)
        self.from_disk += count
        return count


@pytest.mark.parametrize(("length", "from_disk"), [(1000, 4 * 500), (MIB, 4 * MIB)])
def test_a_small_batch_takes_from_the_disk_only_what_is_not_in_memory(
    tmp_path: Path, length: int, from_disk: int
) -> None:
    """A large one is left to the threads, which copy side by side."""
    shard = tmp_path / "large"
    content = bytes(range(251)) * (4 * MIB // 251 + 1)
    shard.write_bytes(content)
    storage = HalfCached()
    reader = RangeReader([shard], workers=4, clock=SystemClock(), storage=storage)
    targets = [bytearray(length) for _ in range(4)]
    places = [number * (MIB - 7) // 2 for number in range(4)]
    reader.read([job(target, at) for target, at in zip(targets, places, strict=True)])
    for target, at in zip(targets, places, strict=True):
        assert target == content[at : at + length]
    assert storage.from_disk == from_disk
    reader.close()


def test_a_file_system_that_does_not_tell_what_is_in_memory_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    assert SystemStorage().read_cached(-1, [memoryview(bytearray(8))], 0) == 0
