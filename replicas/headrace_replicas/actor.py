"""The Ray Serve shell of a replica; everything else of it is in `replica`."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ray import serve

from headrace_replicas.boot_id import read_boot_id
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import EngineFaultError, HeadraceError
from headrace_replicas.contract.fleet import ProbeResult, ReplaceReplica
from headrace_replicas.contract.requests import GenerateRequest, ProbeRequest, TokenChunk
from headrace_replicas.contract.settings import Settings
from headrace_replicas.controller_line import ControllerLine, LoadReports
from headrace_replicas.engine_start import EngineStart, StartPlace, begin_start
from headrace_replicas.host import device_count, host_label, node_id
from headrace_replicas.injection.missing_memory import missing_bytes
from headrace_replicas.replica import Replica


@contextmanager
def _told_of_refusals(start: EngineStart) -> Iterator[None]:
    """A model or a setting that is refused ends a start in order; whatever else is a death."""
    try:
        yield
    except EngineFaultError:
        raise
    except HeadraceError as error:
        start.recorder.ended(f"it refused to start: {error}", 0)
        raise


class MoEReplica:
    """One engine process of the fleet, as Ray Serve sees it.

    Args:
        settings: `Settings` as a JSON-like mapping, as the Serve config carries them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        parsed = Settings.model_validate(settings)
        host = host_label()
        clock = SystemClock()
        self._controller = ControllerLine()
        place = StartPlace(
            state_dir=Path(parsed.state_dir),
            host=host,
            devices=device_count(),
            settings=parsed.faults,
            boot_id=read_boot_id(),
            node_id=node_id(),
        )
        self._start = begin_start(
            place,
            clock=clock,
            tell=self._controller.tell,
            missing_bytes=missing_bytes(parsed.injection, host),
        )
        with _told_of_refusals(self._start):
            self._replica = Replica(
                replica_id=serve.get_replica_context().replica_id.unique_id,
                host=host,
                claim=self._start.claim,
                settings=parsed,
                clock=clock,
                origin=replace(
                    self._start.origin,
                    load_goes_on=LoadReports(self._start.report, self._controller.tell, clock),
                ),
            )
        # From here on the replica itself can be asked.
        self._controller.close()
        plan = self._replica.memory_plan
        self._start.holds(plan.total_bytes - plan.headroom_bytes)
        self._watch: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        # Ray Serve calls this when it stops a replica in an orderly way. The constructor may have
        # failed before there was anything to close.
        replica: Replica | None = getattr(self, "_replica", None)
        if replica is not None:
            replica.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the chunks of one attempt; see `Replica.generate`."""
        async for chunk in self._replica.generate(request):
            yield chunk

    async def probe(self, request: ProbeRequest) -> ProbeResult:
        """Prove that this engine generates; see `Replica.probe`."""
        return await self._replica.probe(exact=request.exact)

    async def replace(self, order: ReplaceReplica) -> None:
        """Take the controller's order to leave; Ray Serve's next checks carry it out."""
        self._replica.leave(order.reason)

    async def record_routing_stats(self) -> dict[str, Any]:
        """The snapshot that Ray Serve carries to every router."""
        if self._watch is None:
            # Ray Serve calls this regularly on the loop that the replica's methods run on.
            self._watch = asyncio.create_task(self._replica.watch_itself())
        return asdict(self._replica.snapshot())

    async def check_health(self) -> None:
        """Raise only when this replica must be replaced; no generation happens here.

        Raises:
            EngineFaultError: The engine ended, or replacement was ordered.
        """
        reason = self._replica.unhealthy_reason
        if reason:
            raise EngineFaultError(reason)
