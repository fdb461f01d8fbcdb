"""The command `headrace`."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace_deploy import demo as demo_command
from headrace_deploy import one_machine
from headrace_deploy.bench_commands import bench_app
from headrace_deploy.checkpoint_commands import pack, verify
from headrace_deploy.command_line import (
    DeviceOption,
    JsonOption,
    RevisionOption,
    StateDirOption,
    endings,
)
from headrace_deploy.folders import names_in, using_state_folder
from headrace_deploy.plan_command import plan
from headrace_deploy.settings_sources import KEY_VARIABLE, Loaded, load, parse_text, value_of
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.fleet import Incident
from headrace_serve.http.keys import digest
from headrace_serve.incident_log import IncidentLog
from headrace_serve.incidents import summary

app = typer.Typer(
    help="Serve language models on one or more Macs, and keep answering when a GPU faults.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
incidents_app = typer.Typer(help="Read what went wrong on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(incidents_app, name="incidents")

FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A YAML file of settings, see fleet.example.yaml."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting; may be repeated."),
]


def main() -> None:
    """Run the command line; see `headrace_deploy.entry` for where the program begins."""
    # transformers would say that it misses PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app()


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve language models on one or more Macs, and keep answering when a GPU faults."""


@app.command()
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="`demo`, a folder with a checkpoint, or a Hugging Face id."
        ),
    ] = None,
    revision: RevisionOption = None,
    name: Annotated[str | None, typer.Option(help="The model id that clients ask for.")] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", "-n", help="Engines; one per GPU. (default: 1)")
    ] = None,
    device: DeviceOption = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. (default: 127.0.0.1)")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Port; 0: any. (default: 8000)")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="A key that clients must send; may be repeated. Only its digest is kept. The "
            "variable is the better place: other users can read command lines.",
        ),
    ] = None,
    state_dir: StateDirOption = None,
    file: FileOption = None,
    settings: SetOption = None,
) -> None:
    """Serve a model on this machine until Ctrl-C.

    Settings come from these options, then HEADRACE_<SECTION>__<FIELD> variables, then --file.
    """
    errors = Console(stderr=True)
    with endings(errors):
        overrides: dict[str, object] = {
            "model.path": model,
            "model.revision": revision,
            "model.name": name,
            "replica.count": replicas,
            "engine.device": device,
            "gateway.host": host,
            "gateway.port": port,
            "gateway.api_keys": [digest(key) for key in api_key] if api_key else None,
            "state_dir": state_dir,
        }
        loaded = _load(file, settings, overrides)
        one_machine.serve(loaded.settings, Console(), errors, SystemClock(), os.environ)


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the fleet up at the end, until Ctrl-C.")
    ] = False,
) -> None:
    """Kill an engine in the middle of a sentence, and see the sentence go on.

    Starts two replicas of a small model on this machine's CPU, needs no download, and cleans up.
    """
    errors = Console(stderr=True)
    with endings(errors):
        status = demo_command.run(Console(highlight=False), SystemClock(), os.environ, keep=keep)
    raise typer.Exit(status)


app.command()(verify)
app.command()(pack)
app.command()(plan)


@config_app.command("show")
def config_show(
    file: FileOption = None, settings: SetOption = None, as_json: JsonOption = False
) -> None:
    """Print every setting with its value and where that comes from."""
    with endings(Console(stderr=True)):
        loaded = _load(file, settings, {})
    if as_json:
        plain = loaded.settings.model_dump(mode="json")
        rows = {
            name: {"value": _plain_value(plain, name), "origin": origin}
            for name, origin in loaded.origins.items()
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("setting", "value", "origin", box=None, pad_edge=False)
    for name, origin in loaded.origins.items():
        style = "dim" if origin == "default" else "bold"
        value = value_of(loaded.settings, name)
        table.add_row(name, escape(_shown(value)), escape(origin), style=style)
    Console().print(table)


@incidents_app.command("list")
def incidents_list(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List this machine's incidents, oldest first."""
    with endings(Console(stderr=True)):
        found = _incidents(state_dir)
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
    as_json: JsonOption = False,
) -> None:
    """Print one incident with its evidence and its timeline."""
    with endings(Console(stderr=True)):
        incident = _one_incident(_incidents(state_dir), incident_id)
    if as_json:
        typer.echo(json.dumps(asdict(incident), indent=2))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"Incident {incident.id}")
    for line in summary(incident):
        console.print(f"  {line}")
    console.print("Timeline (seconds after the first symptom)")
    for at_s, what in incident.timeline:
        console.print(f"  {at_s - incident.opened_s:+9.3f}  {what}")
    console.print("Evidence")
    for text in incident.evidence:
        console.print(f"  {text}")


def _load(
    file: Path | None, assignments: list[str] | None, overrides: Mapping[str, object]
) -> Loaded:
    """Settings from all sources; `--set` goes before the options of a command."""
    given = {name: value for name, value in overrides.items() if value is not None}
    for assignment in assignments or []:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise SettingsError(f"--set {assignment}: write it as section.field=value")
        given[name] = parse_text(name, text, "command line")
    return load(file, os.environ, given)


def _incidents(state_dir: Path | None) -> tuple[Incident, ...]:
    """The incidents of all hosts that keep their state on this machine, oldest first.

    Raises:
        LaunchError: The state folder cannot be read.
    """
    state = _load(None, None, {"state_dir": state_dir}).settings.state_dir
    folder = state / "hosts"
    with using_state_folder(state):
        hosts = [name for name in names_in(folder) if (folder / name / "incidents.jsonl").exists()]
        found = [incident for host in hosts for incident in IncidentLog(state, host).read()]
    return tuple(sorted(found, key=lambda incident: incident.opened_s))


def _one_incident(found: tuple[Incident, ...], wanted: str) -> Incident:
    matching = [incident for incident in found if incident.id.startswith(wanted)]
    exact = [incident for incident in matching if incident.id == wanted]
    candidates = exact or matching
    if len(candidates) == 1:
        return candidates[0]
    what = "no incident" if not candidates else f"{len(candidates)} incidents"
    raise SettingsError(f"{what} begin with {wanted!r}; `headrace incidents list` shows the ids")


def _plain_value(plain: Mapping[str, object], name: str) -> object:
    value: object = plain
    for part in name.split("."):
        assert isinstance(value, Mapping)  # noqa: S101 - narrows the type
        value = value[part]
    return value


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return ", ".join(map(str, value)) or "[]" if isinstance(value, tuple) else str(value)
