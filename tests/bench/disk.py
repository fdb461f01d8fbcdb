"""How fast missing experts come from the disk, at the size and depth at which they are read."""

import errno
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_replicas.engine.experts.reader import RangeReader, ReadJob
from headrace_replicas.engine.experts.store import TensorSource
from tests.bench.decoding import Subject

_EXPERTS: Final = 64
_BLOCK_BYTES: Final = 4 * 1024 * 1024
_SAMPLES: Final = 64
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRate:
    """What the disk gives, cold.

    Attributes:
        experts_bytes_per_s: Random experts, all their ranges asked for at a time.
        blocks_bytes_per_s: Blocks of 4 MiB, for comparison.
        warm_bytes_per_s: The same experts from the page cache.
        expert_bytes: What bringing one expert reads.
        left_ratio: Share of pages that were still in memory after the cache was dropped.
    """

    experts_bytes_per_s: float
    blocks_bytes_per_s: float
    warm_bytes_per_s: float
    expert_bytes: int
    left_ratio: float


@dataclass(frozen=True, slots=True)
class MeasureDisk:
    """Read experts and large blocks from the files of a model that streams."""

    def run(self, subject: Subject) -> DiskRate:
        """Measure it; the slots are not touched."""
        assert subject.streamed is not None
        reader = subject.streamed.reader
        draw = random.Random(5)  # noqa: S311 - a benchmark
        pools = [pool for stream in subject.streamed.streams for pool in stream._pools]
        layers = len(subject.streamed.streams)
        tensors = len(pools) // layers
        jobs: list[ReadJob] = []
        for _ in range(_EXPERTS):
            first = draw.randrange(layers) * tensors
            expert = draw.randrange(len(pools[first]._source.places))
            jobs += [_job(pool._source, expert) for pool in pools[first : first + tensors]]
        shards = subject.checkpoint.shards
        blocks = [
            ReadJob(file, draw.randrange(size - _BLOCK_BYTES), _room(_BLOCK_BYTES))
            for file, size in enumerate(shard.stat().st_size for shard in shards)
            if size > _BLOCK_BYTES
            for _ in range(max(1, 32 // len(shards)))
        ]
        reader.drop_page_cache()
        left_ratio = sum(_in_memory(shard) for shard in shards) / len(shards)
        experts_rate = _rate(reader, jobs)
        warm_rate = _rate(reader, jobs)
        reader.drop_page_cache()
        return DiskRate(
            experts_bytes_per_s=experts_rate,
            blocks_bytes_per_s=_rate(reader, blocks),
            warm_bytes_per_s=warm_rate,
            expert_bytes=subject.streamed.streams[0].expert_bytes,
            left_ratio=left_ratio,
        )


def _job(source: TensorSource, expert: int) -> ReadJob:
    file, offset = source.places[expert]
    return ReadJob(file, offset, _room(source.expert_bytes))


def _room(size: int) -> memoryview:
    return memoryview(bytearray(size))


def _rate(reader: RangeReader, jobs: list[ReadJob]) -> float:
    began_s = time.perf_counter()
    reader.read(jobs)
    return sum(len(job.target) for job in jobs) / (time.perf_counter() - began_s)


def _in_memory(file: Path) -> float:
    """Share of a file's pages that can be read without waiting for the disk."""
    draw = random.Random(7)  # noqa: S311 - a benchmark
    page = bytearray(_PAGE_BYTES)
    size = file.stat().st_size
    found = 0
    fd = os.open(file, os.O_RDONLY)
    try:
        for _ in range(_SAMPLES):
            offset = draw.randrange(max(1, size - _PAGE_BYTES))
            try:
                found += os.preadv(fd, [page], offset, os.RWF_NOWAIT) > 0
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
    finally:
        os.close(fd)
    return found / _SAMPLES
