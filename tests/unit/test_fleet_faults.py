"""What the fleet does about faults that an engine survives, about doubts, and about last words."""

import pytest

from headrace_replicas.contract.fleet import (
    Cause,
    DrainOrdered,
    HostReported,
    HostState,
    Incident,
    ReplicaState,
    SendProbe,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve.fleet import view
from tests.support.fault_texts import FAULT_TEXTS
from tests.support.fleet import Fleet, probed, told_to_leave

STARTING, READY, SUSPECT, SUSPENDED, DRAINING, STOPPING, LOST = ReplicaState
TIMEOUT = FAULT_TEXTS[0][0]


def only(fleet_: Fleet) -> Incident:
    (incident,) = fleet_.incidents.values()
    return incident


def fault(answer: str = "canary", *, kind: str = "timeout", faults: int = 1) -> dict[str, object]:
    """What a snapshot says of a fault."""
    return {
        "faults": faults,
        "fault_kind": kind,
        "fault_text": TIMEOUT,
        "fault_answer": answer,
        "neighbours": "Blender (pid 812, 61 %)",
    }


def ready(*names: str, **settings: object) -> Fleet:
    fleet_ = Fleet(FleetSettings.model_validate({"snapshot_stale_s": 3600.0, **settings}))
    fleet_.make_ready(*names)
    return fleet_


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("timeout", Cause.METAL_FAULT),
        ("out_of_memory", Cause.METAL_FAULT),
        ("innocent_victim", Cause.METAL_FAULT),
        ("resource_limit", Cause.METAL_FAULT),
        ("not_finite", Cause.WRONG_OUTPUT),
        ("repeated_token", Cause.WRONG_OUTPUT),
        ("other", Cause.ENGINE_FAULT),
        ("a kind of tomorrow", Cause.METAL_FAULT),
    ],
)
def test_a_fault_suspends_asks_a_canary_and_names_what_is_known(kind: str, cause: Cause) -> None:
    fleet_ = ready("a", "b")
    effects = fleet_.says("a", **fault("canary", kind=kind))
    assert fleet_.state_of("a") is SUSPENDED
    assert [effect for effect in effects if isinstance(effect, SendProbe)] == [
        SendProbe(replica_id="a", deadline_s=fleet_.settings.probe_timeout_s, exact=True)
    ]
    assert only(fleet_).cause is cause
    assert TIMEOUT in only(fleet_).evidence[0]
    assert "Blender (pid 812, 61 %)" in only(fleet_).evidence[0]


def test_the_advice_of_the_fault_is_in_the_evidence() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", **fault())
    assert "Look for a second process that uses the GPU" in only(fleet_).evidence[0]


@pytest.mark.parametrize("answer", ["go_on", "canary"])
def test_a_canary_readmits_and_ends_the_incident(answer: str) -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", **fault(answer))
    fleet_.now_s += 0.2
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY
    assert only(fleet_).closed_s == fleet_.now_s
    assert told_to_leave(fleet_.says("a", **fault(answer))) == [], "the same fault is told again"
    assert fleet_.state_of("a") is READY


def test_work_does_not_readmit_after_a_fault() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", **fault())
    fleet_.answer("a", kind="work")
    fleet_.says("a", **fault(), running=1, engine_steps=9)
    assert fleet_.state_of("a") is SUSPENDED


def test_a_canary_from_before_a_second_fault_does_not_readmit() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", **fault())
    fleet_.now_s += 0.2
    fleet_.says("a", **fault(faults=2))
    assert probed(fleet_.answer("a")) == ["a"]
    assert fleet_.state_of("a") is SUSPENDED
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY


def test_an_engine_that_asks_for_it_is_replaced_at_once_while_others_are_ready() -> None:
    fleet_ = ready("a", "b")
    assert told_to_leave(fleet_.says("a", **fault("replace"))) == ["a"]
    assert fleet_.state_of("a") is DRAINING
    assert only(fleet_).closed_s is None
    fleet_.make_ready("b", "a2", host="host-a", generation=2)
    assert only(fleet_).closed_s is not None


