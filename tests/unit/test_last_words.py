"""What survives a process, and what is told of it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.contract.flight import FlightRecorder
from headrace_replicas.flight_file import FlightFile
from headrace_replicas.flight_layout import FAULT, FILE_BYTES, read_slot, write_slot
from headrace_replicas.last_words import (
    NAME,
    LastWords,
    Verdict,
    read_last_words,
    stacks_path,
    verdict_path,
    words_in,
)

CLOCK = SystemClock()
# Behind any sign of life of this run's processes, however slow it is.
AT_THE_END_S = CLOCK.now_s() + 3600
FAULT_TEXT = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)


def report(text: str = FAULT_TEXT, at_s: float = AT_THE_END_S) -> FaultReport:
    return FaultReport(
        kind=FaultKind.SUBMISSIONS_IGNORED,
        raw_text=text,
        phase="decode",
        in_flight=2,
        gpu_work_done_before=True,
        at_s=at_s,
    )


@contextmanager
def recording(folder: Path, generation: int = 1) -> Iterator[FlightFile]:
    file = FlightFile(folder, generation=generation, boot_id="boot-1", clock=CLOCK)
    try:
        yield file
    finally:
        file.close()


def words(folder: Path) -> LastWords:
    found = read_last_words(folder / NAME)
    assert found is not None
    return found


def test_notes_are_read_while_they_are_taken(tmp_path: Path) -> None:
    with recording(tmp_path, 7) as file:
        recorder: FlightRecorder = file
        first = words(tmp_path)
        assert (first.pid, first.generation, first.boot_id) == (os.getpid(), 7, "boot-1")
        assert (first.phase, first.worked, first.in_flight) == ("idle", False, ())
        recorder.enter("prefill", in_flight=("r1", "r2"), detail="chunk 1")
        now = words(tmp_path)
        assert (now.phase, now.busy, now.in_flight) == ("prefill", True, ("r1", "r2"))
        assert (now.detail, now.marks) == ("chunk 1", 1)
        recorder.progressed("chunk 2")
        recorder.progressed()
        recorder.worked()
        later = words(tmp_path)
        assert (later.detail, later.marks, later.worked) == ("chunk 2", 3, True)
        assert later.progress_ns > now.progress_ns
        recorder.enter("idle")
        assert words(tmp_path).in_flight == ()
        assert not words(tmp_path).busy


def test_a_fault_is_kept_in_full_and_the_first_ending_stands(tmp_path: Path) -> None:
    with recording(tmp_path) as file:
        file.faulted(report())
        assert words(tmp_path).fault == report()
        file.ended("Metal ignores this process", 70)
        file.ended("later", 0)
    left = words(tmp_path)
    assert (left.ended, left.status, left.orderly) == ("Metal ignores this process", 70, False)


@pytest.mark.parametrize("text", ["x" * 100_000, "\N{SNOWMAN}" * 40_000])
def test_an_endless_fault_is_cut_not_lost(tmp_path: Path, text: str) -> None:
    with recording(tmp_path) as file:
        file.faulted(report(text))
    fault = words(tmp_path).fault
    assert fault is not None
    assert len(fault.raw_text) > 2_000
    assert text.startswith(fault.raw_text)


def test_of_many_requests_the_first_are_named_and_all_are_counted(tmp_path: Path) -> None:
    with recording(tmp_path) as file:
        file.enter("decode", in_flight=[f"request-{number}-{'x' * 200}" for number in range(300)])
    left = words(tmp_path)
    assert left.in_flight_count == 300
    assert left.in_flight[0].startswith("request-0-")
    assert "and 295 more" in left.story()


def test_the_heart_beats(tmp_path: Path) -> None:
    from tests.support.waiting import comes_true

    with recording(tmp_path):
        assert comes_true(lambda: words(tmp_path).beats >= 2)


def test_the_newest_eight_predecessors_are_kept(tmp_path: Path) -> None:
    for generation in range(1, 13):
        with recording(tmp_path, generation) as file:
            stacks_path(tmp_path, generation).write_text("stacks")
            before = file.predecessor
            assert (before.generation if before else 0) == generation - 1
    kept = sorted(int(path.suffix[1:]) for path in tmp_path.glob(f"{NAME}.*"))
    assert kept == list(range(4, 12))
    assert not stacks_path(tmp_path, 3).exists()
    assert stacks_path(tmp_path, 4).exists()
    old = read_last_words(tmp_path / f"{NAME}.5")
    assert old is not None
    assert old.generation == 5


def test_traces_of_another_process_with_the_same_number_are_not_taken(tmp_path: Path) -> None:
    stacks_path(tmp_path, 1).write_text("Fatal Python error: Aborted\n")
    with recording(tmp_path):
        assert words(tmp_path).crash == ""
    stranger = Verdict(
        pid=1, started_s=0.0, phase="idle", silence_s=1.0, allowed_s=1.0, stopped=False, stacks="",
        at_s=0.0,
    )  # fmt: skip
    verdict_path(tmp_path, 1).write_text(json.dumps(asdict(stranger)))
    assert words(tmp_path).verdict is None


def told(folder: Path) -> str:
    return words(folder).story().split(": ", 1)[1]


def test_a_story_says_how_it_ended_and_what_was_lost(tmp_path: Path) -> None:
    with recording(tmp_path) as file:
        file.enter("decode", in_flight=["r1"], detail="step 9")
        assert told(tmp_path) == (
            "it died without a word while in decode, step 9; in flight: r1; its GPU had never "
            "completed any work."
        )
        file.worked()
        file.faulted(report())
        assert told(tmp_path) == (
            f"it died in decode, step 9 after submissions_ignored: {FAULT_TEXT}; in flight: r1; "
            "its GPU had worked."
        )
        file.ended("it left as it was told", 0)
        assert told(tmp_path).startswith("it left as it was told (exit status 0); in flight: r1;")
        assert words(tmp_path).orderly


def test_a_story_tells_of_an_end_with_a_fault(tmp_path: Path) -> None:
    with recording(tmp_path) as file:
        file.faulted(report())
        file.ended("a terminal fault", 70)
    assert told(tmp_path).startswith(
        f"a terminal fault (exit status 70) after submissions_ignored: {FAULT_TEXT}; nothing was"
    )


def test_a_fault_that_was_survived_is_not_the_end(tmp_path: Path) -> None:
    with recording(tmp_path) as file:
        file.faulted(report(at_s=AT_THE_END_S - 7200))
    assert words(tmp_path).fault is not None
    assert told(tmp_path).startswith("it died without a word while in idle;")


def test_a_story_tells_of_the_watchdog(tmp_path: Path) -> None:
    with recording(tmp_path) as file:
        verdict = Verdict(
            pid=os.getpid(), started_s=file.started_s, phase="prefill", silence_s=31.25,
            allowed_s=30.0, stopped=True, stacks="/state/stacks.1", at_s=1.0,
        )  # fmt: skip
        verdict_path(tmp_path, 1).write_text(json.dumps(asdict(verdict)))
        assert words(tmp_path).verdict == verdict
    assert told(tmp_path).startswith(
        "the watchdog killed it after 31.2 s in prefill (nothing of it moved, not even its "
        "heartbeat; 30.0 s were allowed); its stacks are in /state/stacks.1;"
    )


@settings(max_examples=30)  # each writes files to the disk
@given(st.data())
def test_a_damaged_file_is_no_reason_to_fail(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("device")
    with recording(folder) as file:
        file.enter("decode", in_flight=["r1"], detail="step")
        file.faulted(report())
    raw = bytearray((folder / NAME).read_bytes())
    for _ in range(data.draw(st.integers(0, 20))):
        raw[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    (folder / NAME).write_bytes(raw[: data.draw(st.integers(0, FILE_BYTES - 1))])
    assert read_last_words(folder / NAME) is None
    (folder / NAME).write_bytes(raw)
    found = read_last_words(folder / NAME)
    if found is not None:
        found.story()


def test_no_file_and_foreign_files_have_no_words(tmp_path: Path) -> None:
    assert read_last_words(tmp_path / NAME) is None
    (tmp_path / NAME).write_bytes(b"\xff" * FILE_BYTES)
    assert read_last_words(tmp_path / NAME) is None
    assert words_in(b"") is None


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=6), st.data())
def test_a_reader_in_the_middle_of_a_write_gets_the_text_before(
    texts: list[bytes], data: st.DataObject
) -> None:
    """Whatever bytes of the buffer that is being written are wrong, the other one is whole."""
    view = bytearray(FILE_BYTES)
    for text in texts:
        write_slot(view, FAULT, text)
        assert read_slot(view, FAULT) == text
    untouched = bytes(view)
    write_slot(view, FAULT, b"the next text, longer than any of the others" * 3)
    changed = [at for at in range(FILE_BYTES) if view[at] != untouched[at]]
    half = bytearray(untouched)
    for at in changed[len(changed) // 2 :]:
        half[at] = view[at]
    keep = data.draw(st.sampled_from(changed))
    half[keep] = untouched[keep]
    assert read_slot(half, FAULT) in (texts[-1], read_slot(view, FAULT))
