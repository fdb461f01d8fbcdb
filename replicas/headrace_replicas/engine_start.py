"""The start of an engine process: may it start now, on which device, and who watches it.

Ray Serve starts a replica again as soon as the last one is stopping, for ever and without a pause.
So a start waits here: until a device is free (its last process is really gone), until the fates of
the engines before it allow another one, and until their memory has come back. Who waits too long
gives up with an error, so that Ray Serve's status shows why and may place the replica elsewhere.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import HostBusyError, HostQuarantinedError
from headrace_replicas.contract.fleet import HostReported, HostState
from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.device_claim import DeviceClaim, HeldDevice, device_folder, try_hold
from headrace_replicas.flight_file import FlightFile
from headrace_replicas.gpu_neighbours import Neighbours, neighbours_here
from headrace_replicas.host_files import FaultWindowFile, HostQuarantine, QuarantineFile
from headrace_replicas.host_memory import MemoryReader, read_memory
from headrace_replicas.host_record import StartsFile
from headrace_replicas.last_words import LastWords
from headrace_replicas.origin import Origin
from headrace_replicas.start_gate import (
    MemoryReading,
    PastStart,
    Quarantine,
    Start,
    StartDecision,
    Wait,
    decide_memory,
    decide_start,
)
from headrace_replicas.watchdog_process import Watchdog, dump_stacks_to

# Who is held for longer gives up. Ray Serve tries again at once, so that this is its pause, too.
_HELD_S: Final = 30.0
# A process that holds the device may need Ray Serve's three missed checks and its grace to end.
_BUSY_S: Final = 60.0
_LOOK_S: Final = 0.2
# Reports are lost when no controller listens, so that they are sent again.
_TELL_AGAIN_S: Final = 5.0


MissingBytes = Callable[[int, int], int]


def _nothing_missing(_device: int, _generation: int) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlace:
    """Where an engine is to start.

    Attributes:
        state_dir: The host's state folder.
        host: The host's label.
        devices: Devices of the host.
        settings: When it may start.
        boot_id: Of the host's boot.
        node_id: Of the Ray node.
    """

    state_dir: Path
    host: str
    devices: int
    settings: FaultSettings
    boot_id: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What an engine process has once it may start.

    Attributes:
        claim: Its device.
        recorder: Takes its notes.
        window: The host's faults.
        neighbours: Tells who else uses the GPU.
        watchdog: Watches it from a process of its own.
        report: What the controller was told of it.
    """

    claim: DeviceClaim
    recorder: FlightFile
    window: FaultWindowFile
    neighbours: Neighbours
    watchdog: Watchdog
    report: HostReported
    _starts: StartsFile

    @property
    def predecessor(self) -> LastWords | None:
        """What the engine before it on its device left; None when it is the first."""
        return self.recorder.predecessor

    @property
    def origin(self) -> Origin:
        """What of this the engine needs."""
        return Origin(
            recorder=self.recorder,
            windows=self.window,
            predecessor=self.report.predecessor,
            predecessor_generation=self.report.predecessor_generation,
            neighbours=self.neighbours.look,
        )

    def holds(self, held_bytes: int) -> None:
        """Note what the engine takes of the host's memory, for the start after it."""
        self._starts.held(self.claim.generation, held_bytes)