def test_a_replacement_stays_owed_over_passed_canaries() -> None:
    """The last one that can serve goes on serving, its incident stays open, and then it goes."""
    fleet_ = ready("a", "b")
    fleet_.members("a")
    fleet_.tick(301.0)  # the loss of b is not waited for any longer
    assert told_to_leave(fleet_.says("a", **fault("replace"))) == []
    assert fleet_.state_of("a") is SUSPENDED
    for _ in range(3):
        fleet_.answer("a")
        assert fleet_.state_of("a") is READY
        assert told_to_leave(fleet_.tick(40.0)) == []
    (status,) = (one for one in view(fleet_.state, 0.0).replicas if one.replica_id == "a")
    assert "replace owed (its engine had a fault (timeout))" in status.reason
    (incident,) = (one for one in fleet_.incidents.values() if one.cause is Cause.METAL_FAULT)
    assert incident.closed_s is None
    fleet_.members("a", "c")
    fleet_.says("c")
    assert told_to_leave(fleet_.answer("c")) == ["a"]


def test_a_fleet_of_one_keeps_its_replica() -> None:
    fleet_ = ready("a")
    fleet_.says("a", **fault("replace"))
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY
    assert told_to_leave(fleet_.tick(3000.0)) == []


def test_a_floor_of_zero_replaces_the_only_replica() -> None:
    fleet_ = ready("a", min_ready=0)
    assert told_to_leave(fleet_.says("a", **fault("replace"))) == ["a"]


def test_the_floor_holds_nobody_whose_canary_fails() -> None:
    fleet_ = ready("a")
    fleet_.says("a", **fault("replace"))
    assert told_to_leave(fleet_.answer("a", passed=False)) == ["a"]


def test_the_floor_holds_nobody_who_lost_its_files() -> None:
    fleet_ = ready("a")
    assert told_to_leave(
        fleet_.says("a", storage_trouble="cut", storage_troubles=1, storage_lost=True)
    ) == ["a"]


@pytest.mark.parametrize(("floor", "leaves"), [(1, ["a"]), (2, ["a"]), (3, [])])
def test_the_floor_counts_the_others(floor: int, leaves: list[str]) -> None:
    fleet_ = ready("a", "b", "c", min_ready=floor)
    assert told_to_leave(fleet_.says("a", **fault("replace"))) == leaves


def test_a_failed_canarys_order_becomes_lasting_with_a_fault() -> None:
    """Two wrong canaries ask for a replacement that a passed one cancels; a fault's stays."""
    fleet_ = ready("a", "b", "c")
    fleet_.lose_attempt("c", "died")
    fleet_.answer("a", passed=False)
    fleet_.answer("a", passed=False)
    fleet_.says("a", **fault("replace"))
    fleet_.now_s += 1.0
    fleet_.tick()
    fleet_.answer("a")
    assert fleet_.state_of("a") is READY
    fleet_.members("a", "b", "c2")
    fleet_.says("c2", host="host-c", generation=2)
    assert told_to_leave(fleet_.answer("c2", generation=2)) == ["a"]


def test_an_operators_drain_does_not_lose_an_owed_replacement() -> None:
    """A drained replica that had a fault is replaced once it is called back."""
    fleet_ = ready("a", "b")
    fleet_.hear(DrainOrdered(replica_id="a", drain=True, at_s=fleet_.now_s))
    assert told_to_leave(fleet_.says("a", **fault("replace"))) == []
    fleet_.hear(DrainOrdered(replica_id="a", drain=False, at_s=fleet_.now_s))
    assert told_to_leave(fleet_.says("a", **fault("replace"))) == ["a"]


def test_the_gateways_evidence_takes_the_fault_in() -> None:
    """One incident, with the first symptom kept and the more precise cause."""
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "faulted")
    fleet_.now_s += 0.3
    fleet_.says("a", **fault())
    assert only(fleet_).cause is Cause.METAL_FAULT
    assert only(fleet_).evidence[0].endswith("faulted as it came")
    assert any("the cause is metal_fault" in what for _, what in only(fleet_).timeline)


def test_a_precise_cause_stays() -> None:
    fleet_ = ready("a", "b")
    fleet_.says("a", **fault(kind="not_finite"))
    fleet_.says("a", **fault(faults=2))
    assert only(fleet_).cause is Cause.WRONG_OUTPUT


def test_a_fault_in_a_first_snapshot_counts_unless_the_controller_is_new() -> None:
    """What a replica had before this controller began, another has dealt with."""
    fleet_ = Fleet()
    fleet_.says("old", **fault())
    assert fleet_.incidents == {}
    fleet_.now_s += 60.0
    fleet_.says("new", **fault())
    assert only(fleet_).replica == "new"


