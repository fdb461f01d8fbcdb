"""What a sweep over slots says: the bound, what holds a row below it, and the budget to take.

Pure. The bound of one stream is

    tok/s <= min(bytes a second that the reads come from / bytes read a token, computing)

where computing is the fastest that this host was seen to compute a token with nothing to read. A
model that does not fit cannot be measured resident, so a token is run again and again with all of
its experts in their slots, and without stopping at the gates; where the model fits, its resident
rate counts too. It is what this engine reaches with the memory that slots lie in, not what the
chip's data sheet promises, so a share of the bound speaks of streaming alone.

Laws: the parts of a token's time add up to it, and none is negative; the recommended row comes
close to the best rate, and no row of fewer slots does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headrace_replicas.engine.slots_setting import ALL, AUTO, percentage

RowSchedule = Literal["resident", "layers", "overlap", "speculate"]
HeldBy = Literal["compute", "gates", "reads", "installs", "passes"]

GOOD_ENOUGH: Final = 0.95
"""Share of the best rate that a smaller budget must reach to be recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One run of a row; all but the rate for each token.

    Attributes:
        tokens_per_s: Decoded tokens a second.
        read_bytes: Bytes read.
        read_s: Seconds of waiting for reads.
        gate_s: Seconds of waiting for gates, in which the device computes too.
        passes: Runs of the whole token by speculation; 0 in other schedules.
    """

    tokens_per_s: float
    read_bytes: float
    read_s: float
    gate_s: float
    passes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting of `engine.slots` with one schedule.

    Attributes:
        setting: As it was asked for.
        slots: Experts of a layer in memory at a time.
        experts: Experts of the layer that has most.
        schedule: How missing experts were fetched.
        memory_bytes: What MLX held with the model, its slots and the stream's KV cache.
        page_cache_bytes: What the plan leaves to the page cache and everybody else.
        hit_ratio: 1 less the share of a token's expert bytes that were read when warm. A read of an
            expert that turned out not to be needed counts as a miss.
        least_read_bytes: What a token would read if the slots had known the future.
        warm: With what the page cache holds of this answer.
        cold: With an empty page cache before each token; None when that was not measured.
        all_hits_s: Seconds of a token by this schedule with nothing to read, if that was measured.
        uncut_s: The same without stopping at gates.
    """

    setting: str
    slots: int
    experts: int
    schedule: RowSchedule
    memory_bytes: int
    page_cache_bytes: int
    hit_ratio: float
    least_read_bytes: float
    warm: Timing
    cold: Timing | None
    all_hits_s: float | None
    uncut_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds every row.

    Attributes:
        compute_tokens_per_s: The fastest that a token was computed with nothing to read.
        ssd_bytes_per_s: Experts from the disk, or None when it was not measured.
        page_cache_bytes_per_s: Experts from memory, or None when nothing streamed.
    """

    compute_tokens_per_s: float
    ssd_bytes_per_s: float | None
    page_cache_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where the seconds of a token go.

    Attributes:
        compute_s: Computing, at the speed of the bound.
        gates_s: What stopping at the gates costs on top, with nothing to read.
        reads_s: Waiting for reads, with what was computed meanwhile.
        rest_s: What else misses cost: passes that are run again, or bringing experts into slots.
    """

    compute_s: float
    gates_s: float
    reads_s: float
    rest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The budget to take.

    Attributes:
        row: The row that it was measured in.
        slots: The value of `engine.slots`.
        reason: Why, for a person.
        warnings: What to know besides.
    """

    row: Row
    slots: str
    reason: str
    warnings: tuple[str, ...]


def compute_rate(rows: Iterable[Row]) -> float:
    """The fastest that a token was computed, tokens a second; see the module's docstring."""
    rates: list[float] = []
    for row in rows:
        rates += [1 / took_s for took_s in (row.all_hits_s, row.uncut_s) if took_s]
        rates += [run.tokens_per_s for run in (row.warm, row.cold) if run is not None]
    return max(rates)


def bound(run: Timing, bytes_per_s: float | None, compute_tokens_per_s: float) -> float:
    """The most tokens a second when reads and computing overlap perfectly.

    Args:
        run: What was read.
        bytes_per_s: How fast; None when nobody knows, so that only computing bounds.
        compute_tokens_per_s: From `compute_rate`.
    """
    if bytes_per_s is None or not run.read_bytes:
        return compute_tokens_per_s
    return min(bytes_per_s / run.read_bytes, compute_tokens_per_s)


