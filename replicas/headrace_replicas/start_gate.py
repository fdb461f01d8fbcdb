"""Whether an engine may be started on a device now; pure.

Laws: after a death there is a pause, which grows with each death in a row and never beyond
`back_off_max_s` (but takes a minute at least after the host itself went down); a run longer than
`breaker_window_s` begins a new row. `breaker_deaths` deaths
within the window hold the device for `breaker_hold_s`, and after that each single start is a trial:
its death holds again. Three processes in a row that Metal refused before it ever did any work for
them quarantine the host; there is no fourth start in that boot. Ends in order are no deaths.
A stamp from the future proves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.contract.settings import FaultSettings

_POISONED_STARTS: Final = 3
# 2 ** 30 times any pause is beyond every maximum.
_MOST_DOUBLINGS: Final = 30
# A host that went down under an engine may do so again: a minute lets the fleet settle first.
_HOST_DOWN_PAUSE_S: Final = 60.0
# Clocks of one host are set back by less.
_SKEW_S: Final = 60.0
# An engine leaves a part of what it held to the page cache and to others: that is no loss.
_STRANDED_RATIO: Final = 0.25
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """A host's memory at one moment.

    Attributes:
        available_bytes: What processes can get.
        wired_bytes: What nothing can page out, where the system tells (macOS); else None.
    """

    available_bytes: int
    wired_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an engine process ended.

    Attributes:
        at_s: Wall-clock second of its last sign of life.
        kind: What ended it; None when it left in order.
        worked: Whether its device had completed work.
        lived_s: From its start to its last sign of life.
        host_down: Whether the host went down under it.
        text: For a person.
    """

    at_s: float
    kind: FaultKind | None
    worked: bool
    lived_s: float
    host_down: bool = False
    text: str = ""

    @property
    def orderly(self) -> bool:
        """Whether it left in order."""
        return self.kind is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastStart:
    """One engine that was started on a device.

    Attributes:
        generation: Of the engine.
        at_s: Wall-clock second.
        pid: Of its process.
        boot_id: Of the host's boot.
        node_id: Of the Ray node that started it; a node that is started again has another one.
        memory: The host's before it; None when it was not read.
        held_bytes: What the engine took of it, by its plan; 0 when it never got that far.
        stranded_s: Since when its memory is missed; None when it is not.
        ending: How it ended; None while it runs.
    """

    generation: int
    at_s: float
    pid: int
    boot_id: str
    node_id: str = ""
    memory: MemoryReading | None = None
    held_bytes: int = 0
    stranded_s: float | None = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """It may start; as a trial when the breaker has held the device."""

    trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """It may not start before a wall-clock second."""

    until_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Nothing may start on this host until then, or until a reboot or an operator with None."""

    reason: str
    until_s: float | None = None


StartDecision = Start | Wait | Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deaths:
    """What the deaths of a device add up to.

    Attributes:
        in_row: Deaths since the last long run.
        recent_s: When those were that are close enough to count for the breaker.
        held_until_s: Until when the breaker holds; None while it does not.
        last: The newest.
    """

    in_row: int = 0
    recent_s: tuple[float, ...] = ()
    held_until_s: float | None = None
    last: Ending | None = None


def decide_start(
    history: Sequence[PastStart],
    *,
    now_s: float,
    boot_id: str,
    settings: FaultSettings,
    draw: float,
) -> StartDecision:
    """Whether an engine may start, as far as the fates of those before it tell.

    Args:
        history: The device's starts, oldest first; all have ended.
        now_s: Wall-clock second.
        boot_id: Of the host's boot.
        settings: Back-off and breaker.
        draw: 0 to 1, the same for all looks between two starts: takes up to half off a pause, so
            that hosts that lost their engines together do not start together.
    """
    if _poisoned_births(history, boot_id) >= _POISONED_STARTS:
        return Quarantine(
            reason=f"Metal refused {_POISONED_STARTS} fresh engine processes in a row before the "
            "GPU had done any work for them: reboot this host, nothing else helps"
        )
    deaths = _deaths(history, boot_id, now_s, settings)
    if deaths.last is None:
        return Start()
    pause_until_s = deaths.last.at_s + _pause_s(deaths, settings, draw)
    held_until_s = deaths.held_until_s
    if held_until_s is not None and now_s < held_until_s:
        return Wait(
            until_s=max(held_until_s, pause_until_s),
            reason=f"{deaths.in_row} engines in a row died on this device: held for "
            f"{settings.breaker_hold_s:.0f} s, then one start is tried. The last one: "
            f"{_told(deaths.last)}",
        )
    if now_s < pause_until_s:
        return Wait(
            until_s=pause_until_s,
            reason=f"pause after {_deaths_in_row(deaths.in_row)} on this device. The last one: "
            f"{_told(deaths.last)}",
        )
    return Start(trial=held_until_s is not None)


def _poisoned_births(history: Sequence[PastStart], boot_id: str) -> int:
    """The newest processes in a row that Metal refused from their birth, in this boot."""
    count = 0
    for start in reversed(history):
        ending = start.ending
        if ending is None or (ending.orderly and not ending.worked):
            continue  # says nothing about the device
        if start.boot_id != boot_id or not _is_poisoned(ending):
            break
        count += 1
    return count


def _is_poisoned(ending: Ending) -> bool:
    return ending.kind is FaultKind.SUBMISSIONS_IGNORED and not ending.worked


def _deaths(
    history: Sequence[PastStart], boot_id: str, now_s: float, settings: FaultSettings
) -> _Deaths:
    found = _Deaths()
    for start in history:
        ending = start.ending
        if ending is None:
            continue
        if ending.lived_s > settings.breaker_window_s:
            found = _Deaths()
        cured = _is_poisoned(ending) and start.boot_id != boot_id
        if not ending.orderly and not cured and ending.at_s < now_s + _SKEW_S:
            found = _with_death(found, ending, settings)
    return found


def _with_death(found: _Deaths, ending: Ending, settings: FaultSettings) -> _Deaths:
    begins_s = ending.at_s - settings.breaker_window_s
    recent_s = (*(at_s for at_s in found.recent_s if at_s > begins_s), ending.at_s)
    breaks = found.held_until_s is not None or len(recent_s) >= settings.breaker_deaths
    return _Deaths(
        in_row=found.in_row + 1,
        recent_s=recent_s,
        held_until_s=ending.at_s + settings.breaker_hold_s if breaks else None,
        last=ending,
    )


def _pause_s(deaths: _Deaths, settings: FaultSettings, draw: float) -> float:
    doublings = min(deaths.in_row - 1, _MOST_DOUBLINGS)
    doubled_s = settings.back_off_s * float(2**doublings)
    pause_s = min(settings.back_off_max_s, doubled_s) * (1 - draw / 2)
    host_down = deaths.last is not None and deaths.last.host_down
    return max(pause_s, _HOST_DOWN_PAUSE_S) if host_down else pause_s


def _deaths_in_row(count: int) -> str:
    return "the death of an engine" if count == 1 else f"{count} deaths in a row"


def _told(ending: Ending) -> str:
    return ending.text or f"{ending.kind}"


def decide_memory(
    history: Sequence[PastStart],
    reading: MemoryReading,
    *,
    need_bytes: int | None,
    now_s: float,
    boot_id: str,
    settings: FaultSettings,
) -> StartDecision:
    """Whether the memory of the last engine has come back, or there is enough without it.

    Args:
        history: As for `decide_start`.
        reading: The host's memory now.
        need_bytes: What the coming engine takes; None takes what the last one held.
        now_s: Wall-clock second.
        boot_id: Of the host's boot.
        settings: How long it is waited for.
    """
    last = history[-1] if history else None
    if last is None or last.memory is None or last.boot_id != boot_id:
        return Start()
    held_bytes = next((one.held_bytes for one in reversed(history) if one.held_bytes), 0)
    missing_bytes = _missing_bytes(last.memory, reading)
    need_bytes = held_bytes if need_bytes is None else need_bytes
    if missing_bytes <= held_bytes * _STRANDED_RATIO or reading.available_bytes >= need_bytes:
        return Start()
    why = (
        f"{missing_bytes / _GIB:.1f} GiB of the last engine's {held_bytes / _GIB:.1f} GiB have not "
        f"come back, and {reading.available_bytes / _GIB:.1f} GiB are available where "
        f"{need_bytes / _GIB:.1f} are needed"
    )
    until_s = (now_s if last.stranded_s is None else last.stranded_s) + settings.memory_wait_s
    if now_s < until_s:
        return Wait(until_s=until_s, reason=f"waiting for memory: {why}")
    return Quarantine(reason=f"memory is stranded: {why}. Reboot this host, nothing else helps")


def _missing_bytes(before: MemoryReading, now: MemoryReading) -> int:
    if before.wired_bytes is not None and now.wired_bytes is not None:
        return now.wired_bytes - before.wired_bytes
    return before.available_bytes - now.available_bytes
