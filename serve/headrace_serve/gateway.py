"""The Ray Serve shell of a gateway: builds the service and its HTTP application in the replica."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.checkpoint import read_checkpoint, resolve
from headrace_serve import board
from headrace_serve.fleet_link import FleetLink
from headrace_serve.gaps import GapsOfProcess
from headrace_serve.http.routes import build_api
from headrace_serve.http.service import GatewayService
from headrace_serve.poison_guard import PoisonGuard
from headrace_serve.ray_replicas import RayReplicas, wake_router
from headrace_serve.text.tokenizer import TextTokenizer
from headrace_serve.token_stream import StreamParts


class Gateway:
    """The ingress deployment.

    Args:
        settings: `Settings` as a JSON-like mapping.
        engines: Handle of the deployment of engines.
    """

    def __init__(self, settings: Mapping[str, Any], engines: DeploymentHandle[Any]) -> None:
        self._settings = Settings.model_validate(settings)
        board.BOARD.stale_s = self._settings.fleet.snapshot_stale_s
        self._link = FleetLink()
        self._engines = engines
        model = self._settings.model
        checkpoint = read_checkpoint(resolve(model.path, model.revision))
        clock = SystemClock()
        self._service = GatewayService(
            settings=self._settings,
            checkpoint=checkpoint,
            tokenizer=TextTokenizer.from_folder(checkpoint.path),
            streams=StreamParts(
                replicas=RayReplicas(engines),
                board=board.BOARD,
                gaps=GapsOfProcess(self._settings.failover),
                tell=self._link.tell,
                settings=self._settings.failover,
                clock=clock,
                guard=PoisonGuard(
                    settings=self._settings.fleet,
                    board=board.BOARD,
                    tell=self._link.tell,
                    clock=clock,
                    is_only_gateway=self._settings.gateway.replicas == 1,
                ),
            ),
            board=board.BOARD,
            clock=clock,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        api = build_api(self._service, self._settings.gateway, self._link.incidents)
        api.router.on_startup.append(self._start)
        return api

    async def _start(self) -> None:
        """On the gateway's event loop: follow the controller, and learn the replicas."""
        self._link.start()
        await wake_router(self._engines)
