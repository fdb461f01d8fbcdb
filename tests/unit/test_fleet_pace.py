"""A replica that gets slow: an alarm, and nothing else."""

import pytest

from headrace_replicas.contract.fleet import Cause, Incident, ReplicaState
from tests.support.fleet import Fleet, told_to_leave


def only(fleet_: Fleet) -> Incident:
    (incident,) = fleet_.incidents.values()
    return incident


class Busy:
    """A busy replica that reports each half second."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.fleet.make_ready("a", "b")
        self.steps = 0

    def work(self, rate: float, for_s: float, *, running: int = 1, generation: int = 1) -> None:
        """Make tokens at this rate; nobody is ever told to leave because of it."""
        for _ in range(round(for_s / 0.5)):
            self.fleet.now_s += 0.5
            self.steps += 1
            effects = self.fleet.says(
                "a",
                step_rate=rate,
                running=running,
                engine_steps=self.steps,
                generation=generation,
            )
            assert told_to_leave(effects) == []

    @property
    def is_slow(self) -> bool:
        return any(one.closed_s is None for one in self.fleet.incidents.values())


def test_a_tenth_of_the_usual_rate_is_an_incident_after_slow_for_s_and_no_more() -> None:
    """13 tokens/s become 0.5: an alarm within a minute, and the replica goes on."""
    busy = Busy()
    busy.work(13.0, 120.0)
    busy.work(0.5, 29.0)
    assert not busy.is_slow
    busy.work(0.5, 2.0)
    assert only(busy.fleet).cause is Cause.REPLICA_SLOW
    assert "0.50 tokens/s" in only(busy.fleet).evidence[0]
    assert "usual is 13.00" in only(busy.fleet).evidence[0]
    assert busy.fleet.state_of("a") is ReplicaState.READY
    busy.work(0.5, 7200.0)
    assert busy.is_slow, "hours of it do not become usual"
    busy.fleet.answer("a")
    assert busy.is_slow, "a canary says nothing of speed"
    busy.work(11.0, 1.0)
    assert not busy.is_slow
    assert len(busy.fleet.incidents) == 1


@pytest.mark.parametrize("rate", [4.0, 13.0, 100.0])
def test_less_than_usual_is_not_slow(rate: float) -> None:
    busy = Busy()
    busy.work(13.0, 120.0)
    busy.work(rate, 300.0)
    assert busy.fleet.incidents == {}


def test_a_short_spell_is_not_slow() -> None:
    busy = Busy()
    busy.work(13.0, 120.0)
    for _ in range(10):
        busy.work(0.5, 20.0)
        busy.work(13.0, 2.0)
    assert busy.fleet.incidents == {}


def test_a_smaller_batch_is_not_slower() -> None:
    """Sixteen requests make ten times the tokens of one; going back to one is no slowness."""
    busy = Busy()
    busy.work(80.0, 60.0, running=1)
    busy.work(800.0, 600.0, running=16)
    busy.work(80.0, 120.0, running=1)
    assert busy.fleet.incidents == {}


def test_a_larger_batch_is_compared_with_a_smaller_one_until_it_is_known() -> None:
    busy = Busy()
    busy.work(80.0, 60.0, running=1)
    busy.work(2.0, 60.0, running=16)
    assert busy.is_slow


def test_idle_time_neither_counts_nor_forgives() -> None:
    busy = Busy()
    busy.work(13.0, 120.0)
    for _ in range(4):
        busy.work(0.5, 9.0)
        busy.work(0.0, 30.0, running=0)
    assert busy.is_slow


def test_a_replica_that_was_never_faster_is_not_slow() -> None:
    busy = Busy()
    busy.work(0.5, 600.0)
    assert busy.fleet.incidents == {}


def test_a_slow_replica_that_dies_is_slow_no_more() -> None:
    busy = Busy()
    busy.work(13.0, 120.0)
    busy.work(0.5, 60.0)
    busy.fleet.lose_attempt("a", "died")
    by_cause = {one.cause: one.closed_s is None for one in busy.fleet.incidents.values()}
    assert by_cause == {Cause.REPLICA_SLOW: False, Cause.REPLICA_DIED: True}


def test_another_engine_learns_its_own_rate() -> None:
    busy = Busy()
    busy.work(13.0, 120.0)
    busy.work(0.5, 60.0)
    busy.work(0.5, 600.0, generation=2)
    assert not busy.is_slow
