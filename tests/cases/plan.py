"""Which request cases run, against which fixture, and what their outcome means: pure.

Laws: a pending step never runs unless asked for; a problem in an active step is always a FAIL;
nothing that did not run is called passed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.cases.case_file import CaseFile
from tests.cases.catalogue import Area, Case, Input, Status
from tests.cases.runner import CaseReport


class Verdict(StrEnum):
    """How one request file of one case came out."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    CHOICE = "choice"
    PENDING = "pending"
    UNEXPECTED_PASS = "pending but passes"  # noqa: S105 - a verdict, not a password
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One request file of one case.

    Attributes:
        waiting: Names of its steps that are pending, each with the feature it waits for.
        choice: Why the whole case takes another answer on purpose, or None.
    """

    case_id: str
    file: str
    case_file: CaseFile
    waiting: Mapping[str, str] = field(default_factory=dict)
    choice: str | None = None

    @property
    def fixture(self) -> str:
        """The checkpoint that it needs."""
        return self.case_file.fixture

    @property
    def is_waiting(self) -> bool:
        """Whether no step of it is active."""
        return all(step.name in self.waiting for step in self.case_file.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    case_id: str
    file: str
    fixture: str
    verdict: Verdict
    remarks: tuple[str, ...] = ()


def plan(
    areas: Iterable[Area],
    files: Mapping[str, CaseFile],
    *,
    area_words: Sequence[str] = (),
    only: Sequence[str] = (),
) -> tuple[PlannedRun, ...]:
    """Lists the request files of the chosen cases, in the catalogue's order.

    Args:
        areas: The catalogue.
        files: Request files by name.
        area_words: An area counts when its title holds one of these, in any case; none: all.
        only: Ids of cases; none: all.
    """
    ids = {case_id.upper() for case_id in only}
    words = [word.lower() for word in area_words]
    return tuple(
        _planned(case, source, files[source.name])
        for area in areas
        if not words or any(word in area.area.lower() for word in words)
        for case in area.cases
        if not ids or case.id in ids
        for source in case.inputs
        if source.kind == "http"
    )


def _planned(case: Case, source: Input, case_file: CaseFile) -> PlannedRun:
    whole = case.status_of(source)
    statuses: dict[str, Status] = {
        step.name: source.steps.get(step.name, whole) for step in case_file.steps
    }
    waiting = {name: it.reason for name, it in statuses.items() if it.kind == "pending"}
    return PlannedRun(
        case_id=case.id,
        file=source.name,
        case_file=case_file,
        waiting=waiting,
        choice=whole.reason if whole.kind == "choice" else None,
    )


def fixtures_of(runs: Iterable[PlannedRun]) -> tuple[str, ...]:
    """The fixtures that runs need, each once, in the order of their first use."""
    return tuple(dict.fromkeys(run.fixture for run in runs))


def row_not_run(run: PlannedRun) -> Row:
    """The line of a file of which every step waits."""
    return Row(
        case_id=run.case_id,
        file=run.file,
        fixture=run.fixture,
        verdict=Verdict.PENDING,
        remarks=tuple(dict.fromkeys(run.waiting.values())),
    )


def row_not_served(run: PlannedRun, why: str) -> Row:
    """The line of a file whose fixture could not be served."""
    return Row(
        case_id=run.case_id,
        file=run.file,
        fixture=run.fixture,
        verdict=Verdict.FAIL,
        remarks=(f"fixture {run.fixture} is not served: {why}",),
    )


def row_of(run: PlannedRun, report: CaseReport) -> Row:
    """The line of a file that ran."""
    failed = [step for step in report.steps if step.problems]
    breaches = tuple(
        f"{step.name}: {problem}"
        for step in failed
        if step.name not in run.waiting
        for problem in step.problems
    )
    choices = tuple(f"{step.name}: {step.choice}" for step in report.steps if step.choice)
    still = {run.waiting[step.name] for step in failed if step.name in run.waiting}
    left_out = set(run.waiting) - {step.name for step in report.steps}
    still |= {run.waiting[name] for name in left_out}
    return Row(
        case_id=run.case_id,
        file=run.file,
        fixture=run.fixture,
        verdict=_verdict(run, has_breaches=bool(breaches), chose=bool(choices), waits=bool(still)),
        remarks=breaches
        + choices
        + ((run.choice,) if run.choice else ())
        + tuple(f"pending: {feature}" for feature in sorted(still)),
    )


def _verdict(run: PlannedRun, *, has_breaches: bool, chose: bool, waits: bool) -> Verdict:
    if has_breaches:
        return Verdict.FAIL
    if run.is_waiting and waits:
        return Verdict.PENDING
    if run.waiting and not waits:
        return Verdict.UNEXPECTED_PASS
    if chose or run.choice:
        return Verdict.CHOICE
    return Verdict.PASS


def figure(rows: Sequence[Row]) -> str:
    """The one line that sums a table up."""
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"cases: {len(rows)} request files: {counted}"
