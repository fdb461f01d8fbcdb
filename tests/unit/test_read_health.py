"""What is told of a model's reads, also while one of them does not come back."""

import threading
from pathlib import Path

import pytest

from headrace_replicas.engine.experts.read_health import SLOW_READ_S, ReadHealth

FILES = [Path("/models/a"), Path("/models/b")]


def on_a_thread(act: object, *arguments: object) -> None:
    thread = threading.Thread(target=act, args=arguments)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_quick_reads_are_no_trouble() -> None:
    health = ReadHealth(FILES, failures=3)
    health.began(0, 10, 0.0)
    assert health.report(SLOW_READ_S - 0.1).trouble == ""
    health.ended(700, 1.0)
    health.began(1, None, 1.0)
    health.ended(0, 1.1)
    assert health.report(100.0) == health.report(0.0)
    assert health.report(100.0).troubles == 0
    assert health.arrived_bytes == 700


def test_a_read_that_waits_is_named_while_it_waits_and_counted_once() -> None:
    health = ReadHealth(FILES, failures=3)
    health.began(1, 4096, 0.0)
    waiting = health.report(60.0)
    assert waiting.trouble == "a read of /models/b at byte 4096 has not come back for 60.0 s"
    health.ended(10, 61.0)
    after = health.report(80.0)
    assert after.trouble == "a read of /models/b at byte 4096 took 61.0 s"
    assert waiting.troubles == after.troubles == 1
    assert not after.lost


def test_a_look_at_a_file_that_does_not_come_back_is_named_too() -> None:
    health = ReadHealth(FILES, failures=3)
    health.began(0, None, 0.0)
    assert health.report(3.0).trouble == "a look at /models/a has not come back for 3.0 s"


def test_of_many_that_wait_the_oldest_is_named() -> None:
    health = ReadHealth(FILES, failures=3)
    on_a_thread(health.began, 0, 0, 5.0)
    health.began(1, 8, 1.0)
    report = health.report(20.0)
    assert report.trouble.startswith("a read of /models/b at byte 8 has not come back for 19.0 s")
    assert report.trouble.endswith("and 1 more wait")
    assert report.troubles == 2


@pytest.mark.parametrize(
    ("times_s", "lost"),
    [((0, 1), False), ((0, 1, 2), True), ((0, 500, 1000), False), ((0, 500, 1000, 1100), True)],
)
def test_a_file_is_lost_after_some_failures_in_a_quarter_of_an_hour(
    times_s: tuple[float, ...], lost: bool
) -> None:
    health = ReadHealth(FILES, failures=3)
    for at_s in times_s:
        health.failed(0, "a fails", changed=False, now_s=at_s)
    assert health.report(at_s).lost is lost
    assert health.report(at_s).troubles == len(times_s)
    assert health.report(at_s).trouble == f"a fails (failure {len(times_s)})"


def test_failures_of_different_files_do_not_add_up() -> None:
    health = ReadHealth(FILES, failures=2)
    for file in (0, 1):
        health.failed(file, "fails", changed=False, now_s=0.0)
    assert not health.report(0.0).lost


def test_a_changed_file_is_lost_at_once_and_for_good() -> None:
    health = ReadHealth(FILES, failures=3)
    health.failed(0, "a was cut", changed=True, now_s=0.0)
    health.failed(1, "b fails", changed=False, now_s=5000.0)
    assert health.report(9999.0).lost
