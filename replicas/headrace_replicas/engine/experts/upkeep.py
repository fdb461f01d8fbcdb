"""What a streaming engine does beside its requests: hot experts kept, preloaded, and warmed up.

The list of hot experts is written between requests. It is read once, at the start: after the
canary, whose experts would otherwise push out what was preloaded, and before the replica is
ready. Without a list nothing is preloaded: the slots hold what the canary, a real prompt, has asked
for, and the first experts by number would be no better than others.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.experts.hot_list import HotList, hot_list_path
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.popularity import hottest
from headrace_replicas.engine.experts.preload import preload
from headrace_replicas.engine.experts.warm_up import WarmUp, WarmUpProgress, without_slots
from headrace_replicas.engine.experts.warm_up_plan import room_bytes, within
from headrace_replicas.engine.memory_host import read_host
from headrace_replicas.engine.memory_plan import MemoryPlan

log = logging.getLogger("ray.serve.headrace.experts")

# The list is written this often at most, in a pause between requests.
SAVE_EVERY_S: Final = 60.0
# An engine that has no pause writes it beside its requests: it may end by a fault at any time.
SAVE_AT_LATEST_S: Final = 600.0
_LOOK_S: Final = 5.0
# A read or a write that is under way when the replica leaves takes milliseconds.
_END_S: Final = 2.0


def save_is_due(since_s: float, *, is_busy: bool) -> bool:
    """Whether the list should be written now.

    Args:
        since_s: Seconds since it last was, or since the start.
        is_busy: Whether a request runs.
    """
    return since_s >= (SAVE_AT_LATEST_S if is_busy else SAVE_EVERY_S)


class Upkeep:
    """The background work of one engine whose experts stream.

    Args:
        streamed: What streams them.
        plan: What the engine's memory is for.
        fingerprint: The checkpoint's.
        state_dir: Where the list of hot experts is kept.
        warm_up_bytes_per_s: How fast experts may be read into the page cache; None or 0 for not.
        is_busy: Whether a request runs now.
        clock: Time source.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        *,
        plan: MemoryPlan,
        fingerprint: str,
        state_dir: Path,
        warm_up_bytes_per_s: int | None,
        is_busy: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._streamed = streamed
        self._plan = plan
        self._rate = warm_up_bytes_per_s or 0
        self._is_busy = is_busy
        self._clock = clock
        self._saved_s = clock.monotonic_s()
        self._leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._warm_up: WarmUp | None = None
        self._hot_list = HotList(
            hot_list_path(state_dir, fingerprint),
            fingerprint=fingerprint,
            shapes=streamed.shapes,
            uses=streamed.uses,
        )

    def preload(self) -> None:
        """Fill the slots with the hottest experts that are known; on the engine thread.

        Raises:
            ExpertReadError: An expert cannot be read from the checkpoint.
        """
        began_s = self._clock.monotonic_s()
        layers = self._hot_list.popularity.layers
        wanted = [hottest(layers[one.path], one.capacity) for one in self._streamed.streams]
        brought = preload(self._streamed, wanted)
        if any(wanted):
            log.info(
                "preloaded: %d hot experts have slots, %d of them read in %.2f s",
                sum(map(len, wanted)),
                brought,
                self._clock.monotonic_s() - began_s,
            )

    def start(self) -> None:
        """Begin the work that needs no engine thread; requests may come from now on."""
        self._start(self._keep_list, "headrace-hot-list")
        if self._rate:
            self._warm_up = self._planned_warm_up()
            run = self._warm_up.run
            self._start(lambda: run(self._leaving.wait), "headrace-warm-up")

    def _planned_warm_up(self) -> WarmUp:
        # Wired memory limits a GPU, not the page cache: what counts is what is available.
        available_bytes = read_host(on_gpu=False).limit_bytes
        experts = without_slots(self._streamed, self._hot_list.popularity)
        return WarmUp(
            self._streamed.reader.files,
            within(experts, room_bytes(self._plan, available_bytes)),
            bytes_per_s=self._rate,
            is_busy=lambda: self._is_busy() or self._streamed.reader.active,
            clock=self._clock,
        )

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def warm_up(self) -> WarmUpProgress:
        """How far the warm-up is; nothing planned when it is off."""
        return WarmUpProgress() if self._warm_up is None else self._warm_up.progress

    def look(self) -> None:
        """Write the list if it is time to."""
        now_s = self._clock.monotonic_s()
        if save_is_due(now_s - self._saved_s, is_busy=self._is_busy()):
            self._saved_s = now_s
            self._hot_list.save()

    def _keep_list(self) -> None:
        while not self._leaving.wait(_LOOK_S):
            self.look()
        self._hot_list.save()

    def leave(self) -> None:
        """Write the list a last time and end the warm-up, soon and without waiting for it."""
        self._leaving.set()

    def close(self) -> None:
        """As `leave`, and wait for it; again does nothing."""
        self.leave()
        for thread in self._threads:
            thread.join(_END_S)
