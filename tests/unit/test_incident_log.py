"""Incidents on disk: bounded, and nothing that is open is lost."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.fleet import Cause, Incident
from headrace_serve import incidents
from headrace_serve.incident_log import IncidentLog


def opened(number: int, text: str = "it died") -> Incident:
    return incidents.open_(
        cause=Cause.REPLICA_DIED,
        host="m1",
        replica=f"r{number}",
        generation=1,
        text=text,
        at_s=1000.0 + number,
    )


def closed(incident: Incident) -> Incident:
    return incidents.close(incident, why="over", at_s=incident.opened_s + 1.0)


def small(folder: Path, file_bytes: int = 2000) -> IncidentLog:
    return IncidentLog(folder, "m1", file_bytes=file_bytes, files_count=4)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "hosts" / "m1").iterdir())


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        json.dumps({"id": "x", "opened_s": "yesterday"}).encode(),
        json.dumps({"id": "x", "opened_s": float("inf")}).encode(),
        json.dumps({"id": "x", "opened_s": 10**400}).encode(),
        json.dumps({"id": ["x"], "opened_s": 1.0}).encode(),
    ],
)
def test_a_damaged_line_costs_itself_only(tmp_path: Path, line: bytes) -> None:
    """A controller that cannot read what is open would not start, and neither would the next."""
    log = IncidentLog(tmp_path, "m1")
    log.write(opened(1))
    whole = json.loads((tmp_path / "hosts/m1/incidents.jsonl").read_bytes())
    if line.startswith(b"{"):
        line = json.dumps({**whole, **json.loads(line)}).encode()
    with (tmp_path / "hosts/m1/incidents.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert log.left_open() == (opened(1),)


def test_the_newest_state_counts(tmp_path: Path) -> None:
    log = IncidentLog(tmp_path, "m1")
    log.write(opened(1))
    log.write(opened(2))
    log.write(closed(opened(1)))
    assert log.read() == (closed(opened(1)), opened(2))
    assert log.left_open() == (opened(2),)


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    log = IncidentLog(tmp_path / "none", "m1")
    assert (log.exists(), log.read(), log.left_open()) == (False, (), ())
    assert not (tmp_path / "none").exists()


def test_old_files_go_and_no_file_grows_beyond_its_size(tmp_path: Path) -> None:
    log = small(tmp_path)
    for number in range(100):
        log.write(closed(opened(number)))
    assert files(tmp_path) == [
        "incidents.1.jsonl",
        "incidents.2.jsonl",
        "incidents.3.jsonl",
        "incidents.jsonl",
    ]
    for path in (tmp_path / "hosts" / "m1").iterdir():
        assert path.stat().st_size <= 2000
    kept = [int(one.replica[1:]) for one in log.read()]
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 8


def test_what_is_open_outlives_any_number_of_files(tmp_path: Path) -> None:
    log = small(tmp_path)
    log.write(opened(0, "still open"))
    for number in range(1, 100):
        log.write(closed(opened(number)))
    assert log.read()[0] == opened(0, "still open")
    assert log.left_open() == (opened(0, "still open"),)
    assert IncidentLog(tmp_path, "m1").left_open() == (opened(0, "still open"),)


def test_what_was_closed_since_is_not_carried_over(tmp_path: Path) -> None:
    log = small(tmp_path)
    log.write(opened(0))
    log.write(closed(opened(0)))
    for number in range(1, 100):
        log.write(closed(opened(number)))
    assert log.left_open() == ()
    assert opened(0).id not in {one.id for one in log.read()}


@given(
    st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.text(max_size=200)), max_size=60),
    st.integers(1, 4000),
)
def test_the_log_tells_each_open_incident_whatever_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[int, bool, str]],
    file_bytes: int,
) -> None:
    """Whatever the size of files, the newest state of what is open is never lost."""
    log = small(tmp_path_factory.mktemp("log"), file_bytes)
    newest: dict[str, Incident] = {}
    for number, is_closed, text in writes:
        state = replace(opened(number), evidence=(text.encode("utf-8", "replace").decode(),))
        state = closed(state) if is_closed else state
        log.write(state)
        newest[state.id] = state
    still_open = {name: one for name, one in newest.items() if one.closed_s is None}
    assert {one.id: one for one in log.left_open()} == still_open
    told = {one.id: one for one in log.read()}
    assert {name: told.get(name) for name in still_open} == still_open


def test_a_state_longer_than_a_file_is_written_all_the_same(tmp_path: Path) -> None:
    log = small(tmp_path, 10)
    log.write(opened(1))
    log.write(opened(2))
    assert log.left_open() == (opened(1), opened(2))


def test_a_line_that_a_crash_cut_off_costs_itself_only(tmp_path: Path) -> None:
    """Cut in the middle of a character, too; the next state begins a line of its own."""
    log = IncidentLog(tmp_path, "m1")
    log.write(opened(1))
    file = tmp_path / "hosts" / "m1" / "incidents.jsonl"
    torn = json.dumps({"id": "torn ü"}, ensure_ascii=False).encode()[:-2]
    with file.open("ab") as held:
        held.write(torn[:-1])
    log.write(opened(2))
    assert log.read() == (opened(1), opened(2))


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\x0cb\x1eb", "\ud800", "a\r\nb"])
def test_whatever_an_exception_says_stays_on_its_line(tmp_path: Path, text: str) -> None:
    """Separators that only Python takes for line ends, and what UTF-8 cannot say."""
    log = IncidentLog(tmp_path, "m1")
    log.write(opened(1, text))
    (told,) = log.read()
    assert told.evidence[0] == text.encode("utf-8", "replace").decode()


def test_a_crash_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    log = small(tmp_path)
    log.write(opened(0))
    folder = tmp_path / "hosts" / "m1"
    (folder / "incidents.jsonl").replace(folder / "incidents.1.jsonl")
    (folder / "incidents.next").write_text("half of a li")
    assert log.exists()
    assert log.read() == log.left_open() == (opened(0),)
    for number in range(1, 30):
        log.write(closed(opened(number)))
    assert "incidents.next" not in files(tmp_path)
    assert log.left_open() == (opened(0),)


def test_many_may_write_at_once(tmp_path: Path) -> None:
    log = small(tmp_path, 6000)

    def write(first: int) -> None:
        for number in range(first, first + 10):
            log.write(opened(number))

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 10, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(log.left_open()) == 30
