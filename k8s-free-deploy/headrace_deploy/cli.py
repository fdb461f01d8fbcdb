"""The command `headrace`."""

import json
import os
from collections.abc import Mapping
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
from headrace_deploy.hosts_commands import hosts_app
from headrace_deploy.incidents_commands import incidents_app
from headrace_deploy.plan_command import plan
from headrace_deploy.settings_sources import KEY_VARIABLE, Loaded, load, parse_text, value_of
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import SettingsError
from headrace_serve.http.keys import digest

app = typer.Typer(
    help="Serve language models on one or more Macs, and keep answering when a GPU faults.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(hosts_app, name="hosts")
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
