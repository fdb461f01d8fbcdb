"""`make stream-equality`: streamed experts give the resident model's bits, in one table.

Every architecture of the installed mlx-lm whose experts sit in switch layers, in every mode of
quantisation, with room for all experts, half, a quarter, and as few as one token needs. Ends with
its figure, and exits non-zero when a bit differs, when more is read than is needed, when an
architecture is missing from the list, or when a model proves too little.

python -m tests.streaming.equality [--only ARCHITECTURE ...] [--quick] [--jobs 2]
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

from tests.streaming.architectures import NOT_ON_THE_SEAM, by_module, seam_modules
from tests.streaming.trials import (
    ALL_MODULES,
    QUICK_MODES,
    QUICK_MODULES,
    Refusal,
    modes_of,
    published,
    try_architecture,
)
from tests.streaming.verdicts import Verdict

_ROW: Final = "{:<42} {:>5} {:>7} {:>8} {:>13}  {}\n"
_LEGEND: Final = """\
modes    checkpoints that hold in every setting (float32, bfloat16, affine, mxfp4, mxfp8, nvfp4,
         mixed), each with room for half, a quarter and the fewest experts (the first two also for
         all), layer by layer and speculating
chosen   experts that the prompt chose, in the layer and mode where they were fewest
brought  experts read for prompt and decode steps, all settings together
equal    logits of a prompt, of decode steps, of calls that waited, log probabilities of a batch

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was tried.
        cells: Between the name and the note.
        note: What else is worth saying.
        equal: Results that were equal, bit for bit.
        compared: How many there were.
        complaints: What does not hold; empty when all does.
    """

    what: str
    cells: tuple[str, str, str, str]
    note: str = ""
    equal: int = 0
    compared: int = 0
    complaints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _ROW.format(self.what, *self.cells, "FAILS" if self.complaints else self.note)


def rows(
    modules: Sequence[str], modes: Sequence[str], jobs: int, *, layouts_of: Sequence[str]
) -> Iterator[Row]:
    """Everything that is tried, in several processes, in the table's order.

    Args:
        modules: Architectures to try.
        modes: Modes to try them in; empty means all.
        jobs: Processes.
        layouts_of: Architectures whose published layouts are tried too.
    """
    # Each process has an MLX of its own: spawned, because its threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        tried = [(name, pool.submit(try_architecture, name, modes)) for name in modules]
        others = [pool.submit(trial) for trial in published(layouts_of)]
        for name, verdicts in tried:
            yield row_of(name, verdicts.result(), _fact(name))
        for other in others:
            match other.result():
                case Refusal() as refusal:
                    yield row_of_refusal(refusal)
                case verdict:
                    yield row_of(verdict.what, [verdict])


def row_of_refusal(refusal: Refusal) -> Row:
    """A layout that cannot stream has nothing to compare."""
    return Row(
        what=refusal.what,
        cells=("", "", "", ""),
        note="refused: mlx-lm computes these experts while it loads",
        complaints=tuple(refusal.complaints),
    )


def row_of(what: str, verdicts: Sequence[Verdict], note: str = "") -> Row:
    """What several checkpoints of one thing add up to."""
    outcomes = [outcome for verdict in verdicts for outcome in verdict.outcomes]
    equal = sum(outcome.equal for outcome in outcomes)
    compared = sum(outcome.compared for outcome in outcomes)
    holding = sum(not verdict.complaints for verdict in verdicts)
    return Row(
        what=what,
        cells=(
            f"{holding}/{len(verdicts)}",
            f"{min(verdict.hit_share for verdict in verdicts):.0%}",
            f"{sum(outcome.missed for outcome in outcomes):,}",
            f"{equal:,}/{compared:,}",
        ),
        note=note,
        equal=equal,
        compared=compared,
        complaints=tuple(text for verdict in verdicts for text in verdict.complaints),
    )


def _fact(module: str) -> str:
    """What is not tried of an architecture, and why."""
    architecture = by_module(module)
    if architecture.metal_only:
        return "expert layers alone: its attention is written in Metal"
    if architecture.unbatched:
        return f"no batch: {architecture.unbatched}"
    if architecture.modes:
        return f"{', '.join(modes_of(module))} alone: it fixes its own packing"
    return ""


def gaps() -> list[str]:
    """Architectures that mlx-lm has and the list has not, or the other way round."""
    listed = frozenset(ALL_MODULES)
    unknown = [f"{name}: streams and is not tried" for name in sorted(seam_modules() - listed)]
    gone = [f"{name}: is tried and no longer streams" for name in sorted(listed - seam_modules())]
    return unknown + gone


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Streamed experts against resident ones.")
    parser.add_argument("--only", nargs="+", metavar="ARCHITECTURE", choices=ALL_MODULES)
    parser.add_argument("--quick", action="store_true", help="a few architectures in two modes")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    options = parser.parse_args(arguments)
    modules = options.only or (QUICK_MODULES if options.quick else ALL_MODULES)
    sys.stdout.write(_LEGEND + _ROW.format("", "modes", "chosen", "brought", "equal", "").rstrip())
    sys.stdout.write("\n")
    done = []
    modes = QUICK_MODES if options.quick else ()
    for row in rows(modules, modes, options.jobs, layouts_of=options.only or ALL_MODULES):
        sys.stdout.write(str(row).rstrip() + "\n")
        sys.stdout.flush()
        done.append(row)
    for name, reason in NOT_ON_THE_SEAM.items():
        sys.stdout.write(f"{name:<42} {reason}\n")
    complaints = [text for row in done for text in row.complaints] + gaps()
    for text in complaints:
        sys.stdout.write(f"FAILS {text}\n")
    good = sum(not row.complaints for row in done)
    equal, compared = sum(row.equal for row in done), sum(row.compared for row in done)
    sys.stdout.write(
        f"\n{good} of {len(done)} rows hold ({len(modules)} of {len(seam_modules())} "
        f"architectures): {equal:,} of {compared:,} results equal bit for bit\n"
    )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
