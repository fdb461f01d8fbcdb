"""What became of the engines of a device: `starts.jsonl` in its folder.

Each line is one event: a start, what the engine holds, that its memory is missed, how it ended, or
that an operator forgave all that was before. Lines that nobody understands are passed over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.faults import classify
from headrace_replicas.json_lines import JsonLines
from headrace_replicas.last_words import NAME, LastWords, read_last_words
from headrace_replicas.start_gate import Ending, MemoryReading, PastStart

_SHOWN_STARTS: Final = 64


class StartsFile:
    """The starts of one device.

    Args:
        folder: The device's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = JsonLines(path=folder / "starts.jsonl")

    def history(self) -> tuple[PastStart, ...]:
        """The newest starts, oldest first, without those before the last release."""
        return history_in(self._lines.read())

    def started(self, start: PastStart) -> None:
        """Note a start; raises OSError when the disk does not take it, as all that follow."""
        memory = None if start.memory is None else asdict(start.memory)
        self._append(
            "start",
            generation=start.generation,
            at_s=start.at_s,
            pid=start.pid,
            boot_id=start.boot_id,
            node_id=start.node_id,
            memory=memory,
        )

    def held(self, generation: int, held_bytes: int) -> None:
        """Note what an engine takes of the host's memory."""
        self._append("held", generation=generation, held_bytes=held_bytes)

    def stranded(self, generation: int, at_s: float) -> None:
        """Note since when the memory of an engine is missed."""
        self._append("stranded", generation=generation, stranded_s=at_s)

    def released(self, at_s: float) -> None:
        """Note that an operator forgives all that was before."""
        self._append("released", at_s=at_s)

    def settle(self, *, boot_id: str, node_id: str, now_s: float) -> tuple[PastStart, ...]:
        """Note how the last engine ended, if that is not known yet.

        Only for who holds the device: its last engine's process is gone then.

        Args:
            boot_id: Of the host's boot.
            node_id: Of the Ray node that this process belongs to.
            now_s: Wall-clock second.

        Returns:
            The history with it.
        """
        history = self.history()
        if not history or history[-1].ending is not None:
            return history
        last = history[-1]
        words = read_last_words(self._folder / NAME)
        ending = ending_of(last, words, boot_id=boot_id, node_id=node_id, now_s=now_s)
        self._append("end", generation=last.generation, ending=asdict(ending))
        return (*history[:-1], replace(last, ending=ending))

    def _append(self, event: str, **fields: object) -> None:
        self._lines.append({"event": event, **fields})


def ending_of(
    start: PastStart, words: LastWords | None, *, boot_id: str, node_id: str, now_s: float
) -> Ending:
    """How an engine ended, as its last words tell.

    One that had no trouble of its own when its Ray node was stopped is no death: that is how
    operators stop engines. One whose host went down is.

    Args:
        start: Its start.
        words: What was found; they may be another's.
        boot_id: Of the host's boot now.
        node_id: Of the Ray node now.
        now_s: Wall-clock second.
    """
    host_down = start.boot_id != boot_id
    if words is None or (words.pid, words.generation) != (start.pid, start.generation):
        return Ending(
            at_s=now_s,
            kind=FaultKind.EXITED,
            worked=False,
            lived_s=0.0,
            host_down=host_down,
            text=f"Process {start.pid} (generation {start.generation}) ended before it took notes.",
        )
    kind = kind_of(words)
    with_node = kind is FaultKind.KILLED and not host_down and start.node_id != node_id
    went_down = host_down and words.ended is None
    return Ending(
        at_s=words.started_s + words.lived_s if words.verdict is None else words.verdict.at_s,
        kind=None if with_node else kind,
        worked=words.worked or (words.fault is not None and words.fault.gpu_work_done_before),
        lived_s=words.lived_s,
        host_down=went_down,
        text=words.story() + _circumstance(with_node=with_node, went_down=went_down),
    )


def _circumstance(*, with_node: bool, went_down: bool) -> str:
    if with_node:
        return " Its Ray node was stopped."
    return " The host went down under it." if went_down else ""


def kind_of(words: LastWords) -> FaultKind | None:
    """What ended a process; None when it left in order."""
    if words.orderly:
        return None
    if words.ended is None and words.verdict is not None:
        return FaultKind.NO_PROGRESS
    if words.ended is None and words.crash:
        told = classify(words.crash_text)
        return FaultKind.ABORTED if told is FaultKind.OTHER else told
    if words.fatal_fault is not None:
        return words.fatal_fault.kind
    return FaultKind.KILLED if words.ended is None else FaultKind.EXITED


def history_in(events: Iterable[Mapping[str, Any]]) -> tuple[PastStart, ...]:
    """The starts that events tell of, oldest first."""
    starts: list[PastStart] = []
    for event in events:
        try:
            _take(starts, event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return tuple(starts[-_SHOWN_STARTS:])


def _take(starts: list[PastStart], event: Mapping[str, Any]) -> None:
    match event["event"]:
        case "start":
            starts.append(_start_of(event))
        case "released":
            starts.clear()
        case "held":
            _change(starts, event, held_bytes=int(event["held_bytes"]))
        case "stranded":
            _change(starts, event, stranded_s=float(event["stranded_s"]))
        case "end":
            _change(starts, event, ending=_ending_of(event["ending"]))
        case _:
            pass  # of a newer version


def _change(starts: list[PastStart], event: Mapping[str, Any], **changes: Any) -> None:
    # Only the last engine can have news; a counter that began again has the same numbers twice.
    if starts and starts[-1].generation == event["generation"]:
        starts[-1] = replace(starts[-1], **changes)


def _start_of(event: Mapping[str, Any]) -> PastStart:
    memory = event.get("memory")
    return PastStart(
        generation=int(event["generation"]),
        at_s=float(event["at_s"]),
        pid=int(event["pid"]),
        boot_id=str(event["boot_id"]),
        node_id=str(event.get("node_id", "")),
        memory=None if memory is None else _memory_of(memory),
    )


def _memory_of(record: Mapping[str, Any]) -> MemoryReading:
    wired = record.get("wired_bytes")
    return MemoryReading(
        available_bytes=int(record["available_bytes"]),
        wired_bytes=None if wired is None else int(wired),
    )


def _ending_of(record: Mapping[str, Any]) -> Ending:
    kind = record["kind"]
    return Ending(
        at_s=float(record["at_s"]),
        kind=None if kind is None else FaultKind(kind),
        worked=bool(record["worked"]),
        lived_s=float(record["lived_s"]),
        host_down=bool(record["host_down"]),
        text=str(record["text"]),
    )
