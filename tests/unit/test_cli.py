"""The command line: what it prints, how it fails, and what it refuses before anything starts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_deploy.demo import REPLICAS, demo_settings
from headrace_deploy.demo_play import Outcome
from headrace_deploy.one_machine import (
    engines_on_this_machine,
    exposure_warning,
    uses_gpu,
    with_absolute_paths,
)
from headrace_deploy.settings_sources import fields, load
from headrace_deploy.story_client import (
    Story,
    Worker,
    content_of,
    parse_event,
    story_of,
    workers_of,
)
from headrace_replicas.contract.errors import LaunchError, SettingsError
from headrace_replicas.contract.fleet import Cause, Incident
from headrace_replicas.contract.settings import Settings
from headrace_serve.incident_log import IncidentLog

pytestmark = pytest.mark.usefixtures("clean_environment")

INCIDENT = Incident(
    id="20260101-a",
    cause=Cause.REPLICA_DIED,
    host="m1",
    replica="abc",
    generation=1,
    opened_s=1_767_225_600.0,
    requests_moved=2,
    replayed_tokens=40,
    worst_gap_s=0.61,
    evidence=("ActorDiedError: [red]the actor died[/]",),
    timeline=((1_767_225_600.0, "opened"), (1_767_225_600.25, "request r1 moved")),
)


def headrace(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def set_to(**overrides: object) -> Settings:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load(None, {}, named).settings


def test_version_is_the_distributions() -> None:
    """`--version` prints name and version."""
    result = headrace("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"headrace \d+\.\d+\.\d+\S*\n", result.output)


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("serve",),
        ("demo",),
        ("bench",),
        ("bench", "stream"),
        ("config",),
        ("config", "show"),
        ("hosts",),
        ("hosts", "list"),
        ("hosts", "release"),
        ("incidents",),
        ("incidents", "list"),
        ("incidents", "show"),
        ("incidents", "export"),
    ],
)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    """`--help` and `-h` work everywhere and say something."""
    long, short = headrace(*command, "--help"), headrace(*command, "-h")
    assert long.exit_code == short.exit_code == 0
    assert long.output == short.output
    assert "Usage" in long.output


def test_config_show_names_every_setting_once() -> None:
    """The table has one row per setting, each with its origin."""
    lines = headrace("config", "show").output.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(fields())
    assert all(line.rstrip().endswith("default") for line in lines)


def test_config_show_says_where_values_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON holds the value and the origin of each setting."""
    file = tmp_path / "fleet.yaml"
    file.write_text("gateway:\n  port: 1\n  replicas: 2\n")
    monkeypatch.setenv("HEADRACE_GATEWAY__REPLICAS", "3")
    result = headrace(
        "config", "show", "--json", "--file", str(file), "--set", "model.aliases=[a, b]"
    )
    shown = json.loads(result.output)
    assert shown["gateway.port"] == {"value": 1, "origin": f"file {file}:2"}
    assert shown["gateway.replicas"] == {
        "value": 3,
        "origin": "environment HEADRACE_GATEWAY__REPLICAS",
    }
    assert shown["model.aliases"] == {"value": ["a", "b"], "origin": "command line"}
    assert list(shown) == list(fields())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("config", "show", "--set", "gateway.prot=1"), "did you mean gateway.port?"),
        (("config", "show", "--set", "gateway.port"), "section.field=value"),
        (("config", "show", "--file", "/nowhere.yaml"), "fleet.example.yaml"),
        (("serve", "--port", "70000"), "65535"),
        (("serve", "--device", "tpu"), "'auto', 'cpu' or 'gpu'"),
        (("serve", "--device", "gpu", "--replicas", "2"), "a GPU takes one engine"),
        (("serve", "--set", "gateway.api_keys=[sesame]"), "not a SHA-256 digest"),
        (("incidents", "show", "nothing"), "no incident begins"),
        (("serve", "--nonsense"), "No such option"),
        (("nonsense",), "No such command"),
    ],
)
def test_usage_and_settings_errors_exit_2_in_one_line(
    arguments: tuple[str, ...], says: str
) -> None:
    """A mistake of the person ends with status 2, a remedy on stderr and no traceback."""
    result = headrace(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_broken_checkpoint_exits_1_before_anything_starts(tmp_path: Path) -> None:
    """A folder that is no checkpoint ends `serve` with status 1 and its reason."""
    (tmp_path / "model").mkdir()
    result = headrace(
        "serve", "--model", str(tmp_path / "model"), "--device", "cpu", "--port", "0",
        "--set", "ray.port=0", "--set", "ray.dashboard_port=0",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "error:" in result.stderr
    assert "config.json" in result.stderr
    assert "Traceback" not in result.output
    assert list((tmp_path / ".headrace").iterdir()) == []


def test_a_model_that_does_not_fit_exits_1_before_anything_starts(tmp_path: Path) -> None:
    """`serve` refuses it as `plan` does, with the numbers and the setting to change."""
    result = headrace(
        "serve", "--model", "demo", "--device", "cpu", "--port", "0", "--set", "ray.port=0",
        "--set", "ray.dashboard_port=0", "--set", "engine.max_batch=100000000",
    )  # fmt: skip
    assert result.exit_code == 1
    for words in ("resident weights 2.0 MiB", "KV cache", "Set engine.max_batch to 1"):
        assert words in result.stderr
    assert "Ray's head" not in result.output
    assert list((tmp_path / ".headrace").iterdir()) == []


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_device_by_name_needs_no_guess(device: str) -> None:
    """Only `auto` looks at the machine."""
    assert uses_gpu(device) == (device == "gpu")


def test_several_engines_need_the_cpu() -> None:
    """One GPU takes one engine; on the CPU each replica is one."""
    assert engines_on_this_machine(set_to(replica__count=1), has_gpu=True) == 1
    assert engines_on_this_machine(set_to(replica__count=3), has_gpu=False) == 3
    with pytest.raises(SettingsError) as caught:
        engines_on_this_machine(set_to(replica__count=2), has_gpu=True)
    assert caught.value.param == "replica.count"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    """Without a key, listening on this machine only is no reason to warn."""
    assert exposure_warning(set_to(gateway__host=host)) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "m1.local"])  # noqa: S104
