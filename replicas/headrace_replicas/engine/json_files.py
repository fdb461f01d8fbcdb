"""Reads JSON that somebody else wrote: bounded in bytes and depth, and never another exception.

A checkpoint comes from the network, so any of its files may be cut, damaged or hostile. Every
failure here is a `CheckpointError` that names the file and what to do about it.
"""

import json
import stat
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from headrace_replicas.contract.errors import CheckpointError

JsonObject = dict[str, object]

SMALL_FILE_BYTES = 16 * 1024 * 1024
LARGE_FILE_BYTES = 512 * 1024 * 1024
DEPTH_LIMIT = 64
REMEDY = "Download the checkpoint again."


def read_bytes(path: Path, *, limit_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        CheckpointError: It is not there, not a regular file (a pipe would block for ever),
            not readable, or longer than `limit_bytes`.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file. {REMEDY}")
        if status.st_size > limit_bytes:
            raise CheckpointError(
                f"{path} has {status.st_size} bytes, more than the {limit_bytes} that such a "
                f"file may have. {REMEDY}"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. {REMEDY}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def first_complaint(error: ValidationError) -> str:
    """Where pydantic found the first thing wrong in a file, and what it is."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    return f"{where}: {first['msg']}"


def decode_text(raw: bytes, path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        CheckpointError: It is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start}). {REMEDY}") from error


def parse_object(raw: bytes, path: Path) -> JsonObject:
    """The JSON object in `raw`, which was read from `path`.

    Raises:
        CheckpointError: It is not JSON, not an object, or nested deeper than `DEPTH_LIMIT`.
    """
    text = decode_text(raw, path)
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            f"it is cut or damaged. {REMEDY}"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number, endless nesting
        raise CheckpointError(f"{path} is not sane JSON ({error}). {REMEDY}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {_kind_of(value)} where an object is due. {REMEDY}")
    if _deeper_than(value, DEPTH_LIMIT):
        raise CheckpointError(f"{path} nests deeper than {DEPTH_LIMIT} levels. {REMEDY}")
    return value


def read_object(path: Path, *, limit_bytes: int = SMALL_FILE_BYTES) -> JsonObject:
    """The JSON object in a file.

    Raises:
        CheckpointError: As `read_bytes` and `parse_object`.
    """
    return parse_object(read_bytes(path, limit_bytes=limit_bytes), path)


def is_regular_file(path: Path) -> bool:
    """Whether there is a regular file (or a link to one); False for a name that none can have."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def whole_number(value: object) -> int | None:
    """`value` when it is an integer; True and False are not numbers."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def nested_object(owner: JsonObject, key: str) -> JsonObject:
    """The object under `key`, or an empty one when there is none."""
    value = owner.get(key)
    return value if isinstance(value, dict) else {}


def quoted(name: str) -> str:
    """A name from a file, fit for a message: printable and not endless."""
    return f"{name!r:.200}"


def some_of(names: Iterable[str], *, limit: int = 5) -> str:
    """The first few names for a message, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(quoted(name).strip("'") for name in ordered[:limit])
    rest = len(ordered) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _kind_of(value: object) -> str:
    match value:
        case None | bool():
            return "null, true or false"
        case list():
            return "a list"
        case str():
            return "a string"
        case _:
            return "a number"
