"""Injects a plan's faults of the device where MLX is asked to compute or to wait.

Armed, it stands before every function of MLX that evaluates, waits or gives memory back, for the
whole process. What it raises has the type, the words and the habits of the real thing: the error
comes once, perhaps one call late; what the failed call computed reads as garbage; once the driver
ignores a process, every call of it fails. The error itself comes through MLX's own path for errors,
by an operation that fails there.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from headrace_replicas.engine.backend import mx
from headrace_replicas.injection.driver import Driver
from headrace_replicas.injection.plan import (
    Abort,
    AnyDeviceFault,
    DeviceError,
    Exit,
    Hang,
    MetalError,
    SlowDevice,
    WrongOutput,
)
from headrace_replicas.injection.strikes import FaultCount, draw_of, strike

log = logging.getLogger("ray.serve.headrace.injection")

_FUNCTIONS: Final = ("eval", "async_eval", "synchronize", "clear_cache")
_METHODS: Final = ("item", "tolist")
_COMPUTING: Final = ("eval", "async_eval")
# Strikes of a fault that are logged one by one.
_TOLD: Final = 20

# As MLX 0.32 wraps what macOS says.
_PREFIX: Final = "[METAL] Command buffer execution failed: "
_WORDS: Final[dict[MetalError, str]] = {
    "timeout": "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
    "impacting_interactivity": "Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
    "hang": "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
    "submissions_ignored": "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).",
    "innocent_victim": "Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
    "out_of_memory": "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
    "invalid_resource": "Invalid Resource "
    "(00000009:kIOGPUCommandBufferCallbackErrorInvalidResource).",
    "invalid_input": "Invalid Input (0000000a:kIOGPUCommandBufferCallbackErrorInvalidInput).",
    "page_fault": "Caused GPU Address Fault Error "
    "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
    "protection_violation": "Protection Violation "
    "(00000010:kIOGPUCommandBufferCallbackErrorProtectionViolation).",
    "stack_overflow": "Stack Overflow (00000011:kIOGPUCommandBufferCallbackErrorStackOverflow).",
}


def words_of(error: MetalError) -> str:
    """The text of an error, as a RuntimeError carries it."""
    return _PREFIX + _WORDS[error]


@dataclass(slots=True)
class _Armed:
    number: int
    fault: AnyDeviceFault
    count: FaultCount = field(default_factory=FaultCount)


class FaultyDevice:
    """Stands before MLX's calls to the device.

    Args:
        faults: Those that are meant for this engine, by their number in the plan.
        seed: The plan's.
        driver: Remembers the host's timeouts.
        sleep: Waits for so many seconds.
        end_process: Ends the process with a status, at once.
    """

    def __init__(
        self,
        faults: Sequence[tuple[int, AnyDeviceFault]],
        *,
        seed: int,
        driver: Driver,
        sleep: Callable[[float], object],
        end_process: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._faults = [_Armed(number, fault) for number, fault in faults]
        self._seed = seed
        self._driver = driver
        self._sleep = sleep
        self._end_process = end_process
        self._lock = threading.Lock()
        self._is_ignored = False
        self._late: str = ""
        self._originals: list[tuple[Any, str, Any]] = []

    def stand_before(self) -> None:
        """Take the place of MLX's functions, until `step_aside`."""
        for owner, names in ((mx, _FUNCTIONS), (mx.array, _METHODS)):
            for name in names:
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, self._guarded(original, computes=name in _COMPUTING))

    def step_aside(self) -> None:
        """Give MLX its functions back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def _guarded(self, original: Callable[..., Any], *, computes: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._before(args, computes=computes)
            return original(*args, **options)

        return call

    def _before(self, arguments: Sequence[Any], *, computes: bool) -> None:
        if self._is_ignored:
            self._fail(words_of("submissions_ignored"))
        if self._late:
            text, self._late = self._late, ""
            self._fail(text)
        for armed, number in self._struck(computes=computes):
            if number <= _TOLD:
                log.warning("injected: %s", armed.fault)
            self._suffer(armed.fault, arguments)

    def _struck(self, *, computes: bool) -> list[tuple[_Armed, int]]:
        """The faults that strike this call, and how many times each has struck by now.

        A call that only reads what is there already has no output that could be wrong.
        """
        found: list[tuple[_Armed, int]] = []
        with self._lock:
            for armed in self._faults:
                if not armed.fault.is_there:
                    continue
                if isinstance(armed.fault, WrongOutput) and not computes:
                    continue
                draw = draw_of(self._seed, armed.number, armed.count.occasions + 1)
                armed.count, struck = strike(armed.fault, armed.count, draw=draw)
                if struck:
                    found.append((armed, armed.count.strikes))
        return found

    def _suffer(self, fault: AnyDeviceFault, arguments: Sequence[Any]) -> None:
        match fault:
            case DeviceError():
                self._error(fault, arguments)
            case Abort(error=error, stall_s=stall_s):
                self._sleep(stall_s)
                _abort(words_of(error))
            case Exit(status=status):
                self._end_process(status)
            case Hang(holds_gil=holds_gil, for_s=for_s):
                self._hang(holds_gil=holds_gil, for_s=for_s)
            case SlowDevice(delay_s=delay_s):
                self._sleep(delay_s)
            case WrongOutput(form=form):
                _spoil(arguments, form)

    def _error(self, fault: DeviceError, arguments: Sequence[Any]) -> None:
        self._sleep(fault.stall_s)
        text = fault.text or words_of(fault.error)
        if fault.error == "submissions_ignored" and not fault.text:
            self._is_ignored = True
        if fault.error == "timeout" and self._driver.timed_out():
            self._is_ignored = True
        _spoil(arguments, "zeros")
        if fault.late:
            self._late = text
            return
        self._fail(text)

    def _fail(self, text: str) -> NoReturn:
        """Raise through MLX's own path for errors."""
        real_eval = next(found for _, name, found in self._originals if name == "eval")
        singular = mx.array([[1.0, 2.0], [2.0, 4.0]])
        try:
            real_eval(mx.linalg.inv(singular, stream=mx.cpu))
        except RuntimeError:
            raise RuntimeError(text) from None
        raise RuntimeError(text)

    def _hang(self, *, holds_gil: bool, for_s: float | None) -> None:
        # A day is never for a watchdog.
        seconds = for_s or 86_400.0
        if not holds_gil:
            self._sleep(seconds)
            return
        # PyDLL keeps Python's lock while the C function runs.
        ctypes.PyDLL(None).usleep(int(min(seconds, 4000.0) * 1e6))


def _abort(text: str) -> NoReturn:
    line = f"libc++abi: terminating due to uncaught exception of type std::runtime_error: {text}\n"
    # As C++ does: whatever Python has put in the place of its own stderr, it does not pass there.
    os.write(2, line.encode())
    os.abort()


def _arrays(arguments: Any) -> Iterator[mx.array]:
    if isinstance(arguments, mx.array):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _arrays(list(arguments.values()))
    elif isinstance(arguments, (list, tuple)):
        for one in arguments:
            yield from _arrays(one)


def _spoil(arguments: Sequence[Any], form: str) -> None:
    """Overwrite what a call is about to compute."""
    for array in _arrays(list(arguments)):
        is_float = mx.issubdtype(array.dtype, mx.floating)
        if form == "nan" and is_float:
            array[...] = float("nan")
        elif form == "garbage" and not is_float:
            # Neighbours of the right tokens are tokens too.
            array[...] = mx.where(array > 0, array - 1, array)
        elif form == "zeros" and array.dtype != mx.bool_:
            array[...] = 0
