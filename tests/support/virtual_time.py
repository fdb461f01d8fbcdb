"""Asyncio on a clock that jumps: minutes pass in milliseconds, and a hang is an error at once."""

import asyncio
import gc
import math
import selectors
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_S = 1_700_000_000.0
"""Wall-clock second at which virtual time begins."""


class HangError(AssertionError):
    """Everything waits, and no timer will ever end it."""


class LooseEndsError(AssertionError):
    """Something was left running, or an exception was seen by nobody."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: the time that it was told to wait has passed when it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise HangError("nothing is ready and no timer is set")
        # A pause too short for the clock's precision still moves it, or it would never end.
        self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting, for code without threads and without the network."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.complaints: list[str] = []
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s

    def stand_still(self, for_s: float) -> None:
        """Let time pass without a chance to run anything, as a long computation does."""
        self._jumping.now_s += for_s

    def suspended_generators(self) -> list[AsyncGenerator[Any, Any]]:
        """Asynchronous generators that were begun and neither ended nor closed."""
        begun: Any = self._asyncgens  # type: ignore[attr-defined]  # asyncio's own weak set
        return [generator for generator in begun if generator.ag_frame is not None]

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        self.complaints.append(f"left to the garbage collector: {agen!r}")
        super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]  # not in the type stubs

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.complaints.append(f"{context['message']}: {error!r}" if error else context["message"])


class VirtualClock:
    """The contract's `Clock` on the virtual time of the loop that runs."""

    def now_s(self) -> float:
        """Wall-clock time, seconds since the Unix epoch."""
        return EPOCH_S + self.monotonic_s()

    def monotonic_s(self) -> float:
        """Virtual seconds since the loop was made; 0 outside of a loop."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return 0.0


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on virtual time and return its result.

    Raises:
        HangError: Nothing could ever go on.
        LooseEndsError: `main` returned while other tasks or generators were not at their end, or
            an exception was never seen by anybody.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        result = runner.run(main)
        # Exceptions that nobody has seen complain when they are collected; they are young, and
        # a look at all that pytest holds would take longer than most runs.
        gc.collect(1)
        left = [f"still runs: {task!r}" for task in asyncio.all_tasks(loop)]
        left += [f"not closed: {generator!r}" for generator in loop.suspended_generators()]
        left += loop.complaints
    if left:
        raise LooseEndsError("; ".join(left))
    return result
