"""The play of the demo: one story told twice, the second time with a murder in it."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from rich.console import Console

from headrace_deploy.local import LocalNode
from headrace_deploy.progress import Steps
from headrace_deploy.story_client import Story, StoryClient, Worker
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import LaunchError

PROMPT: Final = "Tell me a story about a fox named Vera."
_REQUEST: Final[Mapping[str, Any]] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0.8,
    "seed": 7,
    "max_tokens": 300,
}
# Enough text to see that the story runs, with most of it still to come.
_KILL_AFTER_CHARS: Final = 150
_SHOWN_CHARS: Final = 160
_ALL_READY_S: Final = 30.0
# Snapshots reach the gateway twice a second.
_FIND_S: Final = 5.0
# The incident is written within a second; closing it takes a new engine process.
_INCIDENT_S: Final = 30.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        undisturbed: The story without a fault.
        disturbed: The story whose engine was killed.
    """

    undisturbed: Story
    disturbed: Story

    @property
    def is_equal(self) -> bool:
        """Whether the reader got the same bytes although an engine was lost on the way."""
        return self.has_moved and (
            (self.disturbed.text, self.disturbed.finish_reason)
            == (self.undisturbed.text, self.undisturbed.finish_reason)
        )

    @property
    def has_moved(self) -> bool:
        """Whether a second replica finished the story."""
        return self.disturbed.attempts > 1

    @property
    def verdict(self) -> str:
        """One line for a person."""
        if not self.has_moved:
            return "[bold red]FAIL[/] the story never moved: the wrong engine was killed"
        size = len(self.disturbed.text.encode())
        if self.is_equal:
            return f"[bold green]EQUAL[/] byte for byte: {size} bytes, one engine killed"
        if self.disturbed.text == self.undisturbed.text:
            reasons = f"{self.disturbed.finish_reason} instead of {self.undisturbed.finish_reason}"
            return f"[bold red]FAIL[/] the killed story ends with {reasons}"
        return f"[bold red]FAIL[/] the killed story differs after {self._common()} characters"

    def _common(self) -> int:
        pairs = zip(self.undisturbed.text, self.disturbed.text, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Shows a story as it comes, and notices its pauses."""

    console: Console
    clock: Clock
    chars: int = 0
    last_s: float | None = None
    longest_pause_s: float = 0.0
    far_enough: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, text: str) -> None:
        now_s = self.clock.monotonic_s()
        if self.last_s is not None:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self.last_s)
        self.last_s = now_s
        self.chars += len(text)
        self.console.out(text, end="", highlight=False)
        if self.chars >= _KILL_AFTER_CHARS:
            self.far_enough.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """The demo on a fleet that is up.

    Attributes:
        node: Where the fleet runs; only its processes are killed.
        replicas: Engines to wait for.
    """

    node: LocalNode
    console: Console
    steps: Steps
    clock: Clock
    replicas: int

    async def act(self) -> Outcome:
        """Tell the story undisturbed, then with a kill, then show the incident.

        Raises:
            LaunchError: The fleet did not do its part.
        """
        client = StoryClient(self.node.endpoint)
        try:
            with self.steps.step("the second engine proves that it generates"):
                await self._all_idle(client)
            request = {**_REQUEST, "model": await client.model()}
            self.console.print(f"\n[bold]{PROMPT}[/]")
            with self.steps.step("undisturbed, for comparison"):
                undisturbed = await client.tell(request, lambda _: None)
            self.console.print(f"  {_short(undisturbed.text)}\n", style="dim", markup=False)
            await self._all_idle(client)
            self.console.print("[bold]Again, and live:[/]\n")
            disturbed, victim = await self._disturbed(client, request)
            outcome = Outcome(undisturbed=undisturbed, disturbed=disturbed)
            self.console.print(f"  {outcome.verdict}\n")
            await self._incident(client, victim)
            return outcome
        finally:
            await client.close()

    async def _disturbed(
        self, client: StoryClient, request: Mapping[str, Any]
    ) -> tuple[Story, Worker]:
        """Tell the story, and kill the process that tells it."""
        reader = _Reader(console=self.console, clock=self.clock)
        telling = asyncio.create_task(client.tell(request, reader.hear))
        killing = asyncio.create_task(self._kill(client, reader))
        try:
            await asyncio.wait({telling, killing}, return_when=asyncio.FIRST_EXCEPTION)
            if not killing.done():
                raise LaunchError("the story was over before its engine was found")
            victim = await killing
            story = await telling
        finally:
            telling.cancel()
            killing.cancel()
        self.console.print("\n")
        self.console.print(
            f"  {story.tokens} tokens, {story.attempts} engines worked on it, longest pause "
            f"{reader.longest_pause_s:.2f} s"
        )
        return story, victim

    async def _kill(self, client: StoryClient, reader: _Reader) -> Worker:
        await reader.far_enough.wait()
        give_up_s = self.clock.monotonic_s() + _FIND_S
        while True:
            busy = [worker for worker in await client.workers() if worker.running]
            if len(busy) == 1 and self.node.owns(busy[0].pid):
                break
            if self.clock.monotonic_s() >= give_up_s:
                raise LaunchError(f"{len(busy)} replicas of this node say that they are busy")
            await asyncio.sleep(_POLL_S)
        victim = busy[0]
        os.kill(victim.pid, signal.SIGKILL)
        self.console.print(
            f"\n[bold red]>>> kill -9 {victim.pid}, the engine that tells this story <<<[/]"
        )
        return victim

    async def _all_idle(self, client: StoryClient) -> None:
        """Wait until each engine is ready and without work."""
        give_up_s = self.clock.monotonic_s() + _ALL_READY_S
        while True:
            workers = await client.workers()
            idle = [one for one in workers if one.state == "ready" and not one.running]
            if len(idle) == self.replicas:
                return
            if self.clock.monotonic_s() >= give_up_s:
                raise LaunchError(f"{len(idle)} of {self.replicas} engines became ready: {workers}")
            await asyncio.sleep(_POLL_S)

    async def _incident(self, client: StoryClient, victim: Worker) -> None:
        """Show what the fleet wrote about it, closed if that does not take too long."""
        give_up_s = self.clock.monotonic_s() + _INCIDENT_S
        lines: Sequence[str] = ()
        with self.steps.step("the incident, from the first symptom to the new engine"):
            while self.clock.monotonic_s() < give_up_s:
                for record, summary in await client.incidents():
                    if record["replica"] == victim.replica_id:
                        lines = summary
                        if record["closed_s"] is not None:
                            give_up_s = 0.0
                await asyncio.sleep(_POLL_S)
        if not lines:
            raise LaunchError(f"no incident was written about replica {victim.replica_id}")
        for line in lines:
            self.console.print(f"  {line}", markup=False, soft_wrap=True)
        self.console.print()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS].rstrip()} …"