def test_open_gateways_are_warned_of(host: str) -> None:
    """Listening beyond this machine is warned of unless a key is set."""
    assert host in exposure_warning(set_to(gateway__host=host))
    assert not exposure_warning(set_to(gateway__host=host, gateway__api_keys=["ab" * 32]))


def test_local_folders_are_deployed_by_their_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder becomes absolute; the demo and repository ids stay as they are."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "demo"):
        (tmp_path / name).mkdir()
    settings = with_absolute_paths(set_to(model__path="model", ray__temp_dir="r"))
    assert settings.model.path == str(tmp_path / "model")
    assert settings.ray.temp_dir == tmp_path / "r"
    for path in ("demo", "mlx-community/some-model"):
        assert with_absolute_paths(set_to(model__path=path)).model.path == path
    for draft, full in (("model", str(tmp_path / "model")), ("demo", "demo"), (None, None)):
        settings = with_absolute_paths(set_to(engine__draft_model=draft))
        assert settings.engine.draft_model == full


def test_incidents_are_listed_by_their_newest_state(tmp_path: Path) -> None:
    """The list shows each incident once, as its last record says, over all hosts."""
    assert "no incidents" in headrace("incidents", "list").output
    log = IncidentLog(tmp_path, "m1")
    log.write(INCIDENT)
    log.write(replace(INCIDENT, mitigated_s=1_767_225_601.0, closed_s=1_767_225_609.0))
    IncidentLog(tmp_path, "m2").write(
        replace(INCIDENT, id="20251231-b", host="m2", opened_s=1_767_000_000.0)
    )
    rows = headrace("incidents", "list", "--state-dir", str(tmp_path)).output.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["20251231-b", "20260101-a"]
    assert rows[0].rstrip().endswith("open")
    assert rows[1].rstrip().endswith("closed")
    listed = json.loads(
        headrace("incidents", "list", "--json", "--state-dir", str(tmp_path)).output
    )
    assert [record["id"] for record in listed] == ["20251231-b", "20260101-a"]


