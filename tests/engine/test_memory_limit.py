"""An engine in less memory than half its checkpoint: it answers, within its plan."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.generated_model import make_model
from tests.bench.memory_limit import SHAPES, WORKLOADS, LimitKind, half_of, run_limited
from tests.bench.memory_limit_run import Workload, serve
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
    except NoMemoryCgroupError as error:
        pytest.skip(str(error))
    assert outcome.faults(expected) == []
    assert outcome.served is not None
    assert outcome.served.plan["limit_bytes"] <= outcome.limit_bytes
    assert outcome.served.plan["slots_per_layer"] < SHAPES["small"].experts
    if kind == "cgroup":
        assert outcome.charged_bytes <= outcome.limit_bytes < outcome.served.disk_bytes
        assert "cgroup" in outcome.served.plan["reasons"][-1]
