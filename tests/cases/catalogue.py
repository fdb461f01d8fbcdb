"""The catalogue of field cases: what users of servers like this one have met, and what is right.

One file per area under `areas/`. Sources are public threads (repository#number). `source` names
where a case was seen, `does` what the client does, `goes_wrong` what other servers then do,
`right` what this project is held to, `reference_server` what mlx_lm.server 0.32.2 (mlx 0.32.4,
Linux, CPU) did with the same input.

A case, one of its inputs, or one step of a request file has a status: `active` (the feature
exists, and the case counts), `pending: FEATURE` (that feature brings it) or `choice: REASON`
(another sensible answer was taken on purpose; for a single step the request file says it, with
the answer allowed instead). The nearest status wins. An active case either
has a request file that `tests.cases.driver` runs, or names the tests that hold it in `proved_by`.

`python -m tests.cases.catalogue` prints the figures, with `--markdown` the whole as tables.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

AREAS = Path(__file__).parent / "areas"
PROCEDURES = Path(__file__).parent / "procedures"

InputKind = Literal["http", "scripted", "procedure", "checkpoint"]
StatusKind = Literal["active", "pending", "choice"]
Sentence = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Status:
    """Whether a case counts now; `reason` is the feature waited for or the choice made."""

    kind: StatusKind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


ACTIVE = Status("active")


def parse_status(text: object) -> Status:
    """Reads `active`, `pending: FEATURE` or `choice: REASON`.

    Raises:
        ValueError: The text is none of the three.
    """
    match str(text).partition(":"):
        case ("active", "", ""):
            return ACTIVE
        case ("pending" | "choice" as kind, ":", reason) if reason.strip():
            return Status(kind, reason.strip())
        case _:
            raise ValueError(
                f"status {text!r}: write `active`, `pending: FEATURE` or `choice: REASON`"
            )


StatusField = Annotated[Status, BeforeValidator(parse_status)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Input(_Strict):
    """What brings a case about; exactly one of the four kinds is set.

    Attributes:
        http: A file of `http/`, run by `tests.cases.runner`.
        scripted: A file of `scripted/`: pieces of model output for the output parsers.
        procedure: A file of `procedures/`.
        checkpoint: What `tests.support.checkpoints` breaks in the checkpoint.
        condition: Arguments, or what else must hold.
        status: Of this input, where it differs from the case's.
        steps: Status of single steps of a request file, by their names.
    """

    http: str | None = None
    scripted: str | None = None
    procedure: str | None = None
    checkpoint: str | None = None
    condition: str | None = Field(default=None, alias="with")
    status: StatusField | None = None
    steps: dict[str, StatusField] = {}

    @model_validator(mode="after")
    def _one_kind(self) -> "Input":
        if len([name for name in self._names().values() if name is not None]) != 1:
            raise ValueError("an input is one of http, scripted, procedure, checkpoint")
        if any(status.kind == "choice" for status in self.steps.values()):
            raise ValueError("write the choice of a single step into its request file")
        return self

    def _names(self) -> dict[InputKind, str | None]:
        return {
            "http": self.http,
            "scripted": self.scripted,
            "procedure": self.procedure,
            "checkpoint": self.checkpoint,
        }

    @property
    def kind(self) -> InputKind:
        """Which of the four kinds is set."""
        return next(kind for kind, name in self._names().items() if name is not None)

    @property
    def name(self) -> str:
        """The file's name, or the break's."""
        return next(name for name in self._names().values() if name is not None)

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}" + (f" ({self.condition})" if self.condition else "")


class Case(_Strict):
    """One field case; the module's docstring says what its members mean."""

    id: str = Field(pattern=r"^[A-Z]\d{2}$")
    source: tuple[Sentence, ...] = Field(min_length=1)
    does: Sentence
    goes_wrong: Sentence
    right: Sentence
    inputs: tuple[Input, ...] = Field(min_length=1)
    status: StatusField
    proved_by: tuple[str, ...] = ()
    reference_server: str | None = None

    def status_of(self, source: Input) -> Status:
        """The status of one of its inputs."""
        return source.status or self.status


class Area(_Strict):
    """Cases of one kind, in the order of their file."""

    area: Sentence
    cases: tuple[Case, ...] = Field(min_length=1)


def load_areas(folder: Path = AREAS) -> tuple[Area, ...]:
    """Reads the whole catalogue, in the order of the file names.

    Raises:
        pydantic.ValidationError: A member is unknown, missing or has a wrong value.
    """
    return tuple(
        Area.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("*.yaml"))
    )


def cases_of(areas: Iterable[Area]) -> Iterator[Case]:
    """All cases, area by area."""
    return (case for area in areas for case in area.cases)


def markdown(areas: Iterable[Area]) -> str:
    """The catalogue as one table per area."""
    lines: list[str] = []
    for area in areas:
        lines += [f"## {area.area}", "", _row(*_COLUMNS), _row(*["---"] * len(_COLUMNS))]
        lines += [_case_row(case) for case in area.cases]
        lines.append("")
    return "\n".join(lines)


_COLUMNS = ("Case", "The client", "Goes wrong elsewhere", "Right", "Input", "Status", "Seen in")


def _case_row(case: Case) -> str:
    return _row(
        case.id,
        case.does,
        case.goes_wrong,
        case.right,
        "<br>".join(map(str, case.inputs)),
        "<br>".join([str(case.status), *case.proved_by]),
        "<br>".join(case.source),
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def figures(areas: Iterable[Area]) -> str:
    """One line per area with the number of cases of each status, and the sum."""
    total: Counter[StatusKind] = Counter()
    lines = []
    for area in areas:
        counted = Counter(case.status.kind for case in area.cases)
        total.update(counted)
        lines.append(f"{area.area}: {_counts(counted)}")
    return "\n".join([*lines, f"all {total.total()} cases: {_counts(total)}"])


def _counts(counted: Counter[StatusKind]) -> str:
    return ", ".join(f"{counted[kind]} {kind}" for kind in get_args(StatusKind))


def _command(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables.")] = False,
) -> None:
    """Print the catalogue of field cases."""
    areas = load_areas()
    sys.stdout.write((markdown(areas) if as_markdown else figures(areas)) + "\n")


if __name__ == "__main__":
    typer.run(_command)
