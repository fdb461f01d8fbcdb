"""Faults of an engine, as every part of the fleet speaks of them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

STOPPED: Final = "the engine was stopped"
"""What an engine that ends in order says to the requests that it gives up."""

NEVER_BEGUN: Final = "the engine had not begun with it"
"""How an engine begins what it says to requests that waited when it failed, and had done nothing
for them."""


class FaultKind(StrEnum):
    """What went wrong in an engine.

    Those of Metal are named as Metal names them (`MTLCommandBufferError`, in snake case).
    """

    TIMEOUT = "timeout"
    IMPACTING_INTERACTIVITY = "impacting_interactivity"
    HANG = "hang"
    SUBMISSIONS_IGNORED = "submissions_ignored"
    INNOCENT_VICTIM = "innocent_victim"
    OUT_OF_MEMORY = "out_of_memory"
    INVALID_RESOURCE = "invalid_resource"
    INVALID_INPUT = "invalid_input"
    PAGE_FAULT = "page_fault"
    PROTECTION_VIOLATION = "protection_violation"
    STACK_OVERFLOW = "stack_overflow"
    UNKNOWN_METAL = "unknown_metal"
    RESOURCE_LIMIT = "resource_limit"
    ABORTED = "aborted"
    KILLED = "killed"
    EXITED = "exited"
    NO_PROGRESS = "no_progress"
    NOT_FINITE = "not_finite"
    REPEATED_TOKEN = "repeated_token"  # noqa: S105  a language model's token
    OTHER = "other"


class FaultScope(StrEnum):
    """How far a fault reaches."""

    REQUEST = "request"
    PROCESS = "process"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """One fault, as the engine that had it tells it.

    Attributes:
        kind: What it was.
        raw_text: The exception's or the process's own words, unchanged.
        phase: What the engine was doing: load, prefill, decode, probe, idle.
        in_flight: Requests that were running.
        gpu_work_done_before: Whether this process ever completed work on its device. A process
            that never did may be well on a host that is not.
        at_s: Wall-clock second.
    """

    kind: FaultKind
    raw_text: str
    phase: str
    in_flight: int
    gpu_work_done_before: bool
    at_s: float
