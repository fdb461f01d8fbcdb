"""Folders that cannot be used end a command with one line, a remedy and status 1."""

import os
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_deploy.command_line import endings
from headrace_deploy.folders import fresh_folder, open_log, prepare_state_folder
from headrace_replicas.contract.errors import LaunchError

pytestmark = pytest.mark.usefixtures("clean_environment")

SERVE = (
    "serve", "--model", "demo", "--device", "cpu", "--port", "0",
    "--set", "ray.port=0", "--set", "ray.dashboard_port=0",
)  # fmt: skip
READING = (("incidents", "list"), ("incidents", "show", "x"), ("verify", "demo"))
WRITING = (SERVE, ("pack", "demo"), ("bench", "stream", "demo"))
# No file system that we know takes a name this long; it fails for root as well.
TOO_LONG = "x" * 300


def headrace(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("command", [*READING, *WRITING], ids=" ".join)
def test_a_file_is_no_state_folder(command: tuple[str, ...], tmp_path: Path) -> None:
    """Every command that touches the state folder says so."""
    file = tmp_path / "file"
    file.write_text("")
    result = headrace(*command, "--state-dir", str(file))
    assert_refused(result, f"the state folder {file} cannot be used", "--state-dir")
    assert "file of that name" in result.stderr or "Not a directory" in result.stderr
    below = headrace(*command, "--state-dir", str(file / "below"))
    assert_refused(below, "Not a directory", "--state-dir")


@pytest.mark.parametrize("command", [*READING, *WRITING], ids=" ".join)
def test_what_the_system_refuses_is_said(command: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever the reason, it is the system's own."""
    result = headrace(*command, "--state-dir", str(tmp_path / TOO_LONG))
    assert_refused(result, "File name too long", "--state-dir")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_folder_that_cannot_be_made_is_refused(command: tuple[str, ...]) -> None:
    """Even where the parent looks writable, as /proc does to root."""
    result = headrace(*command, "--state-dir", "/proc/x")
    assert_refused(result, "the state folder /proc/x", "No such file or directory", "--state-dir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", [*READING, *WRITING], ids=" ".join)
def test_a_closed_folder_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    """A missing permission is not taken for an empty folder."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    assert_refused(headrace(*command, "--state-dir", str(closed)), "Permission denied")


def test_the_folder_of_hosts_must_be_one(tmp_path: Path) -> None:
    """A state folder that something else wrote to has incidents that cannot be read."""
    (tmp_path / "hosts").write_text("")
    result = headrace("incidents", "list", "--state-dir", str(tmp_path))
    assert_refused(result, f"({tmp_path / 'hosts'})")


def test_incidents_that_are_no_file_are_refused(tmp_path: Path) -> None:
    """The message names the file at fault."""
    log = tmp_path / "hosts" / "m1" / "incidents.jsonl"
    log.mkdir(parents=True)
    result = headrace("incidents", "list", "--state-dir", str(tmp_path))
    assert_refused(result, "Is a directory", str(log))


@pytest.mark.parametrize("command", READING[:2], ids=" ".join)
def test_a_state_folder_that_is_not_there_has_no_incidents(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """Looking does not make it."""
    state = tmp_path / "state"
    result = headrace(*command, "--state-dir", str(state))
    assert "no incident" in result.output
    assert not state.exists()


def test_a_pack_goes_elsewhere_than_into_a_file(tmp_path: Path) -> None:
    """`--output` is the option to change."""
    (tmp_path / "file").write_text("")
    result = headrace("pack", "demo", "--output", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "Give another with --output" in result.stderr


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied", "/x/[y]"), "/x/[y]: Permission denied. Check"),
        (OSError(28, "No space left on device"), "error: No space left on device. Check"),
        (TimeoutError(), "error: TimeoutError. Check"),
    ],
)
def test_other_refusals_of_the_system_are_one_line_too(
    error: OSError, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever they come from, with the path if there is one."""
    with pytest.raises(typer.Exit) as caught, endings(Console(stderr=True)):
        raise error
    assert caught.value.exit_code == 1
    written = capsys.readouterr().err
    assert says in written
    assert written.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error_of_a_place() -> None:
    """`headrace ... | head` ends without a word, which click does."""
    with pytest.raises(BrokenPipeError), endings(Console(stderr=True)):
        raise BrokenPipeError


def test_a_usable_state_folder_is_left_empty(tmp_path: Path) -> None:
    """The proof that it can be written to leaves nothing."""
    for _ in range(2):
        prepare_state_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_log_that_cannot_be_opened_blames_the_state_folder(tmp_path: Path) -> None:
    """A file in the place of the folder of logs is named."""
    (tmp_path / "logs").write_text("")
    with pytest.raises(LaunchError, match="state folder") as caught:
        open_log(tmp_path, tmp_path / "logs" / "ray.log")
    assert str(tmp_path / "logs") in str(caught.value)


def test_a_temporary_folder_is_closed_or_refused(tmp_path: Path) -> None:
    """Nobody else looks into it; where none can be made, the message names the place."""
    assert fresh_folder("x-", str(tmp_path)).stat().st_mode & 0o777 == 0o700
    with pytest.raises(LaunchError, match=r"make .*/nowhere writable"):
        fresh_folder("x-", str(tmp_path / "nowhere"))


def test_the_demo_needs_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without one it says which variable gives it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert_refused(headrace("demo"), "no temporary folder can be made", "TMPDIR")