def _story_of(words: LastWords | None) -> str:
    """How a process ended, for a person; empty without one and for ends in order."""
    return "" if words is None or words.orderly else words.story()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Why no engine starts now: the host as it is reported, and whether only others are in the way.

    A busy device is nothing to report: its engine lives, or is still ending.
    """

    report: HostReported
    busy: bool = False


def begin_start(
    place: StartPlace,
    *,
    clock: Clock,
    tell: Callable[[HostReported], None],
    memory: MemoryReader = read_memory,
    missing_bytes: MissingBytes = _nothing_missing,
    draw: Callable[[], float] = random.random,
    sleep: Callable[[float], None] = time.sleep,
) -> EngineStart:
    """Wait until an engine may start in this process, and set up all that outlives it.

    Args:
        place: Where.
        clock: Time source.
        tell: Takes reports to the controller; must neither block nor raise.
        memory: How much the host has left.
        missing_bytes: Memory that seems not to have come back on a device, for an engine of a
            generation: where faults are injected.
        draw: 0 to 1, for pauses that differ between hosts.
        sleep: Waits for so many seconds.

    Raises:
        HostBusyError: No device is free, or none may be used yet.
        HostQuarantinedError: The host is quarantined.
        MemoryPlanError: The system does not tell its memory.
        OSError: The state folder cannot be written.
    """
    gate = _Gate(place, clock, partial(_reading, memory, missing_bytes), draw())
    teller = _Teller(tell, clock)
    began_s = clock.monotonic_s()
    while True:
        held = gate.look()
        if isinstance(held, EngineStart):
            teller.tell(held.report)
            return held
        if not held.busy:
            teller.tell(held.report)
        if clock.monotonic_s() - began_s >= (_BUSY_S if held.busy else _HELD_S):
            raise _error(held.report)
        sleep(_LOOK_S)


def _reading(memory: MemoryReader, missing: MissingBytes, held: HeldDevice) -> MemoryReading:
    real, missing_bytes = memory(), missing(held.device, held.next_generation)
    wired_bytes = real.wired_bytes
    return MemoryReading(
        available_bytes=real.available_bytes - missing_bytes,
        wired_bytes=None if wired_bytes is None else wired_bytes + missing_bytes,
    )


class _Gate:
    """Looks whether a start is possible, and takes it when it is."""

    def __init__(
        self,
        place: StartPlace,
        clock: Clock,
        memory: Callable[[HeldDevice], MemoryReading],
        draw: float,
    ) -> None:
        self._place = place
        self._clock = clock
        self._memory = memory
        self._draw = draw
        self._quarantine = QuarantineFile(place.state_dir, place.host)

    def look(self) -> EngineStart | _Held:
        """Start on the first device that allows it, or tell why none does."""
        quarantine = self._standing()
        if quarantine is not None:
            return quarantine
        waits: list[_Held] = []
        for device in range(self._place.devices):
            held = try_hold(self._place.state_dir, self._place.host, device)
            if held is None:
                continue
            outcome = self._try_device(held)
            if isinstance(outcome, EngineStart) or outcome.report.state is HostState.QUARANTINED:
                return outcome
            waits.append(outcome)
        return min(waits, key=lambda wait: wait.report.until_s or 0.0, default=self._all_busy())

    def _standing(self) -> _Held | None:
        now_s = self._clock.now_s()
        found = self._quarantine.read(now_s=now_s, boot_id=self._place.boot_id)
        if found is None:
            return None
        return self._held(0, HostState.QUARANTINED, found.reason, found.until_s)

    def _try_device(self, held: HeldDevice) -> EngineStart | _Held:
        starts = StartsFile(held.folder)
        started = False
        try:
            history = starts.settle(
                boot_id=self._place.boot_id,
                node_id=self._place.node_id,
                now_s=self._clock.now_s(),
            )
            decision = self._decide(held, starts, history)
            match decision:
                case Start():
                    begun = self._begin(held, starts)
                    started = True
                    return begun
                case Wait(until_s=until_s, reason=reason):
                    return self._held(held.device, HostState.BACKING_OFF, reason, until_s, history)
                case Quarantine():
                    self._impose(decision)
                    return self._held(
                        held.device,
                        HostState.QUARANTINED,
                        decision.reason,
                        decision.until_s,
                        history,
                    )
        finally:
            if not started:
                held.let_go()

    def _decide(
        self, held: HeldDevice, starts: StartsFile, history: tuple[PastStart, ...]
    ) -> StartDecision:
        place, now_s = self._place, self._clock.now_s()
        decision = decide_start(
            history, now_s=now_s, boot_id=place.boot_id, settings=place.settings, draw=self._draw
        )
        if not isinstance(decision, Start):
            return decision
        returned = decide_memory(
            history,
            self._memory(held),
            need_bytes=None,
            now_s=now_s,
            boot_id=place.boot_id,
            settings=place.settings,
        )
        if isinstance(returned, Wait) and history[-1].stranded_s is None:
            starts.stranded(history[-1].generation, now_s)
        return decision if isinstance(returned, Start) else returned

    def _begin(self, held: HeldDevice, starts: StartsFile) -> EngineStart:
        place, memory = self._place, self._memory(held)
        claim = held.claim()
        starts.started(
            PastStart(
                generation=claim.generation,
                at_s=self._clock.now_s(),
                pid=os.getpid(),
                boot_id=place.boot_id,
                node_id=place.node_id,
                memory=memory,
            )
        )
        recorder = FlightFile(
            held.folder, generation=claim.generation, boot_id=place.boot_id, clock=self._clock
        )
        dump_stacks_to(held.folder, claim.generation)
        return EngineStart(
            claim=claim,
            recorder=recorder,
            window=FaultWindowFile(
                place.state_dir, place.host, length_s=place.settings.timeout_window_s
            ),
            neighbours=neighbours_here(self._clock),
            watchdog=Watchdog(recorder.path, place.settings),
            report=self._usable(claim, recorder.predecessor),
            _starts=starts,
        )

    def _usable(self, claim: DeviceClaim, before: LastWords | None) -> HostReported:
        return HostReported(
            host=self._place.host,
            device=claim.device,
            generation=claim.generation,
            state=HostState.USABLE,
            predecessor=_story_of(before),
            predecessor_generation=0 if before is None else before.generation,
            at_s=self._clock.now_s(),
        )

    def _impose(self, decision: Quarantine) -> None:
        self._quarantine.impose(
            HostQuarantine(
                reason=decision.reason,
                since_s=self._clock.now_s(),
                until_s=decision.until_s,
                boot_id=self._place.boot_id,
            )
        )

    def _all_busy(self) -> _Held:
        folder = device_folder(self._place.state_dir, self._place.host, 0).parent
        reason = (
            f"all {self._place.devices} devices of host {self._place.host} are held by other "
            f"engine processes; their ids are in {folder}/*/engine.lock"
        )
        return replace(self._held(0, HostState.BACKING_OFF, reason, None), busy=True)

    def _held(
        self,
        device: int,
        state: HostState,
        reason: str,
        until_s: float | None,
        history: tuple[PastStart, ...] = (),
    ) -> _Held:
        last = history[-1] if history else None
        ending = None if last is None else last.ending
        return _Held(
            report=HostReported(
                host=self._place.host,
                device=device,
                generation=0,
                state=state,
                reason=reason,
                until_s=until_s,
                predecessor="" if ending is None or ending.orderly else ending.text,
                predecessor_generation=0 if last is None else last.generation,
                at_s=self._clock.now_s(),
            )
        )


class _Teller:
    """Reports what is new at once, and what is not now and then."""

    def __init__(self, tell: Callable[[HostReported], None], clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._told: HostReported | None = None

    def tell(self, report: HostReported) -> None:
        told = self._told
        is_old = told is not None and replace(told, at_s=report.at_s) == report
        if told is not None and is_old and report.at_s - told.at_s < _TELL_AGAIN_S:
            return
        self._told = report
        self._tell(report)


def _error(report: HostReported) -> HostBusyError | HostQuarantinedError:
    where = f"host {report.host}, device {report.device}"
    if report.state is HostState.QUARANTINED:
        return HostQuarantinedError(
            f"host {report.host} is quarantined: {report.reason}. `headrace hosts release "
            f"{report.host}` on that host ends it without a reboot"
        )
    if report.until_s is None:
        return HostBusyError(report.reason)
    return HostBusyError(
        f"{where} may not be used for another {max(0.0, report.until_s - report.at_s):.0f} s: "
        f"{report.reason}. `headrace hosts release {report.host}` on that host ends the wait"
    )
