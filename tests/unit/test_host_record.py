"""The files of a host: starts, quarantine, faults; whole, cut, and written by many."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.flight_file import FlightFile
from headrace_replicas.host_files import FaultWindowFile, HostQuarantine, QuarantineFile
from headrace_replicas.host_record import StartsFile, history_in, kind_of
from headrace_replicas.json_lines import JsonLines
from headrace_replicas.last_words import NAME, LastWords, Verdict, read_last_words
from headrace_replicas.start_gate import MemoryReading, PastStart

CLOCK = SystemClock()


def start(generation: int = 1, pid: int | None = None) -> PastStart:
    return PastStart(
        generation=generation,
        at_s=CLOCK.now_s(),
        pid=os.getpid() if pid is None else pid,
        boot_id="boot-1",
        node_id="node-1",
        memory=MemoryReading(available_bytes=1000, wired_bytes=10),
    )


def test_starts_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = StartsFile(tmp_path / "devices" / "0")
    first = start()
    file.started(first)
    file.held(1, 700)
    file.stranded(1, 5.0)
    assert file.history() == (replace(first, held_bytes=700, stranded_s=5.0),)


def test_a_released_device_has_no_past(tmp_path: Path) -> None:
    file = StartsFile(tmp_path)
    file.started(start())
    file.released(1.0)
    file.held(1, 700)
    assert file.history() == ()
    file.started(start(2))
    assert [one.generation for one in file.history()] == [2]


def settled(folder: Path, boot_id: str = "boot-1", now_s: float = 9e9) -> PastStart:
    file = StartsFile(folder)
    history = file.settle(boot_id=boot_id, node_id="node-1", now_s=now_s)
    assert file.history() == history
    assert file.settle(boot_id="other", node_id="", now_s=0.0) == history, "an ending is noted once"
    return history[-1]


def test_the_ending_of_an_engine_is_noted_from_its_last_words(tmp_path: Path) -> None:
    StartsFile(tmp_path).started(start())
    words = FlightFile(tmp_path, generation=1, boot_id="boot-1", clock=CLOCK)
    words.worked()
    words.enter("decode", in_flight=["r1"])
    words.close()
    ending = settled(tmp_path).ending
    assert ending is not None
    assert (ending.kind, ending.worked, ending.host_down) == (FaultKind.KILLED, True, False)
    assert abs(ending.at_s - CLOCK.now_s()) < 60
    assert "died without a word while in decode" in ending.text


def test_an_end_in_order_is_no_death(tmp_path: Path) -> None:
    StartsFile(tmp_path).started(start())
    words = FlightFile(tmp_path, generation=1, boot_id="boot-1", clock=CLOCK)
    words.ended("it left as it was told", 0)
    words.close()
    ending = settled(tmp_path).ending
    assert ending is not None
    assert ending.orderly


def test_another_boot_means_that_the_host_went_down(tmp_path: Path) -> None:
    StartsFile(tmp_path).started(start())
    FlightFile(tmp_path, generation=1, boot_id="boot-1", clock=CLOCK).close()
    ending = settled(tmp_path, boot_id="boot-2").ending
    assert ending is not None
    assert ending.host_down
    assert "The host went down under it" in ending.text


def test_who_died_before_taking_notes_is_a_death_too(tmp_path: Path) -> None:
    FlightFile(tmp_path, generation=1, boot_id="boot-1", clock=CLOCK).close()
    StartsFile(tmp_path).started(start(generation=2))
    ending = settled(tmp_path, now_s=77.0).ending
    assert ending is not None
    assert (ending.kind, ending.at_s, ending.lived_s) == (FaultKind.EXITED, 77.0, 0.0)


def words_of(tmp_path: Path) -> LastWords:
    FlightFile(tmp_path, generation=1, boot_id="boot-1", clock=CLOCK).close()
    words = read_last_words(tmp_path / NAME)
    assert words is not None
    return words


def test_the_kind_of_an_ending(tmp_path: Path) -> None:
    words = words_of(tmp_path)
    fault = FaultReport(
        kind=FaultKind.SUBMISSIONS_IGNORED, raw_text="x", phase="load", in_flight=0,
        gpu_work_done_before=False, at_s=CLOCK.now_s(),
    )  # fmt: skip
    verdict = Verdict(
        pid=1, started_s=1.0, phase="load", silence_s=1.0, allowed_s=1.0, stopped=False,
        stacks="", at_s=1.0,
    )  # fmt: skip
    metal = (
        "an older line: kIOGPUCommandBufferCallbackErrorPageFault\n"
        "libc++abi: terminating due to uncaught exception: [METAL] Command buffer execution "
        "failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
    )
    aborted = "Fatal Python error: Aborted"
    assert kind_of(words) is FaultKind.KILLED
    assert kind_of(replace(words, verdict=verdict, fault=fault)) is FaultKind.NO_PROGRESS
    assert kind_of(replace(words, fault=fault)) is FaultKind.SUBMISSIONS_IGNORED
    survived = replace(fault, at_s=fault.at_s - 3600)
    assert kind_of(replace(words, fault=survived)) is FaultKind.KILLED
    assert kind_of(replace(words, fault=fault, ended="x", status=0)) is None
    assert kind_of(replace(words, fault=fault, ended="x", status=70)) is fault.kind
    assert kind_of(replace(words, ended="x", status=1)) is FaultKind.EXITED
    assert kind_of(replace(words, crash=aborted)) is FaultKind.ABORTED
    assert kind_of(replace(words, crash=aborted, stderr_tail=metal)) is FaultKind.TIMEOUT


LINES = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"event": st.sampled_from(["start", "held", "stranded", "end", "released", "new"])},
        optional={
            "generation": st.integers(0, 3) | st.text(max_size=3) | st.none(),
            "at_s": st.floats() | st.none(),
            "pid": st.integers() | st.lists(st.integers(), max_size=2),
            "boot_id": st.text(max_size=3),
            "memory": st.none() | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
            "held_bytes": st.integers() | st.none() | st.text(max_size=3),
            "ending": st.none() | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        },
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=30)  # each writes files to the disk
@given(st.lists(LINES, max_size=20))
def test_lines_that_nobody_understands_are_passed_over(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("device")
    (folder / "starts.jsonl").write_bytes(b"\n".join(lines))
    (folder / "hosts" / "h").mkdir(parents=True)
    (folder / "hosts" / "h" / "faults.jsonl").write_bytes(b"\n".join(lines))
    (folder / "hosts" / "h" / "quarantine.json").write_bytes(b"\n".join(lines))
    file = StartsFile(folder)
    before = file.history()
    file.started(start(9))
    after = file.history()
    assert after[-1].generation == 9
    assert after[:-1] == before[-63:] or repr(after[:-1]) == repr(before[-63:])  # NaN differs
    QuarantineFile(folder, "h").read(now_s=0.0, boot_id="")
    faults = FaultWindowFile(folder, "h", length_s=100.0)
    assert (FaultKind.HANG, 5.0) in faults.add(FaultKind.HANG, 5.0).faults


def test_a_line_that_a_crash_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    lines = JsonLines(path=tmp_path / "x.jsonl")
    lines.append({"n": 1})
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write(b'{"n": 2')
    lines.append({"n": 3})
    assert list(lines.read()) == [{"n": 1}, {"n": 3}]


def test_a_file_of_lines_stays_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    lines = JsonLines(path=tmp_path / "x.jsonl", keep=5, limit_bytes=200)
    for number in range(100):
        lines.append({"n": number})
    numbers = [record["n"] for record in lines.read()]
    assert numbers == list(range(100 - len(numbers), 100))
    assert 5 <= len(numbers) < 40


def test_many_processes_write_one_window(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from headrace_replicas.contract.faults import FaultKind\n"
        "from headrace_replicas.host_files import FaultWindowFile\n"
        "file = FaultWindowFile(Path(sys.argv[1]), 'h', length_s=1e9)\n"
        "for number in range(50): file.add(FaultKind.TIMEOUT, int(sys.argv[2]) * 1000 + number)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(number)])
        for number in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    window = FaultWindowFile(tmp_path, "h", length_s=1e9).read()
    assert len(set(window.faults)) == 150
    assert window.faults == tuple(sorted(window.faults, key=lambda pair: pair[1]))


def test_the_window_outlives_processes_and_forgets_by_time(tmp_path: Path) -> None:
    FaultWindowFile(tmp_path, "h", length_s=100.0).add(FaultKind.TIMEOUT, 10.0)
    window = FaultWindowFile(tmp_path, "h", length_s=100.0).add(FaultKind.TIMEOUT, 60.0)
    assert window.count([FaultKind.TIMEOUT], 61.0) == 2
    assert window.count([FaultKind.TIMEOUT], 115.0) == 1


def test_a_quarantine_ends_by_time_by_a_reboot_or_by_an_operator(tmp_path: Path) -> None:
    file = QuarantineFile(tmp_path, "h")
    assert file.read(now_s=0.0, boot_id="b1") is None
    quarantine = HostQuarantine(reason="why", since_s=1.0, until_s=100.0, boot_id="b1")
    file.impose(quarantine)
    assert file.read(now_s=99.0, boot_id="b1") == quarantine
    assert file.read(now_s=100.0, boot_id="b1") is None
    assert file.read(now_s=50.0, boot_id="b2") is None
    file.impose(replace(quarantine, until_s=None))
    assert file.read(now_s=1e12, boot_id="b1") is not None
    assert file.lift()
    assert not file.lift()
    assert file.read(now_s=1e12, boot_id="b1") is None


def test_the_history_is_bounded() -> None:
    events = [
        {"event": "start", "generation": n, "at_s": n, "pid": n, "boot_id": "b"} for n in range(500)
    ]
    history = history_in(events)
    assert len(history) == 64
    assert history[-1].generation == 499


def test_what_a_full_disk_does_not_take_counts_in_its_process(tmp_path: Path) -> None:
    """An engine must come to its answer to a fault, whatever its disk says."""
    (tmp_path / "hosts").write_text("in the way of the folder")
    window = FaultWindowFile(tmp_path, "h", length_s=100.0)
    window.add(FaultKind.OUT_OF_MEMORY, 1.0)
    assert window.add(FaultKind.OUT_OF_MEMORY, 2.0).count([FaultKind.OUT_OF_MEMORY], 2.0) == 2
    assert FaultWindowFile(tmp_path, "h", length_s=100.0).read().faults == ()


@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400])
def test_numbers_beyond_all_bounds_are_passed_over(tmp_path: Path, number: str) -> None:
    folder = tmp_path / "hosts" / "h"
    starts = StartsFile(folder)
    starts.started(start())
    with (folder / "starts.jsonl").open("a") as file:
        file.write(f'{{"event": "held", "generation": 1, "held_bytes": {number}}}\n')
        file.write(f'{{"event": "stranded", "generation": 1, "stranded_s": {number}}}\n')
    assert [one.held_bytes for one in starts.history()] == [0 if "e" in number else int(number)]
    (folder / "faults.jsonl").write_text(f'{{"kind": "timeout", "at_s": {number}}}\n')
    window = FaultWindowFile(tmp_path, "h", length_s=100.0)
    window.add(FaultKind.TIMEOUT, 1.0)
    assert (FaultKind.TIMEOUT, 1.0) in window.read().faults
    (folder / "quarantine.json").write_text(
        f'{{"reason": "r", "since_s": {number}, "until_s": {number}, "boot_id": "other"}}'
    )
    assert QuarantineFile(tmp_path, "h").read(now_s=1.0, boot_id="b") is None
