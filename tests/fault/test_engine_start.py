"""Starts of engines on one device, one after another, as Ray Serve makes them.

Engines are processes that die as a test says. The gate waits on a clock that the test moves, so
that a quarter of an hour passes at once.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import HostBusyError, HostQuarantinedError
from headrace_replicas.contract.faults import FaultKind
from headrace_replicas.contract.fleet import HostReported, HostState
from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.device_claim import device_folder, try_hold
from headrace_replicas.engine_start import EngineStart, StartPlace, begin_start
from headrace_replicas.host_files import QuarantineFile
from headrace_replicas.host_record import StartsFile
from headrace_replicas.start_gate import MemoryReading
from tests.support.waiting import comes_true

SETTINGS = FaultSettings(back_off_s=2.0, breaker_hold_s=900.0, memory_wait_s=120.0)
GIB = 2**30


class MovedClock(SystemClock):
    """The system's clock, plus what was slept."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.slept_s

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


@dataclass(slots=True)
class Host:
    """A host with one device, and starts on it."""

    state_dir: Path
    clock: MovedClock = field(default_factory=MovedClock)
    devices: int = 1
    boot_id: str = "boot-1"
    node_id: str = "node-1"
    settings: FaultSettings = SETTINGS
    available_bytes: int = 64 * GIB
    missing: Callable[[int, int], int] = lambda _device, _generation: 0
    told: list[HostReported] = field(default_factory=list)

    @property
    def place(self) -> StartPlace:
        return StartPlace(
            state_dir=self.state_dir,
            host="m1",
            devices=self.devices,
            settings=self.settings,
            boot_id=self.boot_id,
            node_id=self.node_id,
        )

    def start(self) -> EngineStart:
        return begin_start(
            self.place,
            clock=self.clock,
            tell=self.told.append,
            memory=lambda: MemoryReading(available_bytes=self.available_bytes),
            missing_bytes=self.missing,
            draw=lambda: 0.0,
            sleep=self.clock.sleep,
        )

    def run_engine(self, end: str) -> "subprocess.CompletedProcess[str]":
        """An engine in a process of its own, which starts, does `end` and is gone."""
        return subprocess.run(
            [sys.executable, "-c", _ENGINE.format(end=end), str(self.state_dir), self.boot_id,
             str(self.clock.slept_s), self.settings.model_dump_json()],
            check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    @property
    def starts(self) -> StartsFile:
        return StartsFile(device_folder(self.state_dir, "m1", 0))


_ENGINE = """
import os, signal, sys
from pathlib import Path
from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.contract.settings import FaultSettings
from headrace_replicas.engine_start import StartPlace, begin_start
from headrace_replicas.start_gate import MemoryReading
from tests.fault.test_engine_start import GIB, MovedClock

clock = MovedClock()
clock.slept_s = float(sys.argv[3])
place = StartPlace(state_dir=Path(sys.argv[1]), host="m1", devices=1, boot_id=sys.argv[2],
                   node_id="node-1", settings=FaultSettings.model_validate_json(sys.argv[4]))
start = begin_start(place, clock=clock, tell=lambda report: None, sleep=clock.sleep,
                    memory=lambda: MemoryReading(available_bytes=64 * GIB), draw=lambda: 0.0)
recorder = start.recorder
def fault(kind, worked):
    recorder.faulted(FaultReport(kind=kind, raw_text=f"[METAL] {{kind}}", phase="load", in_flight=0,
                                 gpu_work_done_before=worked, at_s=clock.now_s()))
{end}
"""
KILLED = "recorder.enter('decode', in_flight=['r1']); os.kill(os.getpid(), signal.SIGKILL)"
POISONED = (
    "fault(FaultKind.SUBMISSIONS_IGNORED, False); recorder.ended('terminal', 70); os._exit(70)"
)
IN_ORDER = "recorder.worked(); recorder.ended('it was replaced', 0); os._exit(0)"
HELD_40 = f"start.holds({40 * GIB}); recorder.ended('it was replaced', 0); os._exit(0)"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host whose starts in this process are undone at the end."""
    yield Host(tmp_path)
    held = try_hold(tmp_path, "m1", 0)
    if held is not None:
        held.let_go()


def end(start: EngineStart) -> None:
    """End an engine that was started in this process, in order."""
    start.recorder.ended("the test is over", 0)
    assert start.watchdog.wait(60)
    start.recorder.close()
    os.close(start.claim.lock_fd)


def test_a_first_start_waits_for_nothing_and_says_so(host: Host) -> None:
    start = host.start()
    assert host.clock.slept_s == 0
    assert (start.claim.device, start.claim.generation) == (0, 1)
    assert start.origin.predecessor == ""
    assert [(one.state, one.generation) for one in host.told] == [(HostState.USABLE, 1)]
    end(start)


def test_a_watchdog_that_is_killed_is_followed_by_another(host: Host) -> None:
    start = host.start()
    first = start.watchdog.pid
    os.kill(first, signal.SIGKILL)
    assert comes_true(lambda: start.watchdog.pid != first)
    os.kill(start.watchdog.pid, 0)
    end(start)


def test_the_successor_waits_a_moment_and_knows_how_the_engine_before_ended(host: Host) -> None:
    host.run_engine(KILLED)
    start = host.start()
    assert 1 < host.clock.slept_s < 3
    assert start.claim.generation == 2
    origin = start.origin
    assert origin.predecessor_generation == 1
    assert "died without a word while in decode; in flight: r1" in origin.predecessor
    states = [(one.state, one.generation) for one in host.told]
    assert states == [(HostState.BACKING_OFF, 0), (HostState.USABLE, 2)]
    assert "died without a word" in host.told[0].predecessor
    end(start)


def test_an_engine_that_left_in_order_is_followed_at_once(host: Host) -> None:
    for _ in range(5):
        assert host.run_engine(IN_ORDER).returncode == 0
    start = host.start()
    assert host.clock.slept_s == 0
    assert start.origin.predecessor == ""
    assert start.origin.predecessor_generation == 5
    end(start)


def crash(host: Host, how: str, times: int) -> None:
    for number in range(times):
        done = host.run_engine(how)
        assert not done.stderr, done.stderr
        assert len(host.starts.history()) == number + 1
        host.clock.sleep(10)


def test_three_deaths_hold_the_device_and_then_one_start_is_tried(host: Host) -> None:
    """M2."""
    crash(host, KILLED, 3)
    with pytest.raises(HostBusyError, match="3 engines in a row died") as raised:
        host.start()
    assert "headrace hosts release m1" in str(raised.value)
    assert 29 < host.clock.slept_s - 30 < 32
    assert len(host.starts.history()) == 3
    report = host.told[-1]
    assert report.state is HostState.BACKING_OFF
    assert report.until_s is not None
    assert 800 < report.until_s - report.at_s < 900
    host.clock.sleep(900)
    end(host.start())


def test_reports_are_sent_again_because_they_may_be_lost(host: Host) -> None:
    crash(host, KILLED, 3)
    with pytest.raises(HostBusyError):
        host.start()
    assert 5 <= len(host.told) <= 8


def test_a_host_poisoned_from_birth_is_quarantined_after_three_starts(host: Host) -> None:
    """E5: no fourth start, until a reboot."""
    crash(host, POISONED, 3)
    for _ in range(3):
        with pytest.raises(HostQuarantinedError, match="reboot this host"):
            host.start()
        host.clock.sleep(100_000)
    assert len(host.starts.history()) == 3
    assert host.told[-1].state is HostState.QUARANTINED
    assert host.told[-1].until_s is None
    assert QuarantineFile(host.state_dir, "m1").read(now_s=0.0, boot_id="boot-1") is not None
    assert device_folder(host.state_dir, "m1", 0).joinpath("generation").read_text() == "3\n"
    host.boot_id = "boot-2"
    before_s = host.clock.slept_s
    end(host.start())
    assert host.clock.slept_s == before_s


def test_an_operator_releases_a_host(host: Host) -> None:
    crash(host, POISONED, 3)
    with pytest.raises(HostQuarantinedError):
        host.start()
    host.starts.released(host.clock.now_s())
    QuarantineFile(host.state_dir, "m1").lift()
    end(host.start())


def test_no_engine_starts_while_the_memory_of_the_last_is_missing(host: Host) -> None:
    """M1."""
    host.run_engine(HELD_40)
    host.available_bytes = 20 * GIB
    with pytest.raises(HostBusyError, match=r"waiting for memory: 44\.0 GiB"):
        host.start()
    host.clock.sleep(100)
    with pytest.raises(HostQuarantinedError, match="memory is stranded"):
        host.start()
    assert len(host.starts.history()) == 1
    assert device_folder(host.state_dir, "m1", 0).joinpath("generation").read_text() == "1\n"


def test_memory_that_comes_back_late_is_waited_for(host: Host) -> None:
    host.run_engine(HELD_40)
    host.available_bytes = 20 * GIB
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 20:
            host.available_bytes = 60 * GIB
        host.clock.slept_s += seconds

    host.clock.sleep = sleep  # type: ignore[method-assign]
    end(host.start())
    assert len(waited) == 20


def test_memory_can_be_made_to_look_stranded_for_one_generation(host: Host) -> None:
    host.run_engine(HELD_40)
    host.missing = lambda device, generation: 50 * GIB if (device, generation) == (0, 2) else 0
    with pytest.raises(HostBusyError, match="waiting for memory"):
        host.start()


def test_a_device_that_is_held_is_left_for_another(host: Host) -> None:
    crash(host, KILLED, 3)
    host.devices = 2
    start = host.start()
    assert start.claim.device == 1
    end(start)


def test_a_busy_host_is_waited_for_and_reported_to_nobody(host: Host) -> None:
    holder = try_hold(host.state_dir, "m1", 0)
    assert holder is not None
    with pytest.raises(HostBusyError, match="all 1 devices of host m1 are held"):
        host.start()
    assert 59 < host.clock.slept_s < 62
    assert host.told == []
    holder.let_go()


def test_a_refused_start_lets_go_of_the_device(host: Host) -> None:
    crash(host, KILLED, 3)
    with pytest.raises(HostBusyError):
        host.start()
    held = try_hold(host.state_dir, "m1", 0)
    assert held is not None
    held.let_go()


def test_an_engine_that_was_stopped_with_its_node_is_no_death(host: Host) -> None:
    """Stopping and starting `headrace serve` three times must not hold a device."""
    for number in range(4):
        host.node_id = f"node-{number + 2}"
        host.run_engine(KILLED)
        start = host.start()
        assert host.clock.slept_s == 0
        end(start)
    assert all(one.ending is not None and one.ending.orderly for one in host.starts.history()[:-1])


def test_trouble_before_its_node_was_stopped_is_a_death(host: Host) -> None:
    host.run_engine(POISONED)
    host.node_id = "node-2"
    start = host.start()
    assert host.clock.slept_s > 1
    end(start)


def test_the_faults_of_a_host_outlive_its_engines(host: Host) -> None:
    first = host.start()
    first.window.add(FaultKind.TIMEOUT, host.clock.now_s())
    end(first)
    second = host.start()
    assert second.window.read().count([FaultKind.TIMEOUT], host.clock.now_s()) == 1
    end(second)


def test_a_start_that_dies_before_it_takes_notes_is_a_death(host: Host) -> None:
    host.run_engine(IN_ORDER)
    folder = device_folder(host.state_dir, "m1", 0)
    line = {"event": "start", "generation": 2, "at_s": 0.0, "pid": 1, "boot_id": "boot-1"}
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    start = host.start()
    assert host.clock.slept_s > 1
    end(start)
