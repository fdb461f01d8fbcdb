"""A device that is held: the controller hears of it from a constructor, and an operator ends it."""

import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace_deploy.cli import app
from tests.support.stack import Stack
from tests.support.waiting import comes_true

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("clean_environment")]


def held(stack: Stack) -> list[dict[str, Any]]:
    """Open incidents about a host that may not start an engine."""
    found = stack.get("/fleet/v1/incidents")["incidents"]
    return [one for one in found if one["cause"] == "host_held" and one["closed_s"] is None]


def test_a_hold_becomes_an_incident_and_a_release_ends_it(tmp_path: Path) -> None:
    """The one that is left serves meanwhile."""
    with Stack.running(tmp_path, faults={"breaker_deaths": 1, "breaker_hold_s": 3600}) as stack:
        victim = stack.ready()[0]
        stack.signal_replica(victim, signal.SIGKILL)
        assert comes_true(lambda: held(stack), patience_s=120, every_s=0.5)
        (incident,) = held(stack)
        evidence = " ".join(incident["evidence"])
        assert "held for 3600 s, then one start is tried" in evidence
        assert "died without a word" in evidence
        assert stack.whole(stack.body("Where does a river end?")).status_code == 200
        host = victim["snapshot"]["host"]
        result = CliRunner().invoke(app, ["hosts", "release", host, "--state-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        stack.wait_for_ready(2, without=frozenset({victim["replica_id"]}))
        assert comes_true(lambda: not held(stack), patience_s=60, every_s=0.5)
