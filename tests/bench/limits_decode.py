"""Decode steps with fewer slots than experts, by turns with the resident model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Final

from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.budget import draw_up
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.experts.schedule import SCHEDULES
from headrace_replicas.engine.slots_setting import ALL, percentage
from tests.bench.decoding import (
    Disk,
    Feed,
    Load,
    Memory,
    PickSchedule,
    Restart,
    Settle,
    Subject,
)
from tests.bench.limits_extent import TARGET_SHARE, Extent, slots_for
from tests.bench.limits_models import Model
from tests.bench.limits_report import DecodeRow, Pair, Verdicts, memory_line
from tests.bench.routing import Trace, misses
from tests.bench.seats import Seat
from tests.bench.token_time import Split

# Of a text that is looked at closely: all, and those that only bring slots near to it.
CLOSE_TOKENS: Final = 42
NEAR_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Text:
    """What is decoded.

    Attributes:
        model: By which model.
        extent: In which rounds.
        tokens: What is fed.
        trace: The experts that it chooses.
    """

    model: Model
    extent: Extent
    tokens: Sequence[int]
    trace: Trace


def loaders(model: Model, extent: Extent, verdicts: Verdicts) -> None:
    """Our loader beside mlx-lm's, everything resident."""
    rounds, tokens = extent.loader
    text = model.text((rounds + 1) * tokens, 2)
    pairs: list[Pair] = []
    with (
        Seat(Load(folder=model.folder, by="mlx-lm")) as theirs,
        Seat(Load(folder=model.folder)) as ours,
    ):
        for number in range(rounds + 1):
            window = text[number * tokens : (number + 1) * tokens]
            pairs.append(by_turns(theirs, ours, Feed(tokens=window), number))
    counted = pairs[1:]
    same = sum(pair.same for pair in pairs)
    verdicts.check(same == len(text), f"{model.name}: both loaders give the same logits")
    slower = [1 / pair.share - 1 for pair in counted]
    wall = median(1 / pair.wall_share for pair in counted) - 1
    low, middle, high = quantiles(slower, n=4)
    line = f"{middle:+.1%} (quartiles {low:+.1%}, {high:+.1%}; {wall:+.1%} by the wall clock)"
    print(f"our loader against mlx_lm's, all resident: {line}; logits equal {same} of {len(text)}")
    verdicts.target(middle <= 0.01, f"{model.name}: overhead of our loader <= 1 %", line)


def by_turns(resident: Seat[Subject], streamed: Seat[Subject], feed: Feed, number: int) -> Pair:
    """Both do the same; who begins changes from round to round."""
    if number % 2:
        second = streamed.do(feed)
        return Pair(resident=resident.do(feed), streamed=second)
    return Pair(resident=resident.do(feed), streamed=streamed.do(feed))


def decode(
    text: Text, share: float, disk: Disk, seats: tuple[Seat[Subject], Seat[Subject]]
) -> list[DecodeRow]:
    """The rounds with some slots, warm and then cold; settling is the first of the warm ones."""
    resident, streamed = seats
    streamed.do(Settle())
    for seat in seats:
        seat.do(Restart())
    settling = text.extent.settling
    begun = by_turns(resident, streamed, Feed(tokens=text.tokens[:settling]), 0)
    windows = text.extent.windows
    pairs = [
        by_turns(resident, streamed, Feed(tokens=text.tokens[begin:end], cold=cold), number)
        for number, (begin, end, cold) in enumerate(windows)
    ]
    rows: list[DecodeRow] = []
    for kind in (False, True):
        chosen = [number for number, (_, _, cold) in enumerate(windows) if cold == kind]
        if chosen:
            begin, end = windows[chosen[0]][0], windows[chosen[-1]][1]
            rows.append(
                DecodeRow(
                    share=share,
                    cold=kind,
                    settling=begun,
                    pairs=[pairs[number] for number in chosen],
                    misses=misses(
                        text.trace[:end],
                        slots=slots_for(text.model, share),
                        settling=begin,
                    ),
                    disk=disk,
                )
            )
    return rows


