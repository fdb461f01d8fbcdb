"""`headrace demo`: kills an engine in the middle of its sentence, and shows that nobody notices."""

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console

from headrace_deploy.demo_play import Outcome, Play
from headrace_deploy.folders import fresh_folder
from headrace_deploy.local import LocalNode
from headrace_deploy.ports import with_real_ports
from headrace_deploy.progress import Steps
from headrace_deploy.serve_config import render
from headrace_deploy.settings_sources import load
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import LaunchError
from headrace_replicas.contract.settings import Settings

REPLICAS: Final = 2
_READY_S: Final = 90.0


def run(console: Console, clock: Clock, environ: Mapping[str, str], *, keep: bool) -> int:
    """Run the demo.

    Args:
        console: Where to show it.
        clock: Where the seconds come from.
        environ: The environment that the node starts from.
        keep: Stay up at the end until interrupted.

    Returns:
        The exit status: 0 when the killed story equals the undisturbed one.

    Raises:
        LaunchError: Something did not come up; logs are kept and named.
    """
    state_dir = fresh_folder("headrace-demo-")
    began_s = clock.monotonic_s()
    is_wanted = False
    try:
        outcome = _run_in(state_dir, console, clock, environ, keep=keep)
        is_wanted = not outcome.is_equal
    except LaunchError:
        is_wanted = True
        raise
    finally:
        if is_wanted:
            console.print(f"Logs and incidents are kept in {state_dir}", soft_wrap=True)
        else:
            shutil.rmtree(state_dir, ignore_errors=True)
    console.print(f"{outcome.verdict} ({clock.monotonic_s() - began_s:.0f} s in all)")
    return 0 if outcome.is_equal else 1


def demo_settings(state_dir: Path) -> Settings:
    """What the demo sets; it looks at no file and no environment, so that it is always the same."""
    overrides: Mapping[str, object] = {
        "model.path": "demo",
        "replica.count": REPLICAS,
        "engine.device": "cpu",
        "gateway.port": 0,
        "ray.port": 0,
        "ray.dashboard_port": 0,
        "state_dir": state_dir,
    }
    return load(None, {}, overrides).settings


def _run_in(
    state_dir: Path, console: Console, clock: Clock, environ: Mapping[str, str], *, keep: bool
) -> Outcome:
    settings = with_real_ports(demo_settings(state_dir))
    steps = Steps(console, clock)
    console.print(f"Two replicas of the demo model on MLX's CPU device ({os.cpu_count()} cores)")
    with LocalNode(settings, metal=REPLICAS, environ=environ, clock=clock) as node:
        with steps.step("Ray's head starts") as report:
            node.start(report)
        with steps.step("Ray Serve takes the config") as report:
            node.deploy(render(settings), report)
        with steps.step("two engines load and the first proves that it generates") as report:
            node.wait_ready(report, _READY_S)
        play = Play(node=node, console=console, steps=steps, clock=clock, replicas=REPLICAS)
        outcome = asyncio.run(play.act())
        _tell_where(console, node)
        if keep:
            _stay(console, node)
        with steps.step("everything is stopped"):
            node.stop()
    return outcome


def _tell_where(console: Console, node: LocalNode) -> None:
    lines = {
        "Endpoint": f"{node.endpoint}/v1",
        "API docs": f"{node.endpoint}/docs",
        "Ray dashboard": f"{node.dashboard_url} (asks for the text in {node.token_file})",
    }
    for name, value in lines.items():
        console.print(f"{name:<14} {value}", soft_wrap=True)
    console.print("All of it is open for you to look at with `headrace demo --keep`.\n")


def _stay(console: Console, node: LocalNode) -> None:
    """Keep the fleet up until the person has had enough."""
    console.print("The fleet stays up (--keep). Ctrl-C ends it.")
    try:
        node.wait()
    except KeyboardInterrupt:
        console.print()
