"""The composition root: what `serve deploy` builds from a config's `args`."""

from typing import Any, Final

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig

from headrace_replicas.actor import MoEReplica
from headrace_replicas.contract.settings import Settings
from headrace_replicas.controller_line import CONTROLLER_NAME
from headrace_serve.controller import FleetController
from headrace_serve.gateway import Gateway

APP_NAME: Final = "headrace"
ENGINES: Final = "MoEReplica"
GATEWAYS: Final = "Gateway"

# Snapshots reach the routers this often; a fault travels faster, by other ways.
_STATS_PERIOD_S: Final = 0.5
# Ray Serve looks this often whether a stopping replica has finished its requests.
_SHUTDOWN_LOOP_S: Final = 0.2


def build(args: dict[str, Any]) -> Application:
    """The Serve application of one model.

    Args:
        args: `Settings`, as far as they differ from the defaults.

    Raises:
        pydantic.ValidationError: An unknown setting or a wrong value.
    """
    settings = Settings.model_validate(args)
    plain = settings.model_dump(mode="json")
    replica, gateway = settings.replica, settings.gateway
    engines = serve.deployment(
        name=ENGINES,
        num_replicas=replica.count,
        max_ongoing_requests=replica.max_ongoing_requests,
        # Engines do their own accounting of cores; the resource `metal` places them.
        ray_actor_options={"num_cpus": 0, "resources": {"metal": 1}},
        health_check_period_s=replica.health_check_period_s,
        health_check_timeout_s=replica.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=_SHUTDOWN_LOOP_S,
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s,
        request_router_config=RequestRouterConfig.model_validate(
            {
                "request_router_class": "headrace_serve.fleet_router:FleetRouter",
                "request_routing_stats_period_s": _STATS_PERIOD_S,
                "request_routing_stats_timeout_s": replica.health_check_timeout_s,
                # A request without a replica looks again this often.
                "initial_backoff_s": 0.02,
                "max_backoff_s": 0.2,
            }
        ),
    )
    controller = DeploymentActorConfig(
        name=CONTROLLER_NAME,
        actor_class=ray.remote(FleetController),
        init_kwargs={"settings": plain, "app_name": APP_NAME, "deployment_name": ENGINES},
        actor_options={"num_cpus": 0},
    )
    ingress = serve.deployment(
        name=GATEWAYS,
        num_replicas=gateway.replicas,
        max_ongoing_requests=gateway.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        deployment_actors=[controller],
    )
    gateways = ingress(serve.ingress()(Gateway))
    return gateways.bind(plain, engines(MoEReplica).bind(plain))
