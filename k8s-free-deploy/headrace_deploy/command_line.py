"""What all commands share: how they end, and options that mean the same everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from headrace_replicas.contract.errors import HeadraceError, SettingsError

_INTERRUPTED: Final = 130

StateDirOption = Annotated[
    Path | None,
    typer.Option(help="Folder of incidents, canaries and device locks. (default: ~/.headrace)"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def endings(errors: Console) -> Iterator[None]:
    """Turn our errors into one line and an exit status: 2 for settings, 1 for anything else."""
    try:
        yield
    except HeadraceError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from error
    except KeyboardInterrupt as error:
        errors.print("interrupted")
        raise typer.Exit(_INTERRUPTED) from error
