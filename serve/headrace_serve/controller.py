"""The controller: a deployment-scoped actor around the pure `fleet.step`.

It belongs to the gateway's deployment and never to the engines': a dead deployment actor blocks
new replicas of its deployment. It keeps nothing that it cannot learn again: replicas, snapshots
and probes come back within a second of a restart, and incidents are on disk, where a new
controller takes up those that are open.
"""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from ray import serve
from ray.serve.handle import DeploymentHandle

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.fleet import (
    Effect,
    FleetView,
    HostReported,
    Incident,
    MembersSeen,
    Notice,
    ProbeFinished,
    ProbeUnanswered,
    ReplaceReplica,
    SendProbe,
    SnapshotSeen,
    Tick,
    WriteIncident,
)
from headrace_replicas.contract.requests import ProbeRequest
from headrace_replicas.contract.settings import Settings
from headrace_replicas.host import host_label
from headrace_serve import board, fleet
from headrace_serve.fleet_hosts import restamped
from headrace_serve.incident_log import IncidentLog
from headrace_serve.ray_replicas import wake_router

log = logging.getLogger("ray.serve.headrace.controller")

# Reality is read this often. Faults that gateways report act at once, between two readings.
_TICK_S: Final = 0.2
# A gateway that sees no change asks again after this, so that a lost one frees its place.
_WATCH_S: Final = 20.0


class FleetController:
    """Watches the replicas, probes them, orders replacement and keeps the incidents.

    Args:
        settings: `Settings` as a JSON-like mapping.
        app_name: The Serve application.
        deployment_name: The deployment of engines that it watches.
    """

    def __init__(self, settings: Mapping[str, Any], app_name: str, deployment_name: str) -> None:
        self._settings = Settings.model_validate(settings)
        self._app_name = app_name
        self._deployment_name = deployment_name
        self._clock = SystemClock()
        self._changed = asyncio.Condition()
        self._incidents = IncidentLog(Path(self._settings.state_dir), host_label())
        # One thread: the log's last line about an incident must be its newest state.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="incidents")
        self._state = fleet.begin(self._incidents.left_open(), self._clock.now_s())
        self._open_calls: set[asyncio.Task[None]] = set()
        self._handle: DeploymentHandle[Any] | None = None
        self._loop: asyncio.Task[None] | None = None

    async def watch(self, version: int) -> FleetView:
        """The board as soon as it differs from `version`, or unchanged after a while."""
        self._run()
        async with self._changed:
            try:
                async with asyncio.timeout(_WATCH_S):
                    await self._changed.wait_for(lambda: self._state.version != version)
            except TimeoutError:
                log.debug("no change for %s s", _WATCH_S)
        return fleet.view(self._state, self._clock.now_s())

    async def notify(self, notices: tuple[Notice, ...]) -> None:
        """Take what a gateway saw."""
        self._run()
        for notice in notices:
            if isinstance(notice, HostReported):
                notice = restamped(notice, self._clock.now_s())  # noqa: PLW2901  on our own clock
            await self._apply(notice)

    async def incidents(self) -> tuple[Incident, ...]:
        """All incidents that this controller's log holds, oldest first."""
        return await asyncio.to_thread(self._incidents.read)

    def _run(self) -> None:
        """Start the loop at the first call: an actor's constructor runs outside of its loop."""
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._read_reality())

    async def _read_reality(self) -> None:
        self._handle = serve.get_deployment_handle(self._deployment_name, self._app_name)
        await wake_router(self._handle)
        while True:
            now_s = self._clock.now_s()
            members, snapshots = board.BOARD.members()
            await self._apply(MembersSeen(replica_ids=members, at_s=now_s))
            for snapshot in snapshots:
                await self._apply(SnapshotSeen(snapshot=snapshot, at_s=now_s))
            await self._apply(Tick(at_s=now_s))
            await asyncio.sleep(_TICK_S)

    async def _apply(self, notice: Notice) -> None:
        before = self._state.version
        self._state, effects = fleet.step(self._state, notice, self._settings.fleet)
        for effect in effects:
            self._carry_out(effect)
        if self._state.version != before:
            async with self._changed:
                self._changed.notify_all()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendProbe():
                self._in_background(self._probe(effect))
            case ReplaceReplica():
                log.warning("replacing %s: %s", effect.replica_id, effect.reason)
                self._in_background(self._order(effect))
            case WriteIncident():
                self._in_background(
                    asyncio.get_running_loop().run_in_executor(
                        self._writer, self._incidents.write, effect.incident
                    )
                )

    def _in_background(self, work: Any) -> None:
        call = asyncio.ensure_future(work)
        self._open_calls.add(call)
        call.add_done_callback(self._finished)

    def _finished(self, call: "asyncio.Task[None]") -> None:
        self._open_calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None:
            log.error("a controller call failed: %r", error)

    async def _probe(self, effect: SendProbe) -> None:
        request = ProbeRequest(replica_id=effect.replica_id, exact=effect.exact)
        try:
            result = await self._call("probe", request, effect.deadline_s)
            notice: Notice = ProbeFinished(result=result, at_s=self._clock.now_s())
        except TimeoutError:
            notice = self._unanswered(effect, timed_out=True, detail="no answer in time")
        except Exception as error:  # noqa: BLE001  whatever the call raised is the probe's outcome
            notice = self._unanswered(effect, timed_out=False, detail=repr(error)[:500])
        await self._apply(notice)

    def _unanswered(self, effect: SendProbe, *, timed_out: bool, detail: str) -> ProbeUnanswered:
        return ProbeUnanswered(
            replica_id=effect.replica_id,
            timed_out=timed_out,
            detail=detail,
            at_s=self._clock.now_s(),
        )

    async def _order(self, effect: ReplaceReplica) -> None:
        """Tell a replica to leave. One that cannot hear it is ended by Serve's own checks."""
        try:
            await self._call("replace", effect, self._settings.fleet.probe_timeout_s)
        except TimeoutError:
            log.warning("%s did not take the order to leave", effect.replica_id)

    async def _call(self, method: str, argument: Any, deadline_s: float) -> Any:
        if self._handle is None:
            raise RuntimeError("a call before the handle exists")
        response = self._handle.options(method_name=method, _by_reference=False).remote(argument)
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                return await response
        except Exception as error:
            # Ray Serve may tell of a call that ran out of time as of one that was taken back.
            if limit.expired() and not isinstance(error, TimeoutError):
                raise TimeoutError from error
            raise
        finally:
            response.cancel()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
