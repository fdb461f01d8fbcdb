"""Carries out what the governor decides: reads the host, and resizes slots between two steps.

On the engine thread alone. A resize of many large pools takes seconds, so it goes layer by layer
and lets a step run in between, whether requests run or not: an engine that waited for a gap between
two requests could wait for ever, and the host would swap meanwhile. Between two steps nothing that
reads slots is left to compute, and layers may differ in their number of slots. Where memory cannot
be had, that is a fault of the engine: its process is replaced, and plans anew.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.allocators import return_free_pages
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.governor import Limits, Reading, begin, decide
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.streaming import ExpertStream
from headrace_replicas.engine.footprint import HostPressure
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.memory_refusal import shown_bytes

log = logging.getLogger("ray.serve.headrace.memory")

# Layers are resized for so long before a step may run, at least one: running requests should
# hardly notice.
_SLICE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReport:
    """The slots of a running engine.

    Attributes:
        slots: Experts of each streaming layer that fit into memory now.
        resizes: How often that has changed since the start.
        reason: Why it is not what was planned; empty when it is.
    """

    slots: int
    resizes: int = 0
    reason: str = ""


def limits_of(plan: MemoryPlan, streamed: StreamedModel, *, top_k: int) -> Limits:
    """What a plan allows the governor.

    Args:
        plan: The one that the model was loaded by.
        streamed: The loaded model's experts.
        top_k: Experts of a layer that one token uses.
    """
    return Limits(
        least_slots=min(top_k, plan.slots_per_layer),
        planned_slots=plan.slots_per_layer,
        slot_bytes=sum(stream.slot_bytes for stream in streamed.streams),
        planned_bytes=plan.total_bytes - plan.headroom_bytes,
        headroom_bytes=plan.headroom_bytes,
    )


class SlotKeeper:
    """Keeps the slots of one engine as few as its host needs and as many as its plan allows.

    Args:
        streamed: The experts, with the planned slots.
        limits: What the plan allows.
        read: How the host fares now; may raise `MemoryPlanError`.
        period_s: Time between two readings.
        clock: Time source.

    Attributes:
        report: Replaced as a whole after each resize.
    """

    def __init__(
        self,
        *,
        streamed: StreamedModel,
        limits: Limits,
        read: Callable[[], HostPressure],
        period_s: float,
        clock: Clock,
    ) -> None:
        self._streamed = streamed
        self._read = read
        self._period_s = period_s
        self._clock = clock
        self._state = begin(limits)
        self._due_s = clock.monotonic_s() + period_s
        self._left: list[ExpertStream] = []
        self._reason = ""
        self._began_s = 0.0
        self._blind = False
        self.report = SlotsReport(slots=self._state.slots)

    def due_in_s(self) -> float:
        """Seconds until `between_steps` has something to do; 0 when it has."""
        if self._left:
            return 0.0
        return max(self._due_s - self._clock.monotonic_s(), 0.0)

    def between_steps(self) -> None:
        """Read the host when that is due, and resize when it must be; soon done otherwise."""
        if not self._left and self.due_in_s() == 0.0:
            self._decide()
        if self._left:
            self._resize()

    def _decide(self) -> None:
        now_s = self._clock.monotonic_s()
        self._due_s = now_s + self._period_s
        host = self._host()
        if host is None:
            return
        reading = Reading(
            host=host,
            active_bytes=mx.get_active_memory(),
            cached_bytes=mx.get_cache_memory(),
        )
        decision = decide(self._state, reading, now_s)
        if decision.state.slots != self._state.slots:
            self._left = list(self._streamed.streams)
            self._reason = decision.reason
            self._began_s = now_s
        self._state = decision.state

    def _host(self) -> HostPressure | None:
        """A reading; without one the slots stay, because a number made up would be worse."""
        try:
            host = self._read()
        except MemoryPlanError as error:
            if not self._blind:
                log.warning("the host's memory is not watched: %s", error)
            self._blind = True
            return None
        self._blind = False
        return host

    def _resize(self) -> None:
        until_s = self._clock.monotonic_s() + _SLICE_S
        with nothing_cached():
            while self._left:
                self._left.pop(0).resize(self._state.slots)
                if self._clock.monotonic_s() >= until_s:
                    break
        if not self._left:
            return_free_pages()
            self._finish()

    def _finish(self) -> None:
        was, slots, limits = self.report.slots, self._state.slots, self._state.limits
        log.info(
            "expert slots of each layer: %d, were %d, planned %d: %s %s in %.2f s; %s",
            slots,
            was,
            limits.planned_slots,
            shown_bytes(abs(slots - was) * limits.slot_bytes),
            "given back" if slots < was else "taken again",
            self._clock.monotonic_s() - self._began_s,
            self._reason,
        )
        self.report = SlotsReport(
            slots=slots,
            resizes=self.report.resizes + 1,
            reason="" if slots == limits.planned_slots else self._reason,
        )


@contextmanager
def nothing_cached() -> Iterator[None]:
    """While this lasts, memory that MLX frees goes back to the system.

    A pool that stays in the allocator's cache helps nobody, and a pool that comes out of it may be
    larger than it was asked for. This is the limit that bounds the cache at all times; what is in
    the cache goes as well.
    """
    limit_bytes = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit_bytes)
