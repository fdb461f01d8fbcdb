"""`headrace incidents`: what went wrong on this machine, for people and for programs."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace_deploy.command_line import JsonOption, StateDirOption, endings
from headrace_deploy.folders import names_in, using_state_folder
from headrace_deploy.settings_sources import load
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.fleet import Cause, Incident
from headrace_serve.incident_log import IncidentLog, hosts_in
from headrace_serve.incidents import summary

incidents_app = typer.Typer(help="Read what went wrong on this machine.", no_args_is_help=True)

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Where the pages are in a clone; an installed wheel has none.
_RUNBOOKS: Final = Path(__file__).parents[2] / "docs" / "runbooks"
_CANDIDATES_SHOWN: Final = 5

HostOption = Annotated[
    str | None, typer.Option("--host", help="Only this host's; None takes all of this machine's.")
]


class ExportFormat(StrEnum):
    """How incidents are exported."""

    JSONL = "jsonl"
    JSON = "json"


@incidents_app.command("list")
def incidents_list(
    state_dir: StateDirOption = None, host: HostOption = None, as_json: JsonOption = False
) -> None:
    """List this machine's incidents, oldest first."""
    with endings(Console(stderr=True)):
        found = _incidents(state_dir, host)
    if as_json:
        typer.echo(json.dumps([asdict(incident) for incident in found], indent=2))
        return
    table = Table("id", "cause", "host", "replica", "moved", "pause", "state", box=None)
    for one in found:
        state = "closed" if one.closed_s else "mitigated" if one.mitigated_s else "open"
        table.add_row(
            escape(one.id),
            one.cause,
            escape(one.host),
            escape(one.replica),
            str(one.requests_moved),
            f"{one.worst_gap_s:.2f} s",
            state,
        )
    Console().print(table if found else "no incidents")


@incidents_app.command("show")
def incidents_show(
    incident_id: Annotated[str, typer.Argument(help="An id from the list, or its beginning.")],
    state_dir: StateDirOption = None,
    host: HostOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print one incident with its evidence, its timeline, and what to do about it.

    Exits with 2 when no incident, or more than one, begins with ID.
    """
    with endings(Console(stderr=True)):
        incident = _one_incident(_incidents(state_dir, host), incident_id)
    if as_json:
        typer.echo(json.dumps(asdict(incident), indent=2))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"Incident {incident.id}")
    for line in summary(incident):
        console.print(f"  {line}")
    console.print("Evidence")
    for text in incident.evidence:
        console.print("  " + text.replace("\n", "\n    "))
    console.print("Timeline (seconds after the first symptom)")
    for at_s, what in incident.timeline:
        console.print(f"  {at_s - incident.opened_s:+9.3f}  {what}")
    for line in runbook_lines(incident.cause):
        console.print(line)


@incidents_app.command("export")
def incidents_export(
    since: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="Only those opened since: an age (30m, 2h, 7d) or an ISO 8601 time (UTC if it "
            "names no zone).",
        ),
    ] = None,
    output: Annotated[
        ExportFormat, typer.Option("--format", help="One object a line, or one array.")
    ] = ExportFormat.JSONL,
    state_dir: StateDirOption = None,
    host: HostOption = None,
) -> None:
    """Print incidents whole, for other programs; nothing at all when there are none."""
    with endings(Console(stderr=True)):
        since_s = 0.0 if since is None else opened_since(since, SystemClock().now_s())
        found = [one for one in _incidents(state_dir, host) if one.opened_s >= since_s]
    records = [asdict(incident) for incident in found]
    if output is ExportFormat.JSON:
        typer.echo(json.dumps(records, indent=2))
        return
    for record in records:
        typer.echo(json.dumps(record))


def opened_since(text: str, now_s: float) -> float:
    """The wall-clock second that `--since` means.

    Raises:
        SettingsError: It is neither an age nor a time.
    """
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS_S and number.replace(".", "", 1).isdecimal():
        return now_s - float(number) * _UNITS_S[unit]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(
            f"--since {text!r} is neither an age like 30m, 2h or 7d nor a time like "
            "2026-12-01T08:00"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def runbook_lines(cause: Cause) -> tuple[str, ...]:
    """The runbook's path and what it says to do, as far as the page is on this machine."""
    page = _RUNBOOKS / f"{cause.value}.md"
    if not page.is_file():
        return (f"Runbook: docs/runbooks/{page.name} of headrace's source",)
    _before, _heading, todo = page.read_text(encoding="utf-8").partition("## What to do\n")
    return (f"Runbook: {page}", *(f"  {line}" for line in todo.strip().splitlines()))


def _incidents(state_dir: Path | None, host: str | None) -> tuple[Incident, ...]:
    """The incidents of all hosts that keep their state on this machine, or of one, oldest first.

    Raises:
        LaunchError: The state folder cannot be read.
        SettingsError: The host that was asked for keeps none here.
    """
    given = {} if state_dir is None else {"state_dir": state_dir}
    state = load(None, os.environ, given).settings.state_dir
    with using_state_folder(state):
        hosts = hosts_in(state, names_in(state / "hosts"))
        if host is not None and host not in hosts:
            known = ", ".join(hosts) or "none"
            raise SettingsError(
                f"host {host!r} has no incidents in {state}; hosts that have: {known}"
            )
        found = [
            incident
            for name in (hosts if host is None else (host,))
            for incident in IncidentLog(state, name).read()
        ]
    return tuple(sorted(found, key=lambda incident: incident.opened_s))


def _one_incident(found: tuple[Incident, ...], wanted: str) -> Incident:
    matching = [incident for incident in found if incident.id.startswith(wanted)]
    exact = [incident for incident in matching if incident.id == wanted]
    candidates = exact or matching
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        what = f"no incident begins with {wanted!r}"
    else:
        ids = ", ".join(one.id for one in candidates[:_CANDIDATES_SHOWN])
        more = ", ..." if len(candidates) > _CANDIDATES_SHOWN else ""
        what = f"{len(candidates)} incidents begin with {wanted!r} ({ids}{more})"
    raise SettingsError(f"{what}; `headrace incidents list` shows the ids")
