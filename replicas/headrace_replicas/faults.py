"""From the words of a fault to its kind, and from its kind to what must be done; pure.

Metal's faults reach Python as text only: MLX wraps `NSError`'s description in a RuntimeError, or
the process aborts with it on stderr. The wording drifts between systems, so what is matched is the
name of the error at the end of its constant, then its words, then its code, in any case of
letters: `kIOGPUCommandBufferCallbackErrorTimeout`, `kIOAccelCommandBufferCallbackErrorTimeout`,
`Caused GPU Timeout Error`, `(IOAF code 2)` and `(00000002:...)` are one fault.

Laws: the same text gives the same kind, whatever its case and spacing. Of several faults in one
text the gravest counts. A Metal error of unknown name is `UNKNOWN_METAL`, never `OTHER`. A terminal
kind is never answered with anything but the end of the process. More faults in the window never
give a milder answer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from signal import Signals
from typing import Final

from headrace_replicas.contract.faults import FaultKind, FaultScope

# MTLCommandBufferError and the names that IOGPUFamily gives its codes, seen in public traces.
_NAMES: Final = {
    "timeout": FaultKind.TIMEOUT,
    "impactinginteractivity": FaultKind.IMPACTING_INTERACTIVITY,
    "hang": FaultKind.HANG,
    "submissionsignored": FaultKind.SUBMISSIONS_IGNORED,
    "innocentvictim": FaultKind.INNOCENT_VICTIM,
    "outofmemory": FaultKind.OUT_OF_MEMORY,
    "invalidresource": FaultKind.INVALID_RESOURCE,
    "invalidinput": FaultKind.INVALID_INPUT,
    "pagefault": FaultKind.PAGE_FAULT,
    "protectionviolation": FaultKind.PROTECTION_VIOLATION,
    "stackoverflow": FaultKind.STACK_OVERFLOW,
}
_WORDS: Final = {
    "caused gpu timeout error": FaultKind.TIMEOUT,
    "impacting interactivity": FaultKind.IMPACTING_INTERACTIVITY,
    "caused gpu hang error": FaultKind.HANG,
    "for causing prior/excessive gpu errors": FaultKind.SUBMISSIONS_IGNORED,
    "victim of gpu error/recovery": FaultKind.INNOCENT_VICTIM,
    "insufficient memory": FaultKind.OUT_OF_MEMORY,
    "caused gpu address fault error": FaultKind.PAGE_FAULT,
}
_CODES: Final = {
    0x2: FaultKind.TIMEOUT,
    0x3: FaultKind.HANG,
    0x4: FaultKind.SUBMISSIONS_IGNORED,
    0x5: FaultKind.INNOCENT_VICTIM,
    0x8: FaultKind.OUT_OF_MEMORY,
    0x9: FaultKind.INVALID_RESOURCE,
    0xA: FaultKind.INVALID_INPUT,
    0xB: FaultKind.PAGE_FAULT,
    0xE: FaultKind.IMPACTING_INTERACTIVITY,
    0x10: FaultKind.PROTECTION_VIOLATION,
}
_NAME: Final = re.compile(r"kIO(?:GPU|Accel)CommandBufferCallbackError(\w+)", re.IGNORECASE)
_HEX_CODE: Final = re.compile(r"\(\s*([0-9a-f]{8})\s*[:)]", re.IGNORECASE)
_IOAF_CODE: Final = re.compile(r"\(\s*IOAF\s+code\s+(\d+)\s*\)", re.IGNORECASE)
_METAL: Final = re.compile(r"\[METAL\]|command buffer execution failed", re.IGNORECASE)
# A cache clear does not free what is held live, so these end the process too.
_LIMIT: Final = re.compile(
    r"\[metal::malloc\]\s+(?:Resource limit|Attempting to allocate)|"
    r"\[malloc(?:_or_wait)?\]\s+Unable to allocate",
    re.IGNORECASE,
)
_WRONG_OUTPUT_WORDS: Final = {
    "non-finite logits": FaultKind.NOT_FINITE,
    "degenerate output": FaultKind.REPEATED_TOKEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """What a kind of fault means.

    Attributes:
        advice: What an operator should look at.
        scope: How far it reaches at first sight.
        terminal: The process makes no further call to its device and ends at once.
        budget: Such faults of one host within the window after which the process is replaced:
            1 replaces at the first, 0 never.
        blames_request: The same request at two of them is refused from then on.
    """

    advice: str
    scope: FaultScope = FaultScope.PROCESS
    terminal: bool = False
    budget: int = 1
    blames_request: bool = False


_TIMED_OUT: Final = FaultPolicy(
    advice="Look for a second process that uses the GPU, and for a cold page cache."
)
_BAD_ACCESS: Final = FaultPolicy(
    advice="A kernel read or wrote where it must not: keep the request, and report it to MLX.",
    terminal=True,
    blames_request=True,
)
_PROCESS_GONE: Final = FaultPolicy(
    advice="Read the last words of the process in the host's state folder.",
    terminal=True,
    blames_request=True,
)
_NONSENSE: Final = FaultPolicy(
    advice="The device computed nonsense without an error: verify the checkpoint, then suspect it.",
    blames_request=True,
)

POLICIES: Final[dict[FaultKind, FaultPolicy]] = {
    FaultKind.TIMEOUT: _TIMED_OUT,
    FaultKind.IMPACTING_INTERACTIVITY: _TIMED_OUT,
    FaultKind.HANG: FaultPolicy(
        advice="A kernel did not end: if one request does it again it is refused.",
        terminal=True,
        blames_request=True,
    ),
    FaultKind.SUBMISSIONS_IGNORED: FaultPolicy(
        advice="Metal ignores this process for good. If a fresh process meets it on its first "
        "call, the host must be restarted.",
        terminal=True,
    ),
    FaultKind.INNOCENT_VICTIM: FaultPolicy(
        advice="Another process's fault took this work with it: find out which uses the GPU.",
        scope=FaultScope.REQUEST,
        budget=0,
    ),
    FaultKind.OUT_OF_MEMORY: FaultPolicy(
        advice="Lower engine.max_batch, model.context_tokens or engine.slots.", budget=2
    ),
    FaultKind.INVALID_RESOURCE: _BAD_ACCESS,
    FaultKind.INVALID_INPUT: _BAD_ACCESS,
    FaultKind.PAGE_FAULT: _BAD_ACCESS,
    FaultKind.PROTECTION_VIOLATION: _BAD_ACCESS,
    FaultKind.STACK_OVERFLOW: _BAD_ACCESS,
    FaultKind.UNKNOWN_METAL: FaultPolicy(
        advice="This Metal error is not known here: keep its text and report it.", terminal=True
    ),
    FaultKind.RESOURCE_LIMIT: FaultPolicy(
        advice="The process holds too many or too large buffers: lower engine.max_batch, "
        "model.context_tokens or engine.prefill_chunk_tokens."
    ),
    FaultKind.ABORTED: _PROCESS_GONE,
    FaultKind.KILLED: FaultPolicy(
        advice="Somebody killed the process: the kernel for its memory, the watchdog, or a person.",
        terminal=True,
    ),
    FaultKind.EXITED: _PROCESS_GONE,
    FaultKind.NO_PROGRESS: FaultPolicy(
        advice="A step never ended: the stack dump in the host's state folder says where.",
        terminal=True,
        blames_request=True,
    ),
    FaultKind.NOT_FINITE: _NONSENSE,
    FaultKind.REPEATED_TOKEN: _NONSENSE,
    FaultKind.OTHER: FaultPolicy(
        advice="An error that is not the device's: its text and stack tell where it came from.",
        blames_request=True,
    ),
}

# Of several faults in one text; the first of these that occurs counts.
_GRAVEST_FIRST: Final = (
    FaultKind.SUBMISSIONS_IGNORED,
    FaultKind.PAGE_FAULT,
    FaultKind.INVALID_RESOURCE,
    FaultKind.INVALID_INPUT,
    FaultKind.PROTECTION_VIOLATION,
    FaultKind.STACK_OVERFLOW,
    FaultKind.HANG,
    FaultKind.UNKNOWN_METAL,
    FaultKind.RESOURCE_LIMIT,
    FaultKind.TIMEOUT,
    FaultKind.IMPACTING_INTERACTIVITY,
    FaultKind.OUT_OF_MEMORY,
    FaultKind.INNOCENT_VICTIM,
    FaultKind.NOT_FINITE,
    FaultKind.REPEATED_TOKEN,
)


def classify(text: str) -> FaultKind:
    """The kind of the gravest fault that a text tells of.

    Args:
        text: An exception's text, or the last lines of a process's stderr.
    """
    lines = (" ".join(line.split()) for line in text.splitlines())
    found = {kind for line in lines for kind in _kinds(line)}
    return next((kind for kind in _GRAVEST_FIRST if kind in found), FaultKind.OTHER)


def _kinds(line: str) -> Iterator[FaultKind]:
    """What one line tells: by name, else by words, else by code."""
    if _LIMIT.search(line):
        yield FaultKind.RESOURCE_LIMIT
        return
    wrong = [kind for words, kind in _WRONG_OUTPUT_WORDS.items() if words in line.lower()]
    if wrong:
        yield from wrong
        return
    by_name = [_NAMES.get(name.lower()) for name in _NAME.findall(line)]
    by_words = [kind for phrase, kind in _WORDS.items() if phrase in line.lower()]
    known = [kind for kind in by_name if kind is not None] or by_words
    if known:
        yield from known
        return
    if not (by_name or _METAL.search(line) or _IOAF_CODE.search(line)):
        return
    kinds = [_CODES.get(code, FaultKind.UNKNOWN_METAL) for code in _codes(line)]
    yield from kinds or [FaultKind.UNKNOWN_METAL]


def _codes(line: str) -> list[int]:
    return [
        *(int(code, 16) for code in _HEX_CODE.findall(line)),
        *(int(code) for code in _IOAF_CODE.findall(line)),
    ]


def classify_exit(returncode: int, stderr_tail: str) -> FaultKind:
    """The kind of fault that ended a process.

    An engine never ends by itself, so that an exit with 0 is one too.

    Args:
        returncode: As `subprocess` gives it: the exit status, or minus the signal.
        stderr_tail: The last lines that the process wrote.
    """
    told = classify(stderr_tail)
    if told is not FaultKind.OTHER:
        return told
    signal = -returncode if returncode < 0 else returncode - 128
    if signal == Signals.SIGABRT:
        return FaultKind.ABORTED
    if signal in (Signals.SIGKILL, Signals.SIGTERM):
        return FaultKind.KILLED
    return FaultKind.ABORTED if signal > 0 else FaultKind.EXITED


class FaultAnswer(StrEnum):
    """What an engine does about its fault, mildest first; all requests in flight move anyway."""

    GO_ON = "go_on"
    CANARY = "canary"
    REPLACE = "replace"
    EXIT = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWindow:
    """When a host's engines had which faults, oldest first; it outlives them.

    Attributes:
        faults: (kind, wall-clock second) pairs.
        length_s: Older ones do not count. Public traces show faults of one box 36 and 85 minutes
            apart, the last of which was final.
    """

    faults: tuple[tuple[FaultKind, float], ...] = ()
    length_s: float = 21_600.0

    def with_fault(self, kind: FaultKind, at_s: float) -> "FaultWindow":
        """The window with one more fault, and without those that it has left behind."""
        kept = tuple(pair for pair in self.faults if at_s - pair[1] < self.length_s)
        return FaultWindow(faults=(*kept, (kind, at_s)), length_s=self.length_s)

    def count(self, kinds: Sequence[FaultKind], at_s: float) -> int:
        """Faults of these kinds that still count."""
        return sum(kind in kinds and at_s - when_s < self.length_s for kind, when_s in self.faults)


TIMEOUTS: Final = (FaultKind.TIMEOUT, FaultKind.IMPACTING_INTERACTIVITY)
"""Kinds of a command that took too long; they count together."""


def decide(
    kind: FaultKind, window: FaultWindow, *, at_s: float, timeouts_replace: bool
) -> FaultAnswer:
    """What to do about a fault that the window already holds.

    Args:
        kind: The fault.
        window: The host's faults, this one the newest.
        at_s: Now.
        timeouts_replace: False lets a canary decide after the first timeout of a window.
    """
    policy = POLICIES[kind]
    if policy.terminal:
        return FaultAnswer.EXIT
    if policy.budget == 0:
        return FaultAnswer.GO_ON
    alike = TIMEOUTS if kind in TIMEOUTS else (kind,)
    budget = 2 if kind in TIMEOUTS and not timeouts_replace else policy.budget
    return FaultAnswer.REPLACE if window.count(alike, at_s) >= budget else FaultAnswer.CANARY


_SMALLEST_CHUNK_TOKENS: Final = 32


def careful_chunk_tokens(chunk_tokens: int, *, timeouts: int) -> int:
    """Tokens of a prefill chunk after GPU timeouts: halved for each, but not below 32.

    Args:
        chunk_tokens: Before them.
        timeouts: How many there were.
    """
    smallest = min(chunk_tokens, _SMALLEST_CHUNK_TOKENS)
    return max(smallest, chunk_tokens >> min(timeouts, chunk_tokens.bit_length()))


def timeouts_within(window: FaultWindow, at_s: float) -> int:
    """GPU timeouts of a host that still count."""
    return window.count(TIMEOUTS, at_s)
