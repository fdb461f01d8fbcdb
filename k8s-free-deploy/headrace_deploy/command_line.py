"""What all commands share: how they end, and options that mean the same everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from headrace_deploy.folders import why
from headrace_replicas.contract.errors import HeadraceError, SettingsError

_INTERRUPTED: Final = 130

StateDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of incidents, canaries and device locks. (default: ~/.headrace)",
        # Whether it can be used is said by who uses it, wherever the name comes from.
        readable=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelArgument = Annotated[
    str, typer.Argument(help="`demo`, a folder with a checkpoint, or a Hugging Face id.")
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")
]
ContextOption = Annotated[
    int | None, typer.Option(help="Prompt and answer of one request together, in tokens.")
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or gpu. (default: auto)")]
SettingsFileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="A YAML file of settings.")
]


@contextmanager
def endings(errors: Console) -> Iterator[None]:
    """Turn errors into one line and an exit status: 2 for settings, 1 for anything else.

    What the system refuses is an error of the place, not of the program, so it needs no traceback.
    """
    try:
        yield
    except HeadraceError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from error
    except BrokenPipeError:
        # Whoever read the output has gone; click ends without a word.
        raise
    except OSError as error:
        errors.print(f"[bold red]error:[/] {escape(_refusal(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        errors.print("interrupted")
        raise typer.Exit(_INTERRUPTED) from error


def _refusal(error: OSError) -> str:
    place = "" if error.filename is None else f"{error.filename}: "
    return (
        f"{place}{why(error)}. Check that this path is right, that you may read and write there, "
        "and that its disk has room"
    )
