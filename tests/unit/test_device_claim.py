"""One engine process per device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import HostBusyError
from headrace_replicas.device_claim import claim_device, device_folder

CLOCK = SystemClock()


def test_each_process_gets_a_device_of_its_own(tmp_path: Path) -> None:
    claims = [claim_device(tmp_path, "h", devices=2, wait_s=0, clock=CLOCK) for _ in range(2)]
    assert [claim.device for claim in claims] == [0, 1]
    with pytest.raises(HostBusyError, match="all 2 devices of host h"):
        claim_device(tmp_path, "h", devices=2, wait_s=0.2, clock=CLOCK)


def test_the_generation_rises_with_every_start(tmp_path: Path) -> None:
    generations = []
    for _ in range(3):
        claim = claim_device(tmp_path, "h", devices=1, wait_s=0, clock=CLOCK)
        generations.append(claim.generation)
        os.close(claim.lock_fd)
    assert generations == [1, 2, 3]


@pytest.mark.parametrize("damage", [b"no number", b"\xff\xfe", "²".encode(), b"9" * 20, b""])
def test_a_damaged_counter_starts_again(tmp_path: Path, damage: bytes) -> None:
    folder = device_folder(tmp_path, "h", 0)
    folder.mkdir(parents=True)
    (folder / "generation").write_bytes(damage)
    assert claim_device(tmp_path, "h", devices=1, wait_s=0, clock=CLOCK).generation == 1


def test_a_killed_process_frees_its_device_at_once(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from headrace_replicas.contract.clock import SystemClock\n"
        "from headrace_replicas.device_claim import claim_device\n"
        "claim_device(Path(sys.argv[1]), 'h', devices=1, wait_s=0, clock=SystemClock())\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(HostBusyError):
        claim_device(tmp_path, "h", devices=1, wait_s=0, clock=CLOCK)
    assert (device_folder(tmp_path, "h", 0) / "engine.lock").read_text() == f"{holder.pid}\n"
    holder.kill()
    holder.communicate()
    assert claim_device(tmp_path, "h", devices=1, wait_s=5, clock=CLOCK).generation == 2


def test_hosts_do_not_share_devices(tmp_path: Path) -> None:
    assert claim_device(tmp_path, "a", devices=1, wait_s=0, clock=CLOCK).device == 0
    assert claim_device(tmp_path, "b", devices=1, wait_s=0, clock=CLOCK).device == 0
