"""Runs the request cases of the catalogue against the real stack, fixture by fixture.

`python -m tests.cases.driver` deploys each checkpoint that an active case needs, runs the cases,
prints a table and ends with its figure; it exits with 1 when a case fails. Pending cases are
listed and not run, unless `--include-pending` asks which of them pass already.
"""

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_replicas.contract.errors import HeadraceError
from tests.cases.case_file import HTTP_CASES, load_case
from tests.cases.catalogue import load_areas
from tests.cases.deployment import CaseNode, deployed, one_node
from tests.cases.http_call import Target
from tests.cases.plan import (
    PlannedRun,
    Row,
    Verdict,
    figure,
    fixtures_of,
    plan,
    row_not_run,
    row_not_served,
    row_of,
)
from tests.cases.runner import run_case

# Checkpoints, state and logs; they stay for whoever wants to know why a case failed.
_OUT: Final = Path("out/cases").absolute()
_LOG_WIDTH: Final = 160
_COLOURS = {
    Verdict.PASS: "green",
    Verdict.CHOICE: "cyan",
    Verdict.PENDING: "yellow",
    Verdict.UNEXPECTED_PASS: "magenta",
    Verdict.FAIL: "bold red",
}


def run_planned(run: PlannedRun, target: Target, *, include_pending: bool) -> Row:
    """Runs one request file against a server of its fixture."""
    skip = frozenset() if include_pending else frozenset(run.waiting)
    return row_of(run, run_case(run.case_file, run.file, target, skip=skip))


def run_fixture(
    case_node: CaseNode, fixture: str, runs: Iterable[PlannedRun], *, include_pending: bool
) -> list[Row]:
    """Deploys one fixture and runs everything that needs it."""
    mine = [run for run in runs if run.fixture == fixture]
    try:
        with deployed(case_node, fixture) as target:
            return [run_planned(run, target, include_pending=include_pending) for run in mine]
    except HeadraceError as failure:
        return [row_not_served(run, str(failure)) for run in mine]


def run_all(runs: Sequence[PlannedRun], *, include_pending: bool) -> list[Row]:
    """Runs what is active (with `include_pending` everything), on one Ray node."""
    due = [run for run in runs if include_pending or not run.is_waiting]
    rows = [row_not_run(run) for run in runs if run.is_waiting and not include_pending]
    if not due:
        return rows
    # A new folder for each run: what the fleet remembers of the last one must not count.
    shutil.rmtree(_OUT, ignore_errors=True)
    with one_node(_OUT) as node:
        for fixture in fixtures_of(due):
            rows += run_fixture(node, fixture, due, include_pending=include_pending)
    order = [(run.case_id, run.file) for run in runs]
    return sorted(rows, key=lambda row: order.index((row.case_id, row.file)))


def table(rows: Iterable[Row]) -> Table:
    """The rows for a person."""
    drawn = Table()
    for title in ("case", "request file", "fixture", "verdict"):
        drawn.add_column(title, no_wrap=True)
    drawn.add_column("remarks", overflow="fold")
    for row in rows:
        verdict = Text(row.verdict, style=_COLOURS[row.verdict])
        remarks = Text("\n".join(row.remarks))
        drawn.add_row(row.case_id, row.file, row.fixture, verdict, remarks)
    return drawn


def _command(
    areas: Annotated[
        list[str] | None, typer.Option(help="Only areas whose title holds this word.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this case id.")] = None,
    include_pending: Annotated[
        bool, typer.Option("--include-pending", help="Run pending cases too.")
    ] = False,
) -> None:
    """Run the request cases of the catalogue."""
    files = {path.name: load_case(path) for path in HTTP_CASES.glob("*.json")}
    runs = plan(load_areas(), files, area_words=areas or (), only=only or ())
    if not runs:
        sys.stderr.write("No case matches: see `python -m tests.cases.catalogue` for what is.\n")
        raise typer.Exit(code=2)
    rows = run_all(runs, include_pending=include_pending)
    # Where there is no terminal (a log), rich would fold everything into 80 columns.
    Console(width=None if sys.stdout.isatty() else _LOG_WIDTH).print(table(rows))
    sys.stdout.write(figure(rows) + "\n")
    raise typer.Exit(code=1 if any(row.verdict is Verdict.FAIL for row in rows) else 0)


if __name__ == "__main__":
    typer.run(_command)