def warm_share(row: Row, limits: Limits) -> float:
    """Share of the bound that a row reached with the page cache's help."""
    most = bound(row.warm, limits.page_cache_bytes_per_s, limits.compute_tokens_per_s)
    return row.warm.tokens_per_s / most


def cold_share(row: Row, limits: Limits) -> float | None:
    """Share of the bound that a row reached from the disk; None when that was not measured."""
    if row.cold is None:
        return None
    most = bound(row.cold, limits.ssd_bytes_per_s, limits.compute_tokens_per_s)
    return row.cold.tokens_per_s / most


def parts(row: Row, run: Timing, compute_tokens_per_s: float) -> Parts:
    """Take a token's time apart.

    Waiting for reads is measured as such. What stopping at gates costs cannot be: the device
    computes while a gate is waited for. So it is the difference of two tokens with nothing to read,
    one that stops and one that does not.
    """
    total_s = 1 / run.tokens_per_s
    if row.schedule == "resident":
        return Parts(compute_s=total_s, gates_s=0.0, reads_s=0.0, rest_s=0.0)
    reads_s = min(run.read_s, total_s)
    compute_s = min(1 / compute_tokens_per_s, total_s - reads_s)
    left_s = total_s - reads_s - compute_s
    cut_s = (row.all_hits_s or 0.0) - 1 / compute_tokens_per_s
    gates_s = min(max(cut_s, 0.0), left_s)
    return Parts(compute_s=compute_s, gates_s=gates_s, reads_s=reads_s, rest_s=left_s - gates_s)


def held_by(row: Row, compute_tokens_per_s: float) -> HeldBy:
    """The largest part of a token's time, from the disk where that was measured."""
    shown = parts(row, row.cold or row.warm, compute_tokens_per_s)
    rest: HeldBy = "passes" if row.schedule == "speculate" else "installs"
    names: dict[HeldBy, float] = {
        "compute": shown.compute_s,
        "gates": shown.gates_s,
        "reads": shown.reads_s,
        rest: shown.rest_s,
    }
    return max(names, key=lambda name: names[name])


def recommend(rows: Sequence[Row]) -> Recommendation | None:
    """The fewest slots that come close to the best rate; None when nothing was measured.

    Warm rates decide. Cold ones rise with every slot, so they would always ask for the most memory;
    that a large cache starves the page cache shows only while there is one.
    """
    if not rows:
        return None
    best = max(rows, key=lambda row: row.warm.tokens_per_s)
    enough = GOOD_ENOUGH * best.warm.tokens_per_s
    good = [row for row in rows if row.warm.tokens_per_s >= enough]
    chosen = min(good, key=lambda row: (row.slots, -row.warm.tokens_per_s))
    return Recommendation(
        row=chosen,
        slots=_reproducible(chosen),
        reason=_reason(chosen, best),
        warnings=tuple(_warnings(chosen, rows)),
    )


def _reproducible(row: Row) -> str:
    """A setting that gives these slots on any day, which `auto` does not."""
    if row.slots == row.experts:
        return ALL
    return percentage(row.slots, row.experts) if row.setting == AUTO else row.setting


def _reason(chosen: Row, best: Row) -> str:
    left = f"leaves {chosen.page_cache_bytes / 2**30:.2f} GiB to the page cache"
    if chosen is best:
        return f"the best rate measured; {left}"
    share = chosen.warm.tokens_per_s / best.warm.tokens_per_s
    return f"{share:.0%} of the best rate measured (slots {best.setting}); {left}"


def _warnings(chosen: Row, rows: Sequence[Row]) -> Iterable[str]:
    slower = [
        row.setting
        for row in rows
        if row.slots > chosen.slots
        and row.schedule in {chosen.schedule, "resident"}
        and row.warm.tokens_per_s < GOOD_ENOUGH * chosen.warm.tokens_per_s
    ]
    if slower:
        yield f"slots {', '.join(slower)} took more memory and were slower"
    colds = [rate for row in rows if (rate := _cold_rate(row)) is not None]
    if chosen.cold is not None and chosen.cold.tokens_per_s < GOOD_ENOUGH * max(colds):
        share = chosen.cold.tokens_per_s / max(colds)
        yield f"with an empty page cache it reaches {share:.0%} of the best rate without one"
    yield (
        "a bigger cache can be slower: it takes memory from the page cache, from which experts "
        "that fell out of their slots come back at memory speed"
    )


def _cold_rate(row: Row) -> float | None:
    """Tokens a second without a page cache, which a resident model does not need."""
    if row.schedule == "resident":
        return row.warm.tokens_per_s
    return None if row.cold is None else row.cold.tokens_per_s
