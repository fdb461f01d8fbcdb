"""`headrace incidents`: what it prints, of whom, and how it fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace_deploy import incidents_commands
from headrace_deploy.cli import app
from headrace_deploy.incidents_commands import opened_since, runbook_lines
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.fleet import Cause, Incident
from headrace_serve import incidents
from headrace_serve.incident_log import IncidentLog, incident_of

pytestmark = pytest.mark.usefixtures("clean_environment")

NOW_S = 1_577_836_800.0


def opened(name: str, at_s: float, host: str = "m1") -> Incident:
    return replace(
        incidents.open_(
            cause=Cause.METAL_FAULT,
            host=host,
            replica=name,
            generation=1,
            text="timeout: [METAL] Command buffer\nthe second line",
            at_s=at_s,
        ),
        id=name,
    )


@pytest.fixture
def state(tmp_path: Path) -> str:
    """Two hosts' incidents, one of them from a file that is not the newest."""
    IncidentLog(tmp_path, "m2").write(opened("c", NOW_S + 20.0, "m2"))
    log = IncidentLog(tmp_path, "m1", file_bytes=10)
    for incident in (opened("a", NOW_S), opened("b", NOW_S + 10.0)):
        log.write(incidents.close(incident, why="over", at_s=NOW_S + 30.0))
    return str(tmp_path)


def ask(state: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["incidents", *arguments, "--state-dir", state])


def ids(result: Result) -> list[str]:
    assert result.exit_code == 0
    return [json.loads(line)["id"] for line in result.output.splitlines()]


def test_all_files_of_all_hosts_are_read(state: str) -> None:
    assert ids(ask(state, "export")) == ["a", "b", "c"]
    listed = json.loads(ask(state, "list", "--json").output)
    assert [one["id"] for one in listed] == ["a", "b", "c"]


@pytest.mark.parametrize(("host", "wanted"), [("m1", ["a", "b"]), ("m2", ["c"])])
def test_one_host_is_asked_for_by_name(state: str, host: str, wanted: list[str]) -> None:
    assert ids(ask(state, "export", "--host", host)) == wanted


@pytest.mark.parametrize("command", [("list",), ("show", "a"), ("export",)])
def test_a_host_that_has_none_is_named_with_those_that_have(
    state: str, command: tuple[str, ...]
) -> None:
    result = ask(state, *command, "--host", "m3")
    assert result.exit_code == 2
    assert "host 'm3' has no incidents" in result.stderr
    assert "m1, m2" in result.stderr


def test_what_is_exported_can_be_read_back(state: str) -> None:
    records = json.loads(ask(state, "export", "--format", "json").output)
    lines = ask(state, "export", "--format", "jsonl").output.splitlines()
    assert records == [json.loads(line) for line in lines]
    assert incident_of(records[2]) == opened("c", NOW_S + 20.0, "m2")


def test_an_export_of_nothing_is_nothing(tmp_path: Path) -> None:
    assert ids(ask(str(tmp_path), "export")) == []
    assert json.loads(ask(str(tmp_path), "export", "--format", "json").output) == []


def test_only_newer_ones_are_exported(state: str) -> None:
    assert ids(ask(state, "export", "--since", "2020-01-01T00:00:10")) == ["b", "c"]
    assert ids(ask(state, "export", "--since", "1s")) == []


@pytest.mark.parametrize(
    ("text", "wanted_s"),
    [
        ("30m", NOW_S - 1800.0),
        ("1.5h", NOW_S - 5400.0),
        ("7d", NOW_S - 604_800.0),
        ("90s", NOW_S - 90.0),
        ("2020-01-01T00:00:00Z", NOW_S),
        ("2020-01-01T01:00:00+01:00", NOW_S),
        ("2020-01-01", NOW_S),
    ],
)
def test_since_is_an_age_or_a_time(text: str, wanted_s: float) -> None:
    assert opened_since(text, NOW_S) == wanted_s


@pytest.mark.parametrize("text", ["", "m", "yesterday", "-5m", "1.2.3h", "5 m"])
def test_any_other_since_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="neither an age like 30m"):
        opened_since(text, SystemClock().now_s())


def test_show_begins_with_the_summary_and_ends_with_what_to_do(state: str) -> None:
    output = ask(state, "show", "a").output
    order = ["Incident a", "What: ", "State: closed", "Evidence", "Timeline", "Runbook: "]
    places = [output.index(part) for part in order]
    assert places == sorted(places)
    assert "  timeout: [METAL] Command buffer\n    the second line\n" in output
    assert "metal_fault.md\n  After a timeout look for a second process" in output


def test_an_ambiguous_beginning_lists_what_it_fits(tmp_path: Path) -> None:
    for number in range(7):
        IncidentLog(tmp_path, "m1").write(opened(f"x{number}", NOW_S))
    result = ask(str(tmp_path), "show", "x")
    assert result.exit_code == 2
    assert "7 incidents begin with 'x' (x0, x1, x2, x3, x4, ...)" in result.stderr


@pytest.mark.parametrize("cause", Cause)
def test_each_cause_says_what_to_do(cause: Cause) -> None:
    path, *todo = runbook_lines(cause)
    assert path.endswith(f"docs/runbooks/{cause.value}.md")
    assert todo


def test_without_the_pages_their_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents_commands, "_RUNBOOKS", tmp_path)
    assert runbook_lines(Cause.HOST_HELD) == (
        "Runbook: docs/runbooks/host_held.md of headrace's source",
    )
