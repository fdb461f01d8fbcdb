"""Shows how far a step is that reads or writes a known number of bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ByteBars:
    """One bar per step, gone when the step is over; nothing where nobody looks.

    Args:
        console: Where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """A bar; what it yields takes the bytes of each advance, from any thread."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        visible = self._console.is_terminal
        with Progress(
            *columns, console=self._console, transient=True, disable=not visible
        ) as progress:
            task = progress.add_task(title, total=total_bytes)
            yield lambda count: progress.advance(task, count)
