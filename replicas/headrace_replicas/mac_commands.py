"""Runs the programs of macOS that tell what no library call does. Not run on a Mac."""

import subprocess
from typing import Final

_PATIENCE_S: Final = 10


def output_of(*command: str) -> bytes:
    """What a program prints; empty when it is not there, fails, or does not end.

    Args:
        command: The program's whole path, and its arguments.
    """
    try:
        done = subprocess.run(  # noqa: S603  fixed programs of the system
            command, check=True, capture_output=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout
