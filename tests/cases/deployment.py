"""Serves the checkpoints that request cases need, one after the other on one Ray node.

Everything the case driver knows about deploying is here: `one_node` starts Ray once (about 15 s),
`deployed` puts one fixture on it (a redeployment of a few seconds).
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace_deploy.local import LocalNode
from headrace_deploy.ports import with_real_ports
from headrace_deploy.serve_config import render
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import LaunchError
from headrace_replicas.contract.settings import (
    GatewaySettings,
    ModelSettings,
    RaySettings,
    Settings,
)
from headrace_serve.http.keys import digest
from tests.cases.case_file import Step
from tests.cases.fixtures import FIXTURES
from tests.cases.http_call import Target, call
from tests.support.checkpoints import make_checkpoint

_KEY = "key-of-the-case-driver"
_READY_S = 180.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseNode:
    """A running Ray node, the settings its deployments share, and where checkpoints go."""

    node: LocalNode
    settings: Settings
    folder: Path


@contextmanager
def one_node(folder: Path) -> Iterator[CaseNode]:
    """Starts a Ray head on free ports; state and checkpoints are under `folder`."""
    settings = with_real_ports(
        Settings(
            gateway=GatewaySettings(port=0, api_keys=(digest(_KEY),)),
            ray=RaySettings(port=0, dashboard_port=0),
            state_dir=folder / "state",
        )
    )
    clock = SystemClock()
    with LocalNode(settings, metal=1, environ=os.environ, clock=clock) as node:
        node.start(_report)
        yield CaseNode(node=node, settings=settings, folder=folder)


@contextmanager
def deployed(case_node: CaseNode, name: str) -> Iterator[Target]:
    """Makes the fixture `name`, serves it in place of the one before, and yields its address.

    Raises:
        LaunchError: It did not come up.
    """
    fixture = FIXTURES[name]
    path = case_node.folder / name
    make_checkpoint(path, template=fixture.template, breaks=fixture.breaks)
    model = ModelSettings(path=str(path), name=f"case-{name}")
    settings = case_node.settings.model_copy(update={"model": model})
    target = Target(base=case_node.node.endpoint, model=f"case-{name}", key=_KEY)
    case_node.node.deploy(render(settings), _report)
    _await_model(case_node.node, target)
    yield target


def _await_model(node: LocalNode, target: Target) -> None:
    """Waits until the gateway lists the model: right after a deployment the old one answers."""
    step = Step(name="models", method="GET", path="/v1/models", timeout=10.0)
    give_up_s = time.monotonic() + _READY_S
    while True:
        node.wait_ready(_report, _READY_S)
        if f'"{target.model}"'.encode() in call(target, step).body:
            return
        if time.monotonic() >= give_up_s:
            raise LaunchError(f"/v1/models did not list {target.model} in {_READY_S:.0f} s")
        time.sleep(_POLL_S)


def _report(line: str) -> None:
    sys.stderr.write(f"  {line}\n")
