"""`headrace pack`: repack a checkpoint's experts for streaming."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headrace_deploy.byte_bar import ByteBars
from headrace_deploy.folders import using_state_folder, why
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.engine.checkpoint import DEMO, Checkpoint, read_checkpoint, resolve
from headrace_replicas.engine.experts.pack_index import state_folder
from headrace_replicas.engine.packing import PackReport, pack_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        model: `demo`, a folder, or a repository of the hub.
        revision: Of a repository.
        output: Folder of the pack; None takes the model's, or one below the state folder.
        force: Replace the pack of another checkpoint in `output`.
        state_dir: Where engines look for packs that are not in the model's folder.
        workers: Layers checked, and records digested, at a time.
    """

    model: str
    revision: str | None
    output: Path | None
    force: bool
    state_dir: Path
    workers: int


def run(request: Request, console: Console, bars: ByteBars) -> None:
    """Pack, and say what became of it.

    Raises:
        CheckpointError: The checkpoint is broken, or has no experts that can be packed.
        LaunchError: The state folder cannot be used.
        SettingsError: The folder cannot be used or is too small.
    """
    checkpoint = read_checkpoint(resolve(request.model, request.revision))
    shared = state_folder(request.state_dir, checkpoint.fingerprint)
    folder = request.output or _default_folder(request, checkpoint, shared)
    _prepare(folder, request.state_dir if folder == shared else None)
    report = pack_checkpoint(
        checkpoint,
        folder,
        workers=request.workers,
        bar=bars,
        replaces=request.force or request.output is None,
    )
    if folder.resolve() not in {checkpoint.path.resolve(), shared.resolve()}:
        _link(shared, folder)
    _tell(report, console)


def _default_folder(request: Request, checkpoint: Checkpoint, shared: Path) -> Path:
    """The model's own folder, unless it is the program's or cannot be written."""
    is_ours = request.model != DEMO and os.access(checkpoint.path, os.W_OK)
    return checkpoint.path if is_ours else shared


def _prepare(folder: Path, state_dir: Path | None) -> None:
    """Make the folder of the pack.

    Args:
        folder: The folder.
        state_dir: The state folder, where the pack goes below that; or else None.

    Raises:
        LaunchError: The state folder cannot be used.
        SettingsError: Another folder cannot.
    """
    if state_dir is not None:
        with using_state_folder(state_dir):
            folder.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{folder} cannot be made: {why(error)}. Give another with --output.", "output"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise SettingsError(f"{folder} may not be read and written. Give another.", "output")


def _link(shared: Path, folder: Path) -> None:
    """Let engines of this machine find a pack that lies elsewhere.

    Raises:
        SettingsError: There is a pack of the same checkpoint already where they look, or the
            state folder cannot be written.
    """
    if shared.exists() and not shared.is_symlink():
        raise SettingsError(
            f"the pack is written, but {shared} holds an older one that engines go on using. "
            "Remove that folder and run the same command again.",
            "output",
        )
    fresh = shared.with_name(f"{shared.name}.{os.getpid()}.new")
    try:
        shared.parent.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(folder.resolve(), target_is_directory=True)
        fresh.replace(shared)
    except OSError as error:
        raise SettingsError(
            f"the pack is written, but the link {shared} that leads engines to it is not: "
            f"{error.strerror}. Give another --state-dir, or run the same command again.",
            "state_dir",
        ) from error


def _tell(report: PackReport, console: Console) -> None:
    padding = report.padding_bytes / report.size_bytes
    console.print(
        f"{report.records} experts of {report.layers} layers, {report.size_bytes / 1e9:.2f} GB "
        f"({padding:.1%} zeros that fill pages), {report.kept} layers were there already"
    )
    console.print(f"packed in {report.index}; engines that start from now on use it")
