"""What a shrink gives up really leaves the process, as its system counts it."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.bench.generated_model import Shape, make_model
from tests.engine.sharing_process import HALF, PLANNED, TOP_K

pytestmark = pytest.mark.engine

# 34 MB in 24 slots of each layer: pools that the C library maps, and pools that it does not.
SHAPE = Shape(layers=3, hidden=512, experts=32, top_k=TOP_K, expert_hidden=512)
# What is not pages of pools: rows of a page that are cut, and what Python does meanwhile.
_LEAST_SHARE = 0.8


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("generated") / "model"
    make_model(folder, SHAPE)
    child = subprocess.run(
        [sys.executable, "-m", "tests.engine.sharing_process", str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    result: dict[str, Any] = json.loads(child.stdout)
    return result


def test_resident_memory_follows_the_slots(told: dict[str, Any]) -> None:
    """Down by four fifths of the pools' bytes at least, each time; up by as much when they grow."""
    phases = told["phases"]
    assert [one["slots"] for one in phases] == [PLANNED, TOP_K, PLANNED, HALF, TOP_K, PLANNED]
    for before, after in pairwise(phases):
        moved_bytes = (after["slots"] - before["slots"]) * told["slot_bytes"]
        if moved_bytes < 0:
            given_back = before["answered_bytes"] - after["resized_bytes"]
            assert given_back >= _LEAST_SHARE * -moved_bytes
        else:
            taken = after["resized_bytes"] - before["resized_bytes"]
            assert taken >= _LEAST_SHARE * moved_bytes


def test_what_is_given_back_is_the_pools_and_not_what_the_requests_have_left(
    told: dict[str, Any],
) -> None:
    """Right after a growth against right after a shrink, with requests before both."""
    _, _, grown, _, shrunk, _ = told["phases"]
    pools_bytes = (PLANNED - TOP_K) * told["slot_bytes"]
    assert grown["resized_bytes"] - shrunk["resized_bytes"] >= _LEAST_SHARE * pools_bytes


def test_the_answers_do_not_follow_the_slots(told: dict[str, Any]) -> None:
    first, *others = [one["answers"] for one in told["phases"]]
    assert [len(ids) for ids in first] == [6, 6]
    assert all(answers == first for answers in others)
