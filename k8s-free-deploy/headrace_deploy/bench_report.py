"""What `headrace bench stream` prints: a table for a person, or JSON for a program."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from headrace_replicas.engine.experts.read_rates import ReadRates
from headrace_replicas.engine.memory_refusal import shown_bytes
from headrace_replicas.engine.stream_figures import (
    Limits,
    Recommendation,
    Row,
    cold_share,
    compute_rate,
    held_by,
    parts,
    recommend,
    warm_share,
)
from headrace_replicas.engine.stream_sweep import Sweep

_HEADER: Final = (
    "slots",
    "experts",
    "schedule",
    "memory",
    "hits",
    "MB/token",
    "least",
    "warm tok/s",
    "of bound",
    "cold tok/s",
    "of bound",
    "held by",
)
_NOTHING: Final = "-"
# With more than this share of the cores taken, rows are not comparable with each other.
_BUSY_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A sweep, and what follows from it.

    Attributes:
        checkpoint: Folder of the model.
        prompt_tokens: Tokens of the prompt.
        sweep: What was measured.
        names_schedule: Whether a recommendation names the schedule too.
        load_average: Programs that ran before the sweep began, a minute's mean.
        cores: Processor cores that they shared.
    """

    checkpoint: str
    prompt_tokens: int
    sweep: Sweep
    names_schedule: bool
    load_average: float
    cores: int

    @property
    def limits(self) -> Limits | None:
        """What bounds the rows; None when there are none."""
        reads = self.sweep.reads
        if not self.sweep.rows:
            return None
        ssd = reads.ssd if reads is not None and reads.is_cold else None
        return Limits(
            compute_tokens_per_s=compute_rate(self.sweep.rows),
            ssd_bytes_per_s=None if ssd is None else ssd.bytes_per_s,
            page_cache_bytes_per_s=None if reads is None else reads.warm.bytes_per_s,
        )

    @property
    def is_sound(self) -> bool:
        """Whether something was measured, and no token differed where none may.

        On a GPU the number of slots may choose other kernels, whose last bits differ.
        """
        is_exact = self.sweep.device == "cpu"
        return bool(self.sweep.rows) and not (is_exact and self.sweep.differing)


def as_lines(report: Report) -> Iterator[str]:
    """Everything for a person."""
    sweep = report.sweep
    limits = report.limits
    if limits is not None:
        yield from _columns([_HEADER, *(_cells(row, limits) for row in sweep.rows)])
        yield ""
    for refusal in sweep.refusals:
        yield f"{refusal.setting} was not measured: {refusal.reason}"
    if limits is None:
        return
    yield f"computing: {limits.compute_tokens_per_s:.2f} tok/s at most, with nothing to read"
    if sweep.reads is not None:
        yield from _reads_lines(sweep.reads)
    yield _tokens_line(report)
    if report.load_average > _BUSY_RATIO * report.cores:
        yield (
            f"other programs kept this machine busy (load average {report.load_average:.1f} on "
            f"{report.cores} cores before the first row): measure again when it is idle"
        )
    recommended = recommend(sweep.rows)
    if recommended is not None:
        yield ""
        yield from _recommendation_lines(recommended, names_schedule=report.names_schedule)


def as_plain(report: Report) -> dict[str, object]:
    """Everything as JSON holds it: bytes, seconds and ratios, as measured."""
    sweep = report.sweep
    limits = report.limits
    recommended = recommend(sweep.rows)
    return {
        "checkpoint": report.checkpoint,
        "device": sweep.device,
        "dtype": sweep.dtype,
        "prompt_tokens": report.prompt_tokens,
        "load_average": report.load_average,
        "tokens": sweep.tokens,
        "rows": [] if limits is None else [_plain_row(row, limits) for row in sweep.rows],
        "refused": [asdict(refusal) for refusal in sweep.refusals],
        "limits": None if limits is None else asdict(limits),
        "reads": None if sweep.reads is None else _plain_reads(sweep.reads),
        "differing": list(sweep.differing),
        "recommended": None if recommended is None else _plain_recommendation(recommended),
    }


def _plain_row(row: Row, limits: Limits) -> dict[str, object]:
    run = row.cold or row.warm
    return asdict(row) | {
        "warm_share": warm_share(row, limits),
        "cold_share": cold_share(row, limits),
        "parts": asdict(parts(row, run, limits.compute_tokens_per_s)),
        "held_by": held_by(row, limits.compute_tokens_per_s),
    }


def _plain_reads(reads: ReadRates) -> dict[str, object]:
    return asdict(reads) | {"is_cold": reads.is_cold, "cached_ratio": reads.cached_ratio}


def _plain_recommendation(recommended: Recommendation) -> dict[str, object]:
    return {
        "slots": recommended.slots,
        "schedule": recommended.row.schedule,
        "page_cache_bytes": recommended.row.page_cache_bytes,
        "reason": recommended.reason,
        "warnings": list(recommended.warnings),
    }


def _cells(row: Row, limits: Limits) -> tuple[str, ...]:
    from_disk = cold_share(row, limits)
    return (
        row.setting,
        f"{row.slots}/{row.experts}",
        row.schedule,
        shown_bytes(row.memory_bytes),
        f"{row.hit_ratio:.3f}",
        f"{row.warm.read_bytes / 1e6:.2f}",
        f"{row.least_read_bytes / 1e6:.2f}",
        f"{row.warm.tokens_per_s:.2f}",
        f"{warm_share(row, limits):.2f}",
        _NOTHING if row.cold is None else f"{row.cold.tokens_per_s:.2f}",
        _NOTHING if from_disk is None else f"{from_disk:.2f}",
        held_by(row, limits.compute_tokens_per_s),
    )


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines that no terminal folds in the middle of a column; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {_HEADER.index(name) for name in ("slots", "schedule", "held by")}
    for row in rows:
        cells = (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _reads_lines(reads: ReadRates) -> Iterator[str]:
    if reads.cold:
        depths = ", ".join(
            f"{rate.at_once} at once {rate.bytes_per_s / 1e9:.2f} GB/s" for rate in reads.cold
        )
        yield f"experts from the SSD: {depths}; {reads.cold[-1].run_bytes / 1e6:.2f} MB a read"
        yield _coldness(reads)
    yield f"experts from the page cache: {reads.warm.bytes_per_s / 1e9:.2f} GB/s"


def _coldness(reads: ReadRates) -> str:
    if reads.cached_ratio is None:
        return (
            f"cold by {reads.how}; whether pages stayed in memory is not told here, because the "
            "files are another user's"
        )
    if reads.is_cold:
        return f"cold by {reads.how}: {reads.cached_ratio:.1%} of the pages were still in memory"
    return (
        f"NOT cold: {reads.cached_ratio:.1%} of the pages stayed in memory after {reads.how}. This "
        "file system keeps them, so that cold figures say nothing of the disk and bound nothing"
    )


def _tokens_line(report: Report) -> str:
    sweep = report.sweep
    if not sweep.differing:
        return f"tokens: all {sweep.tokens} the same in every run"
    runs = "; ".join(sweep.differing)
    line = f"tokens: NOT the same as in the first run: {runs}"
    if report.is_sound:
        line += ". On a GPU the number of slots may choose other kernels, whose last bits differ"
    return line


def _recommendation_lines(recommended: Recommendation, *, names_schedule: bool) -> Iterator[str]:
    schedule = recommended.row.schedule
    named = f", schedule: {schedule}" if names_schedule and schedule != "resident" else ""
    yield f"engine: {{slots: {recommended.slots}{named}}}  # {recommended.reason}"
    for warning in recommended.warnings:
        yield f"- {warning}"