def test_doubts_ask_a_canary_at_once_even_of_a_busy_replica() -> None:
    fleet_ = ready("a", "b")
    fleet_.now_s += 1.0
    effects = fleet_.says("a", doubts=1, running=1, engine_steps=5)
    assert [one.exact for one in effects if isinstance(one, SendProbe)] == [True]
    assert fleet_.state_of("a") is READY
    assert fleet_.incidents == {}
    fleet_.answer("a")
    assert probed(fleet_.says("a", doubts=1, running=1, engine_steps=6)) == []


def test_a_doubt_while_a_canary_is_out_asks_another() -> None:
    """The one that is out began before the doubt and says nothing of it."""
    fleet_ = ready("a", "b")
    assert probed(fleet_.tick(10.0)) == ["a", "b"]
    fleet_.now_s += 0.1
    assert probed(fleet_.says("a", doubts=1)) == []
    fleet_.now_s += 0.1
    assert probed(fleet_.answer("a")) == ["a"]


def test_a_busy_replica_is_asked_for_the_known_answer_each_period() -> None:
    """Real work defers ordinary probes, but not the exact one."""
    fleet_ = ready("a", canary_period_s=30.0)
    asked = []
    for second in range(1, 100):
        fleet_.now_s += 1.0
        effects = (*fleet_.says("a", running=1, engine_steps=second), *fleet_.tick())
        for effect in effects:
            if isinstance(effect, SendProbe):
                asked.append((second, effect.exact))
                fleet_.answer("a")
    assert asked == [(30, True), (60, True), (90, True)]


def test_an_exact_canary_that_only_work_answered_is_asked_again_a_period_later() -> None:
    fleet_ = ready("a")
    fleet_.says("a", running=1, engine_steps=1)
    assert probed(fleet_.tick(30.0)) == ["a"]
    assert probed(fleet_.answer("a", kind="work")) == []
    assert fleet_.state_of("a") is READY


def words_of(text: str, generation: int) -> dict[str, object]:
    return {"predecessor": text, "predecessor_generation": generation}


WORDS = f"generation 1 ended with submissions_ignored after 3 timeouts: {FAULT_TEXTS[8][0]}"


def test_a_successors_words_name_the_cause_of_a_death() -> None:
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "died")
    assert only(fleet_).cause is Cause.REPLICA_DIED
    fleet_.says("a2", host="host-a", generation=2, **words_of(WORDS, 1))
    fleet_.says("a2", host="host-a", generation=2, **words_of(WORDS, 1))
    assert only(fleet_).cause is Cause.METAL_FAULT
    assert only(fleet_).evidence.count(WORDS) == 1


def test_a_start_that_is_only_reported_brings_the_words_too() -> None:
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "died")
    for _ in range(2):
        fleet_.hear(
            HostReported(
                host="host-a",
                device=0,
                generation=2,
                state=HostState.USABLE,
                predecessor="killed by signal 9",
                predecessor_generation=1,
                at_s=fleet_.now_s,
            )
        )
    assert only(fleet_).cause is Cause.REPLICA_DIED
    assert only(fleet_).evidence[-1] == "killed by signal 9"


@pytest.mark.parametrize(
    "where", [{"host": "host-b"}, {"device": 1}, {"predecessor_generation": 7}]
)
def test_words_reach_their_own_process_only(where: dict[str, object]) -> None:
    fleet_ = ready("a", "b")
    fleet_.lose_attempt("a", "died")
    said = {"host": "host-a", "generation": 9, **words_of(WORDS, 1), **where}
    fleet_.says("x", **said)
    assert only(fleet_).cause is Cause.REPLICA_DIED


def test_every_replica_at_once_is_never_restarted_at_once() -> None:
    """All had a fault and are suspended: nobody leaves; as they prove well, one at a time does."""
    names = ("a", "b", "c", "d")
    fleet_ = ready(*names)
    for name in names[:-1]:
        fleet_.lose_attempt(name, "faulted")
    for name in reversed(names):
        assert told_to_leave(fleet_.says(name, **fault("replace"))) == []
        assert fleet_.state_of(name) is SUSPENDED
    left = [told_to_leave(fleet_.answer(name)) for name in names]
    assert sum(map(len, left)) == 1
    states = [fleet_.state_of(name) for name in names]
    assert states.count(DRAINING) == 1
    assert states.count(READY) == 3
