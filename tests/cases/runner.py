"""Runs request cases against a server and judges the answers.

`python -m tests.cases.runner --base URL --model NAME [--key K] [-v] FILE...` takes files of
`http/`; their fixture must be the served model.
"""

import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tests.cases.case_file import CaseFile, Step, load_case
from tests.cases.http_call import Answer, Target, call
from tests.cases.judge import Evidence, judge, transport
from tests.cases.view import View, read

_SHOWN_PROBLEMS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """How one step went.

    Attributes:
        problems: Each breach once; empty when every answer was right.
        choice: Why another answer than the expected one was taken, or None.
        seen: One line per answer, for a person.
    """

    name: str
    problems: tuple[str, ...]
    choice: str | None
    seen: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """How one file went; skipped steps have no report."""

    case: str
    file: str
    steps: tuple[StepReport, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Breaches of all steps, with the steps' names."""
        return tuple(f"{step.name}: {problem}" for step in self.steps for problem in step.problems)


def judge_step(
    step: Step, answer: Answer, view: View, earlier: dict[str, View]
) -> tuple[tuple[str, ...], str | None]:
    """The breaches of one answer, and the reason of the choice that excused them, if one did."""
    evidence = Evidence(answer=answer, view=view, earlier=earlier)
    broken = () if step.abort_after is not None else transport(evidence)
    breaches = judge(step.expect, evidence)
    if breaches and step.choice is not None and not judge(step.choice.expect, evidence):
        return broken, step.choice.reason
    return broken + breaches, None


def run_step(step: Step, target: Target, earlier: dict[str, View]) -> StepReport:
    """Sends a step's requests, all at once when they are several, and judges each answer.

    Args:
        step: What to send and to expect.
        target: Where to.
        earlier: First answer of each step by name; this step's own is added.
    """
    with ThreadPoolExecutor(max_workers=step.parallel) as pool:
        answers = list(pool.map(lambda _: call(target, step), range(step.parallel)))
    problems: list[str] = []
    seen: list[str] = []
    choice: str | None = None
    for answer in answers:
        view = read(answer)
        breaches, reason = judge_step(step, answer, view, earlier)
        problems += breaches
        choice = choice or reason
        earlier.setdefault(step.name, view)
        seen.append(_seen(answer, view))
    return StepReport(
        name=step.name,
        problems=tuple(dict.fromkeys(problems)),
        choice=choice,
        seen=tuple(seen),
    )


def _seen(answer: Answer, view: View) -> str:
    shown = answer.body[:200] if answer.status is not None and answer.status >= 400 else b""
    return (
        f"{answer.status} {answer.total_s:.2f} s {view.text[:70]!r} {view.finish} "
        f"{view.usage} {shown!r}"
    )


def run_case(
    case: CaseFile, file: str, target: Target, *, skip: Collection[str] = frozenset()
) -> CaseReport:
    """Runs the steps of one file in order, but for those named in `skip`."""
    earlier: dict[str, View] = {}
    steps = tuple(run_step(step, target, earlier) for step in case.steps if step.name not in skip)
    return CaseReport(case=case.case, file=file, steps=steps)


def _lines(report: CaseReport, *, verbose: bool) -> list[str]:
    lines = [f"{'FAIL' if report.problems else 'ok  '} {report.case:4s} {report.file}"]
    lines += [f"       {problem}" for problem in report.problems[:_SHOWN_PROBLEMS]]
    for step in report.steps:
        if step.choice is not None:
            lines.append(f"       {step.name}: choice: {step.choice}")
        if verbose:
            lines += [f"     {step.name}: {seen}" for seen in step.seen]
    return lines


def run_files(files: Sequence[Path], target: Target, *, verbose: bool = False) -> int:
    """Runs files, prints one line for each and the figure; returns how many failed."""
    failed = 0
    for path in files:
        report = run_case(load_case(path), path.name, target)
        failed += bool(report.problems)
        sys.stdout.write("\n".join(_lines(report, verbose=verbose)) + "\n")
    sys.stdout.write(f"{len(files) - failed} ok, {failed} fail\n")
    return failed


def _command(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    base: Annotated[str, typer.Option(help="Address of the server, http://HOST:PORT.")],
    model: Annotated[str, typer.Option(help="The id that requests name.")],
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show each answer.")] = False,
) -> None:
    """Run request cases against a server."""
    failed = run_files(files, Target(base=base, model=model, key=key), verbose=verbose)
    raise typer.Exit(code=1 if failed else 0)


if __name__ == "__main__":
    typer.run(_command)
