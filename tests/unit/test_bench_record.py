"""Figures of a bench: kept for one host, device and type, and used for nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.bench_record import (
    BenchRecord,
    MeasuredSlots,
    Origin,
    find_record,
    record_of,
    record_path,
    write_record,
)
from headrace_replicas.engine.footprint import CacheSize, ExpertLayerSize, ModelSizes
from headrace_replicas.engine.stream_figures import Limits, Row, Timing

ORIGIN = Origin(fingerprint="ab" * 32, host="m1", device="cpu", dtype="auto")
SIZES = ModelSizes(
    file_bytes=10_000,
    unused_bytes=0,
    resident_bytes=1000,
    lookup_bytes=100,
    layers=(ExpertLayerSize(path="0", experts=64, read_bytes=100, memory_bytes=200),) * 2,
    top_k=4,
    cache=CacheSize(token_bytes=1),
)
LIMITS = Limits(compute_tokens_per_s=50.0, ssd_bytes_per_s=2e9, page_cache_bytes_per_s=9e9)


def row(slots: int, hit_ratio: float) -> Row:
    return Row(
        setting="x",
        slots=slots,
        experts=64,
        schedule="layers",
        memory_bytes=1,
        page_cache_bytes=1,
        hit_ratio=hit_ratio,
        least_read_bytes=0.0,
        warm=Timing(tokens_per_s=1.0, read_bytes=1.0, read_s=0, gate_s=0, passes=0),
        cold=None,
        all_hits_s=None,
        uncut_s=None,
    )


def record(**changes: object) -> BenchRecord:
    made = record_of(ORIGIN, 1000.0, [row(32, 0.9), row(16, 0.5)], LIMITS)
    return made.model_copy(update=changes)


def test_what_is_written_is_found(tmp_path: Path) -> None:
    """And replaces what was there."""
    write_record(tmp_path, record(measured_s=1.0))
    path = write_record(tmp_path, record())
    assert path == record_path(tmp_path, ORIGIN.fingerprint)
    assert find_record(tmp_path, ORIGIN).record == record()
    assert list(path.parent.iterdir()) == [path]


def test_of_two_schedules_the_one_that_reads_less_is_kept() -> None:
    """By rising slots, whatever the order of the rows."""
    made = record_of(ORIGIN, 1.0, [row(16, 0.5), row(16, 0.75), row(8, 0.0)], LIMITS)
    assert made.slots == (
        MeasuredSlots(slots=8, hit_ratio=0.0),
        MeasuredSlots(slots=16, hit_ratio=0.75),
    )


def test_between_two_measured_slots_the_hit_ratio_lies_on_a_line() -> None:
    found = [record().hit_ratio(slots) for slots in (16, 20, 24, 32)]
    assert found == pytest.approx([0.5, 0.6, 0.7, 0.9])


def test_outside_of_what_was_measured_nothing_is_said() -> None:
    assert record().hit_ratio(15) is None
    assert record().hit_ratio(33) is None
    assert record(slots=()).hit_ratio(16) is None


@given(st.integers(1, 100))
def test_hit_ratios_stay_between_their_neighbours(slots: int) -> None:
    found = record().hit_ratio(slots)
    assert found is None or 0.5 <= found <= 0.9


def test_memory_delivers_what_computing_drew() -> None:
    """900 resident bytes that a token reads, and 8 experts of 200, fifty times a second."""
    bandwidths = record().bandwidths(SIZES)
    assert bandwidths is not None
    assert bandwidths.ssd_bytes_per_s == 2e9
    assert bandwidths.memory_bytes_per_s == 50 * (900 + 8 * 200)


def test_without_cold_reads_there_are_no_bandwidths() -> None:
    made = record_of(ORIGIN, 1.0, [row(16, 0.5)], replace(LIMITS, ssd_bytes_per_s=None))
    assert made.bandwidths(SIZES) is None


def test_nothing_kept_is_no_complaint(tmp_path: Path) -> None:
    found = find_record(tmp_path / "nowhere", ORIGIN)
    assert (found.record, found.ignored) == (None, "")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file: Invalid JSON"),
        (b'{"format": "headrace-stream-bench"', "the file: Invalid JSON"),
        (b"\xff\xfe", "the file: Invalid JSON"),
        (b"[]", "the file: "),
        (b'{"format": "something else"}', "format: Input should be 'headrace-stream-bench'"),
        (b"x" * 2**21, "the file: Invalid JSON"),
    ],
    ids=["empty", "cut", "binary", "list", "other", "huge"],
)
def test_a_file_that_is_no_record_is_ignored_with_its_reason(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = write_record(tmp_path, record())
    path.write_bytes(content)
    found = find_record(tmp_path, ORIGIN)
    assert found.record is None
    assert str(path) in found.ignored
    assert says in found.ignored


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("compute_tokens_per_s", 0),
        ("compute_tokens_per_s", float("nan")),
        ("ssd_bytes_per_s", "fast"),
        ("slots", [{"slots": 4, "hit_ratio": 1.5}]),
        ("surprise", 1),
    ],
)
def test_a_record_with_a_wrong_value_is_ignored(tmp_path: Path, field: str, value: object) -> None:
    path = write_record(tmp_path, record())
    content = json.loads(path.read_text()) | {field: value}
    path.write_text(json.dumps(content))
    found = find_record(tmp_path, ORIGIN)
    assert found.record is None
    assert f"({field}" in found.ignored


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host": "m2"}, "on host m1, and this is m2"),
        ({"device": "gpu"}, "on the cpu, and the plan is for the gpu"),
        ({"dtype": "float16"}, "with engine.dtype = auto, and the plan is for float16"),
        # Two checkpoints whose fingerprints begin alike share a file.
        ({"fingerprint": "ab" * 8 + "cd" * 24}, "with another checkpoint"),
    ],
)
def test_foreign_figures_are_ignored_with_their_origin(
    tmp_path: Path, changes: dict[str, str], says: str
) -> None:
    write_record(tmp_path, record())
    found = find_record(tmp_path, ORIGIN.model_copy(update=changes))
    assert found.record is None
    assert found.ignored.endswith(says)


def test_a_record_that_cannot_be_read_is_ignored(tmp_path: Path) -> None:
    record_path(tmp_path, ORIGIN.fingerprint).mkdir(parents=True)
    assert "cannot be read: Is a directory" in find_record(tmp_path, ORIGIN).ignored
