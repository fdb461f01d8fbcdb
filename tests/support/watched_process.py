"""A process with a flight record and a watchdog, that hangs in one of several ways.

Run as `python -m tests.support.watched_process FOLDER WAY`; it prints `ready` before it does.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.flight_file import FlightFile
from headrace_replicas.watchdog_process import dump_stacks_to, spawn_watchdog

LIMITS: Final = FaultSettings(
    hang_floor_s=2.0, hang_first_s=2.0, hang_reading_s=600.0, hang_grace_s=0.5
)
_FOR_EVER_S: Final = 3600


def _hang_without_the_lock(recorder: FlightFile) -> None:
    recorder.enter("decode", in_flight=["r1"], detail="step 3")
    time.sleep(_FOR_EVER_S)


def _hang_with_the_lock(recorder: FlightFile) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    recorder.enter("prefill", in_flight=["r1"], detail="chunk 2")
    # A lock that its own thread holds. No signal ends this wait, and `PyDLL` keeps Python's lock.
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _idle(_recorder: FlightFile) -> None:
    time.sleep(_FOR_EVER_S)


def _progress(recorder: FlightFile) -> None:
    recorder.enter("prefill")
    give_up_s = time.monotonic() + 3 * LIMITS.hang_floor_s
    while time.monotonic() < give_up_s:
        recorder.progressed()
        time.sleep(0.05)
    recorder.ended("its work is done", 0)


def _read(recorder: FlightFile) -> None:
    recorder.enter("read")
    time.sleep(3 * LIMITS.hang_floor_s)
    recorder.ended("its work is done", 0)


def _abort(recorder: FlightFile) -> None:
    recorder.worked()
    recorder.enter("decode", in_flight=["r1"])
    sys.stderr.write("libc++abi: terminating due to uncaught exception of type std::runtime_error: "
                     "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
                     "(00000002:kIOGPUCommandBufferCallbackErrorTimeout).\n")  # fmt: skip
    sys.stderr.flush()
    os.abort()


def _kill_itself(recorder: FlightFile) -> None:
    recorder.enter("load", detail="shard 2 of 9")
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_with_a_fault(recorder: FlightFile) -> None:
    text = "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
    recorder.faulted(
        FaultReport(
            kind=FaultKind.SUBMISSIONS_IGNORED,
            raw_text=text,
            phase="load",
            in_flight=0,
            gpu_work_done_before=False,
            at_s=SystemClock().now_s(),
        )
    )
    recorder.ended("a terminal fault", 70)
    os._exit(70)


WAYS: Final[dict[str, Callable[[FlightFile], None]]] = {
    "hang_without_the_lock": _hang_without_the_lock,
    "hang_with_the_lock": _hang_with_the_lock,
    "idle": _idle,
    "progress": _progress,
    "read": _read,
    "abort": _abort,
    "kill_itself": _kill_itself,
    "leave_with_a_fault": _leave_with_a_fault,
}


def main() -> None:
    folder, way = Path(sys.argv[1]), sys.argv[2]
    recorder = FlightFile(folder, generation=1, boot_id="boot-1", clock=SystemClock())
    dump_stacks_to(folder, 1)
    watchdog = spawn_watchdog(recorder.path, LIMITS)
    sys.stdout.write(f"ready {watchdog.pid}\n")
    sys.stdout.flush()
    # A second thread, so that a dump of all stacks shows more than the hung one.
    threading.Thread(target=time.sleep, args=(_FOR_EVER_S,), name="bystander", daemon=True).start()
    WAYS[way](recorder)
    watchdog.wait()


if __name__ == "__main__":
    main()
