"""Tells a person what a slow step is doing, and how long each took."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from headrace_replicas.contract.clock import Clock

Report = Callable[[str], None]
"""Takes one line on how far a slow step is."""


class Steps:
    """Prints one line per finished step with its seconds; on a terminal the running one moves.

    Args:
        console: Where to print.
        clock: Where the seconds come from.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock

    @contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """One step; what it reports is shown beside its title.

        Without a terminal each report becomes a line of its own, so that a log tells the story.
        """
        began_s = self._clock.monotonic_s()
        with self._console.status(f"{title} …") as status:

            def report(line: str) -> None:
                status.update(f"{title} … {_plain(line)}")
                if not self._console.is_terminal:
                    self._console.print(f"    {_plain(line)}", style="dim", soft_wrap=True)

            yield report
        took_s = self._clock.monotonic_s() - began_s
        self._console.print(f"  [green]done[/]  {took_s:5.1f} s  {_plain(title)}", soft_wrap=True)


def _plain(text: str) -> str:
    """Text of others, in which square brackets are no markup."""
    return text.replace("[", "\\[")
