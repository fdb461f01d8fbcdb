"""Commands that work on the files of a checkpoint while nothing serves it."""

import os
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from headrace_deploy.byte_bar import ByteBars
from headrace_deploy.command_line import (
    JsonOption,
    ModelArgument,
    RevisionOption,
    StateDirOption,
    endings,
)
from headrace_deploy.folders import require_folder_or_nothing
from headrace_deploy.settings_sources import load

# Files or layers read at a time: enough to keep an SSD busy, 4 MiB of memory each.
_WORKERS: Final = 8

WorkersOption = Annotated[
    int, typer.Option(min=1, max=64, help="Files or layers read at a time.", show_default=True)
]


def verify(
    model: ModelArgument,
    *,
    create: Annotated[
        bool, typer.Option("--create", help="Record the checksums of a copy that you trust.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --create: replace an older record.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File of the checksums, where the model's folder cannot be written. "
            "(default: headrace.checksums.json in that folder)"
        ),
    ] = None,
    revision: RevisionOption = None,
    state_dir: StateDirOption = None,
    workers: WorkersOption = _WORKERS,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint, and name the file and tensor that changed.

    Compares with the recorded checksums, with those of the hub in its cache,
    and checks repacked experts too.

    Ends with 0 when everything is as recorded, with 1 when something is not,
    and with 2 when there is nothing to compare with.
    """
    errors = Console(stderr=True)
    with endings(errors):
        # The checks bring transformers, which takes seconds; other commands do without.
        from headrace_deploy import verify_command  # noqa: PLC0415 - see above

        status = verify_command.run(
            verify_command.Request(
                model=model,
                revision=revision,
                create=create,
                force=force,
                output=output,
                state_dir=_state_dir(state_dir),
                workers=workers,
                as_json=as_json,
            ),
            Console(highlight=False, soft_wrap=True, markup=False),
            ByteBars(errors),
        )
    raise typer.Exit(status)


def pack(
    model: ModelArgument,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the pack. (default: the model's folder, or one below the state folder "
            "where that cannot be written)"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the pack of another checkpoint in --output.")
    ] = False,
    revision: RevisionOption = None,
    state_dir: StateDirOption = None,
    workers: WorkersOption = _WORKERS,
) -> None:
    """Write each expert into one record, so that streaming brings it with one read.

    Needed for checkpoints whose layout cannot be streamed as it is; for others
    it saves calls, the more the smaller the experts.

    Takes as much room as the experts themselves. After an interruption the same
    command goes on where it was.
    """
    errors = Console(stderr=True)
    with endings(errors):
        # This brings MLX and transformers, which take seconds; other commands do without.
        from headrace_deploy import pack_command  # noqa: PLC0415 - see above

        pack_command.run(
            pack_command.Request(
                model=model,
                revision=revision,
                output=output,
                force=force,
                state_dir=_state_dir(state_dir),
                workers=workers,
            ),
            Console(highlight=False, soft_wrap=True, markup=False),
            ByteBars(errors),
        )


def _state_dir(given: Path | None) -> Path:
    overrides = {} if given is None else {"state_dir": given}
    folder = load(None, os.environ, overrides).settings.state_dir
    require_folder_or_nothing(folder)
    return folder
