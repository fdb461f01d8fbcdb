"""`headrace hosts`: what it lists, and what it ends."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_replicas.boot_id import read_boot_id
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.device_claim import HeldDevice, device_folder, try_hold
from headrace_replicas.flight_file import FlightFile
from headrace_replicas.host_files import HostQuarantine, QuarantineFile
from headrace_replicas.host_record import StartsFile
from headrace_replicas.start_gate import Ending, PastStart

pytestmark = pytest.mark.usefixtures("clean_environment")
CLOCK = SystemClock()


def hosts(state_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["hosts", *arguments, "--state-dir", str(state_dir)])


def listed(state_dir: Path) -> list[dict[str, Any]]:
    result = hosts(state_dir, "list", "--json")
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.output)
    return rows


def hold(state_dir: Path, host: str = "m1", device: int = 0) -> HeldDevice:
    held = try_hold(state_dir, host, device)
    assert held is not None
    return held


def died(state_dir: Path, times: int, kind: FaultKind = FaultKind.KILLED) -> None:
    """Engines that died on the first device of `m1`, just now."""
    folder = device_folder(state_dir, "m1", 0)
    held = hold(state_dir)
    for _ in range(times):
        generation = held.claim().generation
        ending = Ending(
            at_s=CLOCK.now_s(), kind=kind, worked=False, lived_s=1.0, text="it died [here]"
        )
        start = PastStart(
            generation=generation, at_s=0.0, pid=os.getpid(), boot_id=read_boot_id(), ending=ending
        )
        file = StartsFile(folder)
        file.started(start)
        words = FlightFile(folder, generation=generation, boot_id="b", clock=CLOCK)
        words.enter("decode", in_flight=["r1"])
        if kind is FaultKind.SUBMISSIONS_IGNORED:
            words.ended("[METAL] Ignored (for causing prior/excessive GPU errors)", 70)
        words.close()
        file.settle(boot_id=read_boot_id(), node_id="", now_s=CLOCK.now_s())
    held.let_go()


def test_a_machine_without_engines_has_nothing_to_list(tmp_path: Path) -> None:
    result = hosts(tmp_path, "list")
    assert result.exit_code == 0
    assert result.output == "no engine has started on this machine\n"
    assert listed(tmp_path) == []


def test_a_device_that_died_often_is_listed_with_its_last_words(tmp_path: Path) -> None:
    died(tmp_path, 3)
    (row,) = listed(tmp_path)
    assert (row["host"], row["device"], row["generation"]) == ("m1", 0, 3)
    assert (row["running"], row["state"]) == (False, "backing_off")
    assert "died without a word while in decode; in flight: r1" in row["last_words"]
    output = hosts(tmp_path, "list").output
    assert "3, gone" in output
    assert "backing_off for " in output
    assert "3 engines in a row died on this device" in output


def test_an_engine_that_runs_is_listed_as_such(tmp_path: Path) -> None:
    held = hold(tmp_path)
    words = FlightFile(held.folder, generation=7, boot_id="b", clock=CLOCK)
    words.enter("prefill")
    (row,) = listed(tmp_path)
    assert (row["running"], row["generation"], row["state"]) == (True, 7, "usable")
    assert row["last_words"] == f"process {os.getpid()} is in prefill"
    assert "allowed" in hosts(tmp_path, "list").output
    words.close()
    held.let_go()


def test_a_release_ends_a_quarantine_and_a_hold(tmp_path: Path) -> None:
    died(tmp_path, 3)
    quarantine = HostQuarantine(
        reason="reboot this host", since_s=0.0, until_s=None, boot_id=read_boot_id()
    )
    QuarantineFile(tmp_path, "m1").impose(quarantine)
    (row,) = listed(tmp_path)
    assert (row["state"], row["reason"], row["until_s"]) == (
        "quarantined", "reboot this host", None,
    )  # fmt: skip
    result = hosts(tmp_path, "release", "m1")
    assert result.exit_code == 0
    assert "m1: its quarantine has ended" in result.output
    assert listed(tmp_path)[0]["state"] == "usable"
    again = hosts(tmp_path, "release", "m1")
    assert again.exit_code == 0
    assert "quarantine" not in again.output


@pytest.mark.parametrize("name", ["m2", "", "..", "../m1", "a/b"])
def test_an_unknown_host_is_an_error_that_names_the_known(tmp_path: Path, name: str) -> None:
    died(tmp_path, 1)
    result = hosts(tmp_path, "release", name)
    assert result.exit_code == 2
    assert "it knows m1" in result.output
    assert "headrace hosts list" in result.output


def test_a_state_folder_that_is_none_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for command in (("list",), ("release", "m1")):
        result = hosts(file, *command)
        assert result.exit_code == 1
        assert "--state-dir" in result.output
