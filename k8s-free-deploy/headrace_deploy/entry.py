"""Where the program `headrace` begins, and how it takes Ctrl-C from its first moment to its last.

Importing the command line takes seconds, so it is imported only once interruptions are provided
for: until the command line runs, and after it has ended, there is nothing to clean up, and an
interruption ends the process at once and without a word. While it runs an interruption is a
`KeyboardInterrupt`, so that every `with` block is left in order.

Imports nothing but the standard library.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

# What asks politely to end (launchd, a closed terminal) is treated as Ctrl-C is.
_INTERRUPTIONS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a shell reports of a program that Ctrl-C ended.
_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line; the entry point of the installed program."""
    _on_interruption(_leave)
    from headrace_deploy.cli import main as run  # noqa: PLC0415 - see above

    try:
        _on_interruption(_interrupt)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        _on_interruption(_leave)


def _on_interruption(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    """Set the handler of each interruption; what the parent ignores (nohup) stays ignored."""
    for one in _INTERRUPTIONS:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, handler)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    """End now: an exception in the middle of an import may be swallowed, or end in a traceback."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