def test_one_incident_is_shown_whole(tmp_path: Path) -> None:
    """An incident is found by the beginning of its id and told with timeline and evidence."""
    IncidentLog(tmp_path, "m1").write(INCIDENT)
    output = headrace("incidents", "show", "2026", "--state-dir", str(tmp_path)).output
    assert "Incident 20260101-a" in output
    assert "+0.250  request r1 moved" in output
    assert "ActorDiedError: [red]the actor died[/]" in output


def test_ambiguous_beginnings_are_refused(tmp_path: Path) -> None:
    """A beginning that fits two incidents is refused; a whole id never is."""
    log = IncidentLog(tmp_path, "m1")
    log.write(INCIDENT)
    log.write(replace(INCIDENT, id="20260101-ab"))
    arguments = ("--state-dir", str(tmp_path))
    assert "2 incidents begin with" in headrace("incidents", "show", "2026", *arguments).stderr
    assert headrace("incidents", "show", "20260101-a", *arguments).exit_code == 0


def test_demo_depends_on_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo takes free ports and its own state folder, whatever the environment says."""
    monkeypatch.setenv("HEADRACE_GATEWAY__PORT", "1")
    settings = demo_settings(tmp_path)
    assert settings.gateway.port == settings.ray.port == settings.ray.dashboard_port == 0
    assert settings.state_dir == tmp_path
    assert (settings.model.path, settings.engine.device) == ("demo", "cpu")
    assert engines_on_this_machine(settings, has_gpu=False) == REPLICAS == 2


def chunk(content: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}]}


def test_stream_lines_become_chunks() -> None:
    """Comments, blank lines and the end marker are no chunks; events are."""
    for line in ("", ": keep-alive", "data: [DONE]", "event: x"):
        assert parse_event(line) is None
    assert parse_event('data: {"choices": []}') == {"choices": []}
    assert content_of(chunk("a")) == "a"
    assert content_of({"choices": [{"delta": {"content": None}}, {}]}) == ""


def test_errors_in_a_stream_are_not_taken_for_answers() -> None:
    """An error event ends the story with its message."""
    with pytest.raises(LaunchError, match="replica lost"):
        parse_event('data: {"error": {"message": "replica lost"}}')


def test_stories_without_an_end_are_refused() -> None:
    """A stream is whole only with exactly one finish reason."""
    last = {"usage": {"completion_tokens": 9}, "headrace": {"attempts": "2"}, "choices": []}
    whole = [chunk("a"), chunk("", "stop"), last]
    assert story_of("a", whole) == Story(text="a", finish_reason="stop", attempts=2, tokens=9)
    for chunks in ([chunk("a")], [chunk("a", "stop"), chunk("b", "stop")], []):
        with pytest.raises(LaunchError, match="instead of one"):
            story_of("a", chunks)


def test_replicas_without_a_snapshot_are_not_workers_yet() -> None:
    """A replica that has not told its process id cannot be picked."""
    snapshot = {"pid": 7, "running": 1}
    entries: list[dict[str, object]] = [
        {"replica_id": "a", "state": "ready", "snapshot": snapshot},
        {"replica_id": "b", "state": "starting"},
    ]
    assert workers_of(entries) == (Worker(replica_id="a", state="ready", pid=7, running=1),)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "EQUAL"),
        ({"text": "Once upom"}, "differs after 8 characters"),
        ({"text": "Once"}, "differs after 4 characters"),
        ({"finish_reason": "length"}, "ends with length instead of stop"),
        ({"attempts": 1}, "never moved"),
    ],
)
def test_demo_passes_only_when_a_moved_story_is_equal(
    changes: dict[str, object], verdict: str
) -> None:
    """The demo is good only if an engine was lost and the reader got the same bytes."""
    told = Story(text="Once upon", finish_reason="stop", attempts=1, tokens=2)
    disturbed = replace(replace(told, attempts=2), **changes)  # type: ignore[arg-type]
    outcome = Outcome(undisturbed=told, disturbed=disturbed)
    assert outcome.is_equal == (verdict == "EQUAL")
    assert verdict in outcome.verdict
