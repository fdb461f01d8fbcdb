"""The watchdog against real processes that hang, stop, progress and die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_replicas import watchdog_process
from headrace_replicas.last_words import NAME, LastWords, read_last_words, stacks_path
from tests.support.waiting import comes_true
from tests.support.watched_process import LIMITS

PATIENCE_S = 120


@contextmanager
def watched(folder: Path, way: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process that hangs in some way, and its watchdog's process id."""
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.watched_process", str(folder), way],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            assert process.stdout is not None
            word, watchdog = process.stdout.readline().split()
            assert word == "ready"
            yield process, int(watchdog)
        finally:
            process.kill()
            process.communicate()


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def left_by(folder: Path) -> LastWords:
    words = read_last_words(folder / NAME)
    assert words is not None
    return words


@pytest.mark.parametrize(
    ("way", "phase", "stopped", "function"),
    [
        ("hang_without_the_lock", "decode", False, "_hang_without_the_lock"),
        ("hang_with_the_lock", "prefill", True, "_hang_with_the_lock"),
    ],
)
def test_a_hung_process_dumps_its_stacks_and_is_killed(
    tmp_path: Path, way: str, phase: str, stopped: bool, function: str
) -> None:
    """H1 and H2: whether Python's lock is free or held, and SIGTERM ignored."""
    with watched(tmp_path, way) as (process, watchdog):
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert comes_true(lambda: not lives(watchdog))
    verdict = left_by(tmp_path).verdict
    assert verdict is not None
    assert (verdict.phase, verdict.stopped) == (phase, stopped)
    assert verdict.silence_s >= LIMITS.hang_floor_s + LIMITS.hang_grace_s
    stacks = stacks_path(tmp_path, 1)
    assert verdict.stacks == str(stacks)
    assert function in stacks.read_text()
    assert stacks.read_text().count("hread 0x") >= 3
    story = left_by(tmp_path).story()
    assert f"the watchdog killed it after {verdict.silence_s:.1f} s in {phase}" in story
    assert "in flight: r1" in story


def test_an_idle_process_that_was_stopped_is_killed_and_could_not_dump(tmp_path: Path) -> None:
    with watched(tmp_path, "idle") as (process, _):
        assert comes_true(lambda: left_by(tmp_path).beats >= 1)
        process.send_signal(signal.SIGSTOP)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    verdict = left_by(tmp_path).verdict
    assert verdict is not None
    assert (verdict.phase, verdict.stopped, verdict.stacks) == ("idle", True, "")
    assert "it could not dump stacks" in left_by(tmp_path).story()


@pytest.mark.parametrize("way", ["progress", "read"])
def test_who_progresses_or_waits_for_storage_is_left_alone(tmp_path: Path, way: str) -> None:
    with watched(tmp_path, way) as (process, watchdog):
        assert process.wait(PATIENCE_S) == 0
        assert not lives(watchdog)
    left = left_by(tmp_path)
    assert left.orderly
    assert left.verdict is None
    assert not stacks_path(tmp_path, 1).read_text()


def test_an_idle_process_lives_on(tmp_path: Path) -> None:
    with watched(tmp_path, "idle") as (process, watchdog):
        time.sleep(3 * LIMITS.hang_floor_s)
        assert process.poll() is None
        assert lives(watchdog)
        process.kill()
        process.wait(PATIENCE_S)
        assert comes_true(lambda: not lives(watchdog))
    assert left_by(tmp_path).verdict is None


def test_a_kill_leaves_what_was_being_done(tmp_path: Path) -> None:
    with watched(tmp_path, "kill_itself") as (process, _):
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert "it died without a word while in load, shard 2 of 9;" in left_by(tmp_path).story()


def test_an_abort_leaves_its_reason_and_its_stacks(tmp_path: Path) -> None:
    """A1: MLX's own words are found in the file that its stderr went to."""
    with watched(tmp_path, "abort") as (process, _):
        assert process.wait(PATIENCE_S) == -signal.SIGABRT
    left = left_by(tmp_path)
    assert left.crash == "Fatal Python error: Aborted"
    assert "kIOGPUCommandBufferCallbackErrorTimeout" in left.stderr_tail
    assert "_abort" in stacks_path(tmp_path, 1).read_text()
    assert "crashed in decode (Fatal Python error: Aborted; libc++abi: terminating" in left.story()


def test_a_process_that_leaves_says_why(tmp_path: Path) -> None:
    with watched(tmp_path, "leave_with_a_fault") as (process, _):
        assert process.wait(PATIENCE_S) == 70
    left = left_by(tmp_path)
    assert (left.ended, left.status, left.worked) == ("a terminal fault", 70, False)
    assert left.fault is not None


def test_a_watchdog_without_a_subject_says_so(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "headrace_replicas.watchdog", f"--file={tmp_path}/none"]
    arguments += [f"--{limit}-s=1" for limit in ("floor", "first", "reading", "grace")]
    arguments.append(f"--pid={os.getpid()}")
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing to watch" in done.stderr


class Ended:
    """A watchdog's process that has ended.

    Args:
        status: Its exit status.
    """

    def __init__(self, status: int) -> None:
        self._status = status

    def wait(self) -> int:
        return self._status


def test_a_watchdog_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine would never be watched again, and nobody would know."""
    outcomes: list[Ended | OSError] = [Ended(1), OSError("no more processes"), Ended(0)]

    def spawn(_file: Path, _settings: object) -> Ended:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(watchdog_process, "spawn_watchdog", spawn)
    monkeypatch.setattr(watchdog_process, "_AGAIN_S", 0.0)
    watchdog = watchdog_process.Watchdog(tmp_path / NAME, LIMITS)
    assert watchdog.wait(PATIENCE_S)
    assert outcomes == []


def foreign_modules(program: str) -> set[str]:
    """Top-level names outside the standard library that are imported after a program."""
    listing = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; {listing}"], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split()) - set(sys.stdlib_module_names)


def test_the_watchdog_needs_nothing_but_the_standard_library() -> None:
    brought = foreign_modules("import headrace_replicas.watchdog") - foreign_modules("pass")
    assert brought == {"headrace_replicas"}
