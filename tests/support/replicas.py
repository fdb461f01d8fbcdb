"""Replicas for tests: an engine on MLX's CPU device, with a device of its own to claim."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import Settings
from headrace_replicas.device_claim import claim_device
from headrace_replicas.replica import Replica

_made: list[Replica] = []

STREAMING: Mapping[str, object] = {"slots": "25%", "schedule": "layers"}
"""`engine` settings of a replica that streams three quarters of its experts."""


def make_replica(
    state_dir: Path,
    *,
    engine: Mapping[str, object] | None = None,
    host: str = "here",
    options: Mapping[str, Any] | None = None,
    **sections: object,
) -> Replica:
    """A replica that is ready; it ends with the test module that made it.

    Args:
        state_dir: Its host's.
        engine: `engine` settings beside the device.
        host: The host's label.
        options: Further arguments of `Replica`.
        sections: Other settings, by section.
    """
    clock = SystemClock()
    replica = Replica(
        replica_id="abc123",
        host=host,
        claim=claim_device(state_dir, host, devices=8, wait_s=0, clock=clock),
        settings=Settings.model_validate(
            {"engine": {"device": "cpu", **(engine or {})}, "state_dir": state_dir, **sections}
        ),
        clock=clock,
        **(options or {}),
    )
    _made.append(replica)
    return replica


def close_replicas() -> None:
    """End the background work of every replica that was made: no later test shall meet it."""
    while _made:
        _made.pop().close()
