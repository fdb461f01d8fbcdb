"""The operator's own commands on the running fleet: `serve status` and `serve deploy`."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from headrace_deploy.serve_config import template_text
from tests.support.stack import Stack

pytestmark = pytest.mark.e2e


def serve(stack: Stack, *arguments: str) -> str:
    program = Path(sysconfig.get_path("scripts")) / "serve"
    token = stack.node.token_file.read_text()
    done = subprocess.run(
        [program, *arguments, "-a", stack.node.dashboard_url],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def test_serve_status_shows_both_deployments_healthy(stack: Stack) -> None:
    stack.wait_for_ready(2)
    status = yaml.safe_load(serve(stack, "status"))
    app = status["applications"]["headrace"]
    assert app["status"] == "RUNNING"
    healthy = {name: one["status"] for name, one in app["deployments"].items()}
    assert healthy == {"MoEReplica": "HEALTHY", "Gateway": "HEALTHY"}


def test_the_shipped_config_names_the_application_that_runs(stack: Stack) -> None:
    shipped = yaml.safe_load(template_text())
    running = yaml.safe_load(serve(stack, "config"))
    assert [app["import_path"] for app in shipped["applications"]] == [running["import_path"]]
    assert [app["name"] for app in shipped["applications"]] == [running["name"]]
