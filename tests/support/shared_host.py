"""A host whose memory an engine shares with programs that come and go when a test says so."""

from collections.abc import Callable, Iterator

import mlx.core as mx

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.experts.governor import QUIET_S, Limits
from headrace_replicas.engine.experts.resizing import SlotKeeper
from headrace_replicas.engine.footprint import HostPressure, PressureLevel
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.steps import Engine
from tests.support.engines import PATIENCE_S
from tests.support.waiting import comes_true

# Enough for the caches of a few short requests.
_KV_BYTES = 64 * 2**20
_HEADROOM_SLOTS = 8


class LeapingClock(SystemClock):
    """The system's clock, and leaps on top of it."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def leap(self, for_s: float) -> None:
        """Let time pass at once."""
        self._leapt_s += for_s

    def now_s(self) -> float:
        """Wall-clock time, seconds since the Unix epoch."""
        return super().now_s() + self._leapt_s

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        return super().monotonic_s() + self._leapt_s


class SharedHost:
    """Tells what an engine's host has left; called on the engine thread.

    Attributes:
        total_bytes: For all programs together, the engine included.
        others_bytes: What the others hold.
        level: As a Mac would say.
        readings: How often it was asked.
        script: Goes on by one step whenever the host is asked, before it answers.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self.others_bytes = 0
        self.level: PressureLevel = "normal"
        self.readings = 0
        self.script: Iterator[None] = iter(())

    def __call__(self) -> HostPressure:
        self.readings += 1
        next(self.script, None)
        own_bytes = mx.get_active_memory() + mx.get_cache_memory()
        return HostPressure(
            available_bytes=self.total_bytes - self.others_bytes - own_bytes,
            source="a host of the test's",
            level=self.level,
        )


class SharingEngine:
    """An engine that streams on such a host, which has just what was planned and a headroom.

    Args:
        checkpoint: What it serves, on MLX's CPU device.
        slots: Planned for each layer.
        top_k: Experts of one token.
        schedule: How decode steps fetch experts.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, slots: int, top_k: int, schedule: str = "layers"
    ) -> None:
        self.host = SharedHost()
        self.clock = LeapingClock()
        self.limits: Limits
        self.keeper: SlotKeeper
        self._checkpoint = checkpoint
        self._slots = slots
        self._top_k = top_k
        self._settings = EngineSettings.model_validate(
            {"device": "cpu", "prefill_chunk_tokens": 64, "schedule": schedule}
        )
        self.engine = Engine(
            load=self._load,
            settings=self._settings,
            clock=self.clock,
            keep_slots=self._keep_slots,
        )
        self.engine.start()

    def _load(self) -> LoadedModel:
        streaming = Streaming(
            slots=self._slots, workers=4, clock=self.clock, on_progress=self.engine.progressed
        )
        return load(self._checkpoint, device="cpu", dtype="auto", streaming=streaming)

    def _keep_slots(self, loaded: LoadedModel) -> SlotKeeper:
        assert loaded.streamed is not None
        slot_bytes = sum(stream.slot_bytes for stream in loaded.streamed.streams)
        self.limits = Limits(
            least_slots=self._top_k,
            planned_slots=self._slots,
            slot_bytes=slot_bytes,
            planned_bytes=mx.get_active_memory() + _KV_BYTES,
            headroom_bytes=_HEADROOM_SLOTS * slot_bytes,
        )
        self.host.total_bytes = self.limits.planned_bytes + self.limits.headroom_bytes
        self.keeper = SlotKeeper(
            streamed=loaded.streamed,
            limits=self.limits,
            read=self.host,
            period_s=0.001,  # less than a step takes
            clock=self.clock,
        )
        return self.keeper

    def others_take(self, slots: float) -> None:
        """Let the other programs hold as much memory as so many slots."""
        self.host.others_bytes = round(slots * self.limits.slot_bytes)

    def wait_for_slots(self, slots: int) -> None:
        """Until a resize has led to so many."""
        wait_until(lambda: self.keeper.report.slots == slots)

    def wait_for_reading(self) -> None:
        """Until the host was asked once more, and the answer was acted upon."""
        seen = self.host.readings
        wait_until(lambda: self.host.readings >= seen + 2)

    def quiet_time(self) -> None:
        """Let the engine see that there is room, and enough time pass."""
        self.wait_for_reading()
        self.clock.leap(QUIET_S)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread does.

    Raises:
        TimeoutError: It does not.
    """
    if not comes_true(holds, patience_s=PATIENCE_S, every_s=0.005):
        raise TimeoutError
