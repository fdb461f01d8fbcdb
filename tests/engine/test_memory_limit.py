"""An engine in less memory than half its checkpoint: it answers, within its plan."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.generated_model import make_model
from tests.bench.memory_limit import (
    SHAPES,
    WORKLOADS,
    LimitKind,
    Outcome,
    PagesStayError,
    half_of,
    run_limited,
)
from tests.bench.memory_limit_run import Served, Workload, serve
from tests.support.memory_cgroup import NoMemoryCgroupError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and the limits are Linux's"),
]


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A prompt that needs more experts than fit, then three requests together."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_model(folder, SHAPES["small"])
    return replace(WORKLOADS["small"], folder=str(folder))


@pytest.fixture(scope="module")
def expected(workload: Workload) -> list[list[int]]:
    """The answers with all experts in memory."""
    return serve(replace(workload, slots="all")).answers


@pytest.mark.parametrize("kind", ["cgroup", "data"])
def test_an_engine_serves_a_checkpoint_twice_as_large_as_its_memory(
    workload: Workload, expected: list[list[int]], kind: LimitKind
) -> None:
    """Cold, without swap: equal answers, nobody killed, and no line of the plan exceeded.

    In a memory cgroup pages of files count, and the kernel has to take them back. A data limit
    counts what a process writes to alone, and lets its allocations fail instead of killing it; it
    can be set anywhere.
    """
    try:
        outcome = run_limited(workload, half_of(Path(workload.folder)), kind)
    except (NoMemoryCgroupError, PagesStayError) as error:
        pytest.skip(str(error))
    assert outcome.faults(expected) == []
    assert outcome.served is not None
    assert outcome.served.plan["limit_bytes"] <= outcome.limit_bytes
    assert outcome.served.plan["slots_per_layer"] < SHAPES["small"].experts
    if kind == "cgroup":
        assert outcome.charged_bytes <= outcome.limit_bytes < outcome.served.disk_bytes
        assert "cgroup" in outcome.served.plan["reasons"][-1]


SOUND = Outcome(
    checkpoint_bytes=1000,
    limit_bytes=500,
    exit_status=0,
    stderr="",
    served=Served(
        plan={
            "slots_per_layer": 10,
            "resident_bytes": 100,
            "slot_bytes": 100,
            "kv_bytes": 50,
            "working_bytes": 40,
            "allocator_cache_bytes": 10,
        },
        answers=[[1, 2]],
        process_bytes=20,
        loaded_bytes=200,
        serving_bytes=30,
        kept_bytes=5,
        disk_bytes=600,
        hit_ratio=0.5,
        first_misses=30,
    ),
    peak_bytes=300,
    charged_bytes=500,
)


def changed(**served: Any) -> Outcome:
    assert SOUND.served is not None
    return replace(SOUND, served=replace(SOUND.served, **served))


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (replace(SOUND, killed=1), "the kernel killed 1 processes"),
        (replace(SOUND, served=None, exit_status=-6, stderr="a reason"), "ended with -6: a reason"),
        (changed(answers=[[1, 3]]), "the answers differ"),
        (replace(SOUND, peak_bytes=301), "0.3 KiB of memory were in use, and the plan says"),
        (replace(SOUND, limit_bytes=501), "more than half of the checkpoint"),
        (changed(first_misses=19), "hardly more experts than fit"),
        (changed(disk_bytes=499), "no page of a file had to go"),
    ],
)
def test_a_run_that_shows_nothing_or_went_wrong_is_told(outcome: Outcome, fault: str) -> None:
    """Each by itself; a sound one has nothing to tell."""
    assert SOUND.faults([[1, 2]]) == []
    [said] = outcome.faults([[1, 2]])
    assert re.search(fault, said)