def judge(row: DecodeRow, model: Model, verdicts: Verdicts) -> None:
    """The counts of some rounds, and the targets of a quarter of the experts."""
    done, name = (
        row.work,
        f"{model.name}, {row.share:.1%} slots, {'cold' if row.cold else 'warm'}",
    )
    needed = done.hits + done.misses
    different = sum(len(p.streamed.logits) - p.same for p in (row.settling, *row.pairs))
    verdicts.check(different == 0, f"{name}: {different} tokens have other logits")
    verdicts.check(
        needed == row.misses.needed, f"{name}: {needed} hits and misses, {row.misses.needed} needed"
    )
    verdicts.check(
        done.misses >= row.misses.least,
        f"{name}: {done.misses} misses, no policy has less than {row.misses.least}",
    )
    verdicts.check(
        done.read_bytes == done.misses * row.disk.expert_bytes,
        f"{name}: {done.read_bytes} bytes read for {done.misses} misses of {row.disk.expert_bytes}",
    )
    if row.share != TARGET_SHARE:
        return
    read = f"{done.misses} experts read where {row.misses.least} is the least"
    waited = f"{done.read_s / row.tokens * 1e3:.1f} ms a token waited for reads"
    if row.cold:
        figure = f"{row.bound_share:.3f} ({read}; {waited})"
        aim = f"{model.name}: cold, 25 % slots >= 0.9 of min(bound, resident)"
        verdicts.target(row.bound_share >= 0.9, aim, figure)
    else:
        figure = f"{row.speed_share:.3f} ({read}; {waited})"
        aim = f"{model.name}: warm, 25 % slots >= 0.95 of resident"
        verdicts.target(row.speed_share >= 0.95, aim, figure)


def check_cold(disk: Disk, model: Model, verdicts: Verdicts) -> None:
    """Dropping the page cache must have an effect, or cold figures mean nothing."""
    verdicts.check(
        disk.rates.is_cold,
        f"{model.name}: {disk.rates.cached_ratio:.0%} of its pages stay in memory when dropped; "
        "put --folder on a disk, and let nobody else read it",
    )


def memory_of(
    model: Model, seat: Seat[Subject], slots: int | None, tokens: int, verdicts: Verdicts
) -> str:
    """What a process takes after a text, beside the plan for one request of that length."""
    setting = ALL if slots is None else percentage(slots, model.experts)
    engine = EngineSettings(device="cpu", slots=setting, max_batch=1)
    # mlx-lm's caches grow by 256 tokens.
    context_tokens = -(-tokens // 256) * 256
    plan = draw_up(
        read_checkpoint(model.folder), engine, context_tokens=context_tokens, on_gpu=False
    ).plan
    planned_bytes = plan.resident_bytes + plan.slot_bytes + plan.kv_bytes
    use = seat.do(Memory())
    ratio = use.arrays_bytes / planned_bytes
    name = f"{model.name}, slots {setting}"
    verdicts.check(abs(ratio - 1) <= 0.05, f"{name}: arrays take {ratio:.3f} of the plan")
    verdicts.check(
        use.grown_bytes <= plan.total_bytes,
        f"{name}: the process grew by {use.grown_bytes / 1e6:.0f} MB, planned "
        f"{plan.total_bytes / 1e6:.0f} MB with headroom",
    )
    if slots is not None and slots == slots_for(model, TARGET_SHARE):
        aim = f"{model.name}: memory within 5 % of the plan"
        verdicts.target(abs(ratio - 1) <= 0.05, aim, f"{ratio:.3f} at {setting} slots")
    return memory_line(setting, use, planned_bytes)


def where_time_goes(
    model: Model, resident: Seat[Subject], streamed: Seat[Subject], disk: Disk
) -> list[str]:
    """A quarter of the experts, looked at closely."""
    lines = [
        str(disk),
        "where a token's time goes (ms), 25 % slots",
        *split_lines("warm", streamed, model.text(CLOSE_TOKENS, 7), cold=False),
        *split_lines("cold", streamed, model.text(CLOSE_TOKENS, 8), cold=True),
    ]
    # A text of its own for each: slots that hold what it needs leave nothing to measure.
    for number, schedule in enumerate(SCHEDULES[1:], start=9):
        text = model.text(CLOSE_TOKENS, number)
        for seat in (resident, streamed):
            seat.do(Restart())
            seat.do(Feed(tokens=text[:NEAR_TOKENS]))
        pairs = [
            by_turns(resident, streamed, Feed(tokens=text[begin:end], schedule=schedule), begin)
            for begin, end in pairwise(range(NEAR_TOKENS, CLOSE_TOKENS + 1, 3))
        ]
        share = median(pair.wall_share for pair in pairs)
        lines.append(f"  schedule {schedule}: {share:.3f} of resident, warm, by the wall clock")
    picked = streamed.do(PickSchedule())
    lines.append(f"  all rows are of schedule {SCHEDULES[0]}; `auto` picks {picked} here")
    return lines


def split_lines(name: str, seat: Seat[Subject], text: Sequence[int], *, cold: bool) -> list[str]:
    """One line for each thing that a token's time goes to."""
    seat.do(Restart())
    seat.do(Feed(tokens=text[:NEAR_TOKENS]))
    spent = seat.do(Split(tokens=text[NEAR_TOKENS:], cold=cold))
    whole_s = sum(spent.values())
    parts = "; ".join(f"{what} {seconds * 1e3:.2f}" for what, seconds in spent.items() if seconds)
    return [f"  {name:<8} {whole_s * 1e3:>8.2f} = {parts}"]
