"""A gateway's line to the controller: board in, evidence out, and nothing waits for it.

If the controller is gone the gateway serves on with the last board and its own evidence; the
notices wait here, and the line finds the controller's successor by itself.
"""

import asyncio
import logging
from collections import deque
from typing import Any, Final

import ray
from ray import serve

from headrace_replicas.contract.fleet import Incident, Notice
from headrace_replicas.controller_line import CONTROLLER_NAME
from headrace_serve.board import BOARD

log = logging.getLogger("ray.serve.headrace.fleet_link")

# Notices kept while no controller listens; older ones are dropped first.
_KEPT_NOTICES: Final = 1000
_RETRY_S: Final = 0.5
# A call that a dying controller never answers must not hold the line for ever.
_CALL_S: Final = 30.0


class FleetLink:
    """Runs two background tasks on the gateway's event loop."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque(maxlen=_KEPT_NOTICES)
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start following the board and sending evidence."""
        self._tasks = [
            asyncio.create_task(self._follow_board()),
            asyncio.create_task(self._send_notices()),
        ]

    def tell(self, notice: Notice) -> None:
        """Queue a notice for the controller."""
        self._notices.append(notice)
        self._wanted.set()

    async def incidents(self) -> tuple[Incident, ...]:
        """The controller's incidents.

        Raises:
            Exception: The controller cannot be reached; Ray's errors share no other base.
        """
        found: tuple[Incident, ...] = await self._ask("incidents")
        return found

    async def _follow_board(self) -> None:
        while True:
            try:
                BOARD.publish(await self._ask("watch", BOARD.view.version))
            except Exception as error:  # noqa: BLE001  this line must outlive whatever a call raises
                log.warning("no board from the controller: %r", error)
                await asyncio.sleep(_RETRY_S)

    async def _send_notices(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            batch = tuple(self._notices)
            self._notices.clear()
            try:
                await self._ask("notify", batch)
            except Exception as error:  # noqa: BLE001  as above
                log.warning("%d notices wait for the controller: %r", len(batch), error)
                self._notices = deque((*batch, *self._notices), maxlen=_KEPT_NOTICES)
                await asyncio.sleep(_RETRY_S)
                self._wanted.set()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        # The handle of a recreated actor is a new one, so it is looked up for each call.
        async with asyncio.timeout(_CALL_S):
            controller: Any = await asyncio.to_thread(serve.get_deployment_actor, CONTROLLER_NAME)
            call: ray.ObjectRef[Any] = getattr(controller, method).remote(*arguments)
            return await call
