"""Faulty storage under one of two engines, over HTTP; `make seed1` does it at full length."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.storage import FaultyFleet, Row

pytestmark = pytest.mark.e2e

# Longer than any deadline before the first token, and short enough to be over before the second
# test needs the engine.
STALL_S = 30.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    folder: Path = tmp_path_factory.mktemp("storage")
    with FaultyFleet.running(folder, stall_s=STALL_S) as running:
        yield running


def assert_sound(row: Row, words: str) -> None:
    """On a busy machine a stall may be the first symptom; the file is in the evidence anyhow."""
    assert row.good == row.total, row
    assert row.moved >= 1, row
    assert row.names_a_file, row
    assert row.incident["cause"] in {"storage_fault", "replica_stalled"}, row
    assert any(words in text for text in row.incident["evidence"]), row


def test_requests_leave_a_read_that_does_not_come_back(fleet: FaultyFleet) -> None:
    assert_sound(fleet.stall(), "a read of ")


def test_an_unplugged_volume_moves_requests_and_replaces_the_engine(fleet: FaultyFleet) -> None:
    assert_sound(fleet.unplug(), "its volume was taken away")


def test_the_fleet_page_and_readyz_show_that_faults_are_injected(fleet: FaultyFleet) -> None:
    for path in ("/readyz", "/fleet/v1/replicas"):
        shown = [one.get("injecting", "") for one in fleet.stack.get(path)["replicas"]]
        assert any("slow_read" in text for text in shown)
