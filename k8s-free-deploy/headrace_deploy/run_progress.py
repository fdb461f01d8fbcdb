"""Shows how far a bench is: a bar on a terminal, and a line for each part elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """What is under way.

    Args:
        console: Where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ""
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._bars.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show a part, and how many of its steps are done.

        Args:
            what: The part.
            done: Steps done.
            total: Its steps; 0 when it has none to count.
        """
        self._bars.update(self._bar, description=what, completed=done, total=total or None)
        if what != self._shown and not self._console.is_terminal:
            self._console.print(what, markup=False, highlight=False, soft_wrap=True)
        self._shown = what
