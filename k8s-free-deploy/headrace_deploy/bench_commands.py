"""Commands that measure this machine."""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from headrace_deploy.command_line import (
    ContextOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    RevisionOption,
    SettingsFileOption,
    StateDirOption,
    endings,
)
from headrace_deploy.folders import prepare_state_folder
from headrace_deploy.one_machine import uses_gpu
from headrace_deploy.settings_sources import load
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import SettingsError

DEFAULT_PROMPT: Final = (
    "Tell me a long story about a miller, her water wheel, and the summer in which the river ran "
    "dry."
)
"""A text that every chat model goes on about for a while, in ordinary words."""

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


class Schedule(StrEnum):
    """What `--schedule` takes."""

    AUTO = "auto"
    LAYERS = "layers"
    OVERLAP = "overlap"
    SPECULATE = "speculate"
    ALL = "all"


@bench_app.command("stream")
def stream(
    model: ModelArgument,
    *,
    slots: Annotated[
        str,
        typer.Option(help="What to measure, with commas: shares (25%), budgets (8GiB), all, auto."),
    ] = "12.5%,25%,50%,all",
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer that are measured.")
    ] = 64,
    context: ContextOption = None,
    device: DeviceOption = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option(help="How missing experts are fetched. (default: engine.schedule)"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What is answered. (default: a story is asked for)")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file of UTF-8 text that is answered.")
    ] = None,
    cold: Annotated[
        bool, typer.Option(help="Measure with an empty page cache too.", show_default=True)
    ] = True,
    revision: RevisionOption = None,
    file: SettingsFileOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast this host's SSD delivers experts, and recommend a budget for them.

    Loads the model once for each number of slots, answers one prompt, and compares the tokens.
    `headrace plan` uses what was measured.

    Ends with 1 when nothing fits, or when tokens differ on the CPU.
    """
    errors = Console(stderr=True)
    clock = SystemClock()
    with endings(errors):
        overrides = {
            "model.path": model,
            "model.revision": revision,
            "model.context_tokens": context,
            "engine.device": device,
            "engine.schedule": None if schedule is Schedule.ALL else schedule,
            "state_dir": state_dir,
        }
        given = {name: value for name, value in overrides.items() if value is not None}
        settings = load(file, os.environ, given).settings
        wanted = _settings_of(slots, file, given)
        text = _prompt(prompt, prompt_file)
        prepare_state_folder(settings.state_dir)
        # This brings MLX and transformers, which take seconds; other commands do without.
        from headrace_deploy import stream_bench_command  # noqa: PLC0415 - see above

        status = stream_bench_command.run(
            stream_bench_command.Request(
                settings=settings,
                slots=wanted,
                schedule="all" if schedule is Schedule.ALL else settings.engine.schedule,
                prompt=text,
                tokens=tokens,
                cold=cold,
                as_json=as_json,
                on_gpu=uses_gpu(settings.engine.device),
            ),
            Console(highlight=False, soft_wrap=True, markup=False),
            errors,
            clock,
        )
    raise typer.Exit(status)


def _settings_of(slots: str, file: Path | None, given: Mapping[str, object]) -> tuple[str, ...]:
    """The values of `engine.slots` in a list, each as valid as in a file.

    Raises:
        SettingsError: One is not, or there is none.
    """
    wanted = tuple(part.strip() for part in slots.split(",") if part.strip())
    if not wanted:
        raise SettingsError("--slots names nothing: give shares, budgets, all or auto", "slots")
    for one in wanted:
        load(file, os.environ, {**given, "engine.slots": one})
    return wanted


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The text to answer.

    Raises:
        SettingsError: Both are given, the file cannot be read, or there is no text.
    """
    if prompt is not None and file is not None:
        raise SettingsError("give --prompt or --prompt-file, not both", "prompt")
    if file is not None:
        try:
            prompt = file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise SettingsError(
                f"{file} is not UTF-8 text (byte {error.start})", "prompt_file"
            ) from error
        except OSError as error:
            raise SettingsError(
                f"{file} cannot be read: {error.strerror}. Give a file of text with --prompt-file",
                "prompt_file",
            ) from error
    text = DEFAULT_PROMPT if prompt is None else prompt.strip()
    if not text:
        raise SettingsError("the prompt is empty: give some text, or leave it out", "prompt")
    return text
