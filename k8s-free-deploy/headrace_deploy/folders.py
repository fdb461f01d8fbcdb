"""Folders that headrace writes to, and what a person is told when one cannot be used."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headrace_replicas.contract.errors import LaunchError


def why(error: OSError) -> str:
    """What the system said, without the number that only programs need."""
    if isinstance(error, FileExistsError):
        return "a file of that name is in the way"
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def using_state_folder(folder: Path) -> Iterator[None]:
    """Work on the state folder.

    Raises:
        LaunchError: The system refuses; the message says where, why, and what to do.
    """
    try:
        yield
    except OSError as error:
        place = "" if error.filename in {None, str(folder)} else f" ({error.filename})"
        raise LaunchError(
            f"the state folder {folder} cannot be used: {why(error)}{place}. Give a folder that "
            "you may read and write with --state-dir or HEADRACE_STATE_DIR",
            "state_dir",
        ) from error


def prepare_state_folder(folder: Path) -> None:
    """Make the state folder, and prove that files can be written to it.

    Raises:
        LaunchError: They cannot.
    """
    with using_state_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as proof:
            proof.write(b"proof")


def require_folder_or_nothing(folder: Path) -> None:
    """Refuse a state folder that is a file or may not be read; one that is not there yet is fine.

    Raises:
        LaunchError: It is.
    """
    with using_state_folder(folder):
        names_in(folder)


def names_in(folder: Path) -> tuple[str, ...]:
    """The names in a folder, sorted; none when it is not there.

    Raises:
        OSError: It is no folder, or may not be read.
    """
    try:
        return tuple(sorted(os.listdir(folder)))  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return ()


def open_log(state_dir: Path, file: Path) -> BinaryIO:
    """An empty log in the state folder, open for writing.

    Raises:
        LaunchError: It cannot be written.
    """
    with using_state_folder(state_dir):
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("wb")


def fresh_folder(prefix: str, parent: str | None = None) -> Path:
    """A new folder that only this user may look into.

    Args:
        prefix: How its name begins.
        parent: Where it goes; None takes the system's folder for temporary files.

    Raises:
        LaunchError: It cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        remedy = f"make {parent} writable" if parent else "set TMPDIR to a folder you may write to"
        raise LaunchError(
            f"no temporary folder can be made: {why(error)}. Free some room, or {remedy}"
        ) from error
