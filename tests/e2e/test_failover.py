"""Kills and freezes over HTTP; `make failover` runs more of them and prints the table."""

import signal

import pytest

from tests.e2e.failover import (
    STORY,
    Row,
    freeze_streamed,
    kill_streamed,
    kill_under_load,
    kill_unstreamed,
)
from tests.support.stack import Stack

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> str:
    answer = stack.stream(stack.body(STORY))
    assert answer.whole
    return answer.text


def assert_unchanged(row: Row) -> None:
    assert row.good == row.total, row


def test_a_killed_engine_changes_no_byte_of_a_stream(stack: Stack, undisturbed: str) -> None:
    assert_unchanged(kill_streamed(stack, undisturbed, 20, signal.SIGKILL))
    [latest] = stack.get("/fleet/v1/incidents")["incidents"][-1:]
    assert latest["cause"] == "replica_died"
    assert latest["requests_moved"] == 1


def test_a_killed_engine_changes_no_byte_of_a_whole_answer(stack: Stack, undisturbed: str) -> None:
    assert_unchanged(kill_unstreamed(stack, undisturbed, 20))


def test_a_frozen_engine_costs_a_pause(stack: Stack, undisturbed: str) -> None:
    assert_unchanged(freeze_streamed(stack, undisturbed, 20))


def test_nothing_is_lost_when_one_of_two_engines_dies_under_load(stack: Stack) -> None:
    assert_unchanged(kill_under_load(stack, 16, 8))
