"""When replicas are probed, and what verdicts mean."""

from headrace_replicas.contract.fleet import Cause, ReplicaState
from headrace_replicas.contract.settings import FleetSettings
from tests.support.fleet import Fleet, probed, told_to_leave

STARTING, READY, SUSPECT, SUSPENDED, DRAINING, STOPPING, LOST = ReplicaState


def test_a_loading_replica_is_not_probed() -> None:
    """A replica whose own snapshot says starting gets no probe until it says ready."""
    fleet_ = Fleet()
    assert probed(fleet_.says("a", state=STARTING)) == []
    assert probed(fleet_.tick(60)) == []
    fleet_.says("a")
    assert probed(fleet_.tick()) == ["a"]


def test_an_idle_ready_replica_is_probed_each_period() -> None:
    """An idle replica gets its next probe one period after the last verdict."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    assert probed(fleet_.tick(9.9)) == []
    assert probed(fleet_.tick(0.2)) == ["a"]


def test_real_work_takes_the_place_of_probes() -> None:
    """A replica whose steps advance under real requests is not probed, and proved by `work`."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    for step in range(1, 15):
        fleet_.says("a", running=1, engine_steps=step)
        assert probed(fleet_.tick(2.0)) == []
    last = fleet_.state.replicas["a"].last_probe
    assert last is not None
    assert (last.kind, last.passed) == ("work", True)


def test_a_canarys_own_steps_prove_nothing() -> None:
    """Steps made while a probe is out do not count as work: the canary itself made them."""
    fleet_ = Fleet()
    fleet_.members("a")
    fleet_.says("a", running=1, engine_steps=1)
    fleet_.says("a", running=1, engine_steps=2)
    assert fleet_.state_of("a") is STARTING


def test_an_older_generations_verdict_is_dropped() -> None:
    """A canary of a dead process does not make its successor ready."""
    fleet_ = Fleet()
    fleet_.says("a", generation=3)
    fleet_.answer("a", generation=2)
    assert fleet_.state_of("a") is STARTING


def test_a_canary_from_before_the_fault_does_not_readmit() -> None:
    """A verdict of a probe sent before the fault says nothing of what came after it."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    assert probed(fleet_.tick(11)) == ["a"]
    fleet_.now_s += 0.1
    fleet_.lose_attempt("a", "faulted")
    assert probed(fleet_.answer("a")) == ["a"]
    assert fleet_.state_of("a") is SUSPENDED
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY


def test_flowing_tokens_do_not_readmit_a_suspended_replica() -> None:
    """Work proves life, not right answers: only a canary ends a suspension."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.lose_attempt("a", "faulted")
    fleet_.answer("a", kind="work")
    assert fleet_.state_of("a") is SUSPENDED
    assert [incident.closed_s for incident in fleet_.incidents.values()] == [None]
    fleet_.tick(1)
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY


def test_a_long_prefill_that_progresses_is_never_replaced() -> None:
    """However many probes time out, steps that advance meanwhile keep the replica ready."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    for steps in range(20):
        fleet_.says("a", running=0, engine_steps=steps)
        assert probed(fleet_.tick(11)) == ["a"]
        fleet_.says("a", running=1, engine_steps=steps + 1)
        fleet_.no_answer("a")
        assert fleet_.state_of("a") is READY
    assert fleet_.incidents == {}


def test_reads_are_progress_too() -> None:
    """A step over streamed experts may outlast a probe: a newer stamp of a read is enough."""
    fleet_ = Fleet()
    fleet_.make_ready("a", last_progress_s=5.0)
    fleet_.tick(11)
    fleet_.says("a", last_progress_s=6.0)
    fleet_.no_answer("a")
    assert fleet_.incidents == {}


def test_silent_canaries_end_in_replacement() -> None:
    """Timeouts without progress: suspect at the first, told to leave at `canary_failures`."""
    fleet_ = Fleet()
    fleet_.make_ready("a", "b")
    fleet_.says("a")
    fleet_.tick(11)
    assert told_to_leave(fleet_.no_answer("a")) == []
    assert fleet_.state_of("a") is SUSPECT
    fleet_.tick(1)
    assert told_to_leave(fleet_.no_answer("a")) == ["a"]
    assert fleet_.state_of("a") is DRAINING
    assert [one.cause for one in fleet_.incidents.values()] == [Cause.CANARY_TIMEOUT]


def test_a_wrong_canary_suspends_at_once() -> None:
    """A wrong answer takes a replica out before the second canary settles its fate."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    fleet_.tick(11)
    fleet_.answer("a", passed=False)
    assert fleet_.state_of("a") is SUSPENDED
    fleet_.tick(1)
    assert told_to_leave(fleet_.answer("a", passed=False)) == ["a"]
    (incident,) = fleet_.incidents.values()
    assert incident.cause is Cause.CANARY_FAILED
    assert "1 of 3 expected tokens" in incident.evidence[0]


def test_a_replica_that_is_not_ready_is_asked_less_and_less_often() -> None:
    """Pauses between the probes of a suspended replica double from 0.5 s to the period."""
    fleet_ = Fleet(FleetSettings(canary_failures=100, probe_period_s=4.0, snapshot_stale_s=3600.0))
    fleet_.make_ready("a")
    fleet_.lose_attempt("a", "faulted")
    pauses = []
    for _ in range(6):
        fleet_.answer("a", passed=False)
        pause_s = 0.0
        while not probed(fleet_.tick(0.25)):
            pause_s += 0.25
        pauses.append(pause_s + 0.25)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_probe_that_nobody_reports_on_is_forgotten() -> None:
    """Past its deadline and the grace a probe is taken as lost, and another one goes out."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    assert probed(fleet_.tick(11)) == ["a"]
    assert probed(fleet_.tick(14)) == []
    assert probed(fleet_.tick(2)) == []
    assert probed(fleet_.tick(11)) == ["a"]


def test_a_clock_set_back_does_not_stop_the_probes() -> None:
    """After a jump an hour back the next probe is due at once, not in an hour."""
    fleet_ = Fleet()
    fleet_.make_ready("a")
    assert probed(fleet_.tick(-3600.0)) == ["a"]
    fleet_.now_s -= 3600.0
    fleet_.tick()
    assert probed(fleet_.tick(11)) == ["a"]
