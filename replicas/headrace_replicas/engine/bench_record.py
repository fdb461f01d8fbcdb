"""What a bench of streaming measured on a host, kept for the plans that are made there later.

One file for each checkpoint in the state folder. It speaks of one host, device and compute type; a
plan for another one does not use it, and says so.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_replicas.engine.durable_files import write_whole
from headrace_replicas.engine.footprint import ModelSizes
from headrace_replicas.engine.json_files import first_complaint
from headrace_replicas.engine.memory_plan import Bandwidths
from headrace_replicas.engine.stream_figures import Limits, Row

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]

_LIMIT_BYTES: Final = 2**20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MeasuredSlots(_Part):
    """What one number of slots gave.

    Attributes:
        slots: Experts of a layer in memory at a time.
        hit_ratio: As in a row of a sweep.
    """

    slots: Annotated[int, Field(ge=1)]
    hit_ratio: Ratio


class Origin(_Part):
    """What figures hold for.

    Attributes:
        fingerprint: Of the checkpoint.
        host: Label of the host.
        device: Where it was computed.
        dtype: `engine.dtype`, as it was set.
    """

    fingerprint: str
    host: str
    device: Literal["cpu", "gpu"]
    dtype: str


class BenchRecord(_Part):
    """What is kept.

    Attributes:
        format: Tells this file from others.
        version: Of the format.
        origin: What it holds for.
        measured_s: Wall-clock second at which it was measured.
        compute_tokens_per_s: The fastest that a token was computed with nothing to read.
        ssd_bytes_per_s: Experts from the disk, cold; None when that was not measured.
        slots: What was measured, by rising slots.
    """

    format: Literal["headrace-stream-bench"] = "headrace-stream-bench"
    version: Literal[1] = 1
    origin: Origin
    measured_s: Positive
    compute_tokens_per_s: Positive
    ssd_bytes_per_s: Positive | None
    slots: tuple[MeasuredSlots, ...]

    def bandwidths(self, sizes: ModelSizes) -> Bandwidths | None:
        """The bandwidths that bound a plan; None when the disk was not measured.

        That of memory is what computing drew: active bytes of a token times its rate.
        """
        if self.ssd_bytes_per_s is None:
            return None
        return Bandwidths(
            ssd_bytes_per_s=self.ssd_bytes_per_s,
            memory_bytes_per_s=self.compute_tokens_per_s * sizes.active_bytes,
        )

    def hit_ratio(self, slots: int) -> float | None:
        """What so many slots may expect: as measured, or on the line between two neighbours.

        Hit ratios rise ever more slowly, so the line is the careful side. None below the fewest
        slots and above the most that were measured.
        """
        known = sorted(self.slots, key=lambda one: one.slots)
        place = bisect_left(known, slots, key=lambda one: one.slots)
        if place == len(known):
            return None
        above = known[place]
        if above.slots == slots:
            return above.hit_ratio
        if place == 0:
            return None
        below = known[place - 1]
        part = (slots - below.slots) / (above.slots - below.slots)
        return below.hit_ratio + part * (above.hit_ratio - below.hit_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is for a plan.

    Attributes:
        record: It, or None when there is none that holds.
        ignored: Why the one that is there does not hold; empty when it does or there is none.
    """

    record: BenchRecord | None = None
    ignored: str = ""


def record_of(
    origin: Origin,
    measured_s: float,
    rows: Iterable[Row],
    limits: Limits,
) -> BenchRecord:
    """The record of a sweep.

    Args:
        origin: What it holds for.
        measured_s: Wall-clock second.
        rows: What was measured, at least one row.
        limits: What bounds the rows.
    """
    ratios: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row.slots):
        # Of two schedules the one that reads less.
        ratios[row.slots] = max(row.hit_ratio, ratios.get(row.slots, 0.0))
    return BenchRecord(
        origin=origin,
        measured_s=measured_s,
        compute_tokens_per_s=limits.compute_tokens_per_s,
        ssd_bytes_per_s=limits.ssd_bytes_per_s,
        slots=tuple(MeasuredSlots(slots=n, hit_ratio=ratio) for n, ratio in ratios.items()),
    )


def record_path(state_dir: Path, fingerprint: str) -> Path:
    """Where the figures of a checkpoint lie."""
    return state_dir / "bench" / f"{fingerprint[:16]}.json"


def write_record(state_dir: Path, record: BenchRecord) -> Path:
    """Keep figures in the place of older ones.

    Raises:
        OSError: They could not be written.
    """
    path = record_path(state_dir, record.origin.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{record.model_dump_json(indent=2)}\n".encode())
    return path


def find_record(state_dir: Path, origin: Origin) -> Found:
    """The figures that hold for a plan.

    Args:
        state_dir: The state folder.
        origin: What is planned.
    """
    path = record_path(state_dir, origin.fingerprint)
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT_BYTES)
    except FileNotFoundError:
        return Found()
    except OSError as error:
        return Found(ignored=f"{path} cannot be read: {error.strerror}")
    try:
        record = BenchRecord.model_validate_json(raw)
    except ValidationError as error:
        return Found(ignored=f"{path} is no record of this headrace ({first_complaint(error)})")
    foreign = _foreign(record.origin, origin)
    if foreign:
        return Found(ignored=f"{path} was measured {foreign}")
    return Found(record=record)


def _foreign(theirs: Origin, ours: Origin) -> str:
    """What a record was measured with instead; empty when it is the same."""
    if theirs.fingerprint != ours.fingerprint:
        return "with another checkpoint"
    if theirs.host != ours.host:
        return f"on host {theirs.host}, and this is {ours.host}"
    if theirs.device != ours.device:
        return f"on the {theirs.device}, and the plan is for the {ours.device}"
    if theirs.dtype != ours.dtype:
        return f"with engine.dtype = {theirs.dtype}, and the plan is for {ours.dtype}"
    return ""
