"""Tells the fleet's controller how a start goes, while the replica cannot be asked yet.

A constructor must neither wait for the controller nor fail with it, so that reports go out in a
thread, and those that find nobody are dropped: whoever reports does so again.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import ray

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.fleet import HostReported, Notice

log = logging.getLogger("ray.serve.headrace.controller_line")

# The controller is an actor of the gateway's deployment; Ray Serve puts more around its name.
CONTROLLER_NAME: Final = "fleet_controller"
_MOST_WAITING: Final = 100
_CALL_S: Final = 5.0
_LOAD_TOLD_S: Final = 1.0


class ControllerLine:
    """Sends reports in a thread of its own."""

    def __init__(self) -> None:
        self._reports: queue.Queue[HostReported | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(
            target=self._send_all, name="headrace-controller-line", daemon=True
        )
        self._thread.start()

    def tell(self, report: HostReported) -> None:
        """Queue a report; neither waits nor raises."""
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            log.warning("the controller takes no reports; one of %s is dropped", report.host)

    def close(self) -> None:
        """Send what is queued, and nothing more."""
        self._reports.put(None)

    def _send_all(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                _send((report,))
            except Exception as error:  # noqa: BLE001  Ray's errors share no other base
                log.info("a report about host %s found no controller: %r", report.host, error)


def _send(notices: tuple[Notice, ...]) -> None:
    """Hand notices to every controller that is there.

    Raises:
        Exception: One did not take them.
    """
    for found in ray.util.list_named_actors(all_namespaces=True):
        if CONTROLLER_NAME in found["name"]:
            controller: Any = ray.get_actor(found["name"], namespace=found["namespace"])
            ray.get(controller.notify.remote(notices), timeout=_CALL_S)


class LoadReports:
    """Reports how a load goes, once a second and at its end.

    Args:
        start: The report of the start.
        tell: Takes reports.
        clock: Time source.
    """

    def __init__(
        self, start: HostReported, tell: Callable[[HostReported], None], clock: Clock
    ) -> None:
        self._start = start
        self._tell = tell
        self._clock = clock
        self._told_s = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Note that so many bytes of so many are in memory."""
        now_s = self._clock.now_s()
        if done_bytes < total_bytes and now_s - self._told_s < _LOAD_TOLD_S:
            return
        self._told_s = now_s
        self._tell(
            replace(self._start, loaded_bytes=done_bytes, total_bytes=total_bytes, at_s=now_s)
        )
