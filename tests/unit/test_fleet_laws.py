"""Laws of the fleet over random notices: late, repeated, out of order, about strangers."""

from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from headrace_replicas.contract.fleet import (
    AttemptFailed,
    AttemptFailure,
    Cause,
    DrainOrdered,
    Effect,
    HostReported,
    HostState,
    MembersSeen,
    Notice,
    PoisonFound,
    ProbeFinished,
    ProbeKind,
    ProbeUnanswered,
    ReplicaState,
    RequestMoved,
    SnapshotSeen,
    Tick,
    WriteIncident,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve.fleet_probes import PROBE_GRACE_S
from headrace_serve.fleet_symptoms import REOPEN_S
from tests.support.fleet import Fleet, probed, snapshot, told_to_leave, verdict

NAMES = [f"r{number}" for number in range(6)]
HOSTS = {name: f"host-{number % 3}" for number, name in enumerate(NAMES)}
names = st.sampled_from(NAMES)
failures = st.sampled_from(get_args(AttemptFailure))
GONE = (ReplicaState.DRAINING, ReplicaState.STOPPING, ReplicaState.LOST)


class FleetLaws(RuleBasedStateMachine):
    """Sends anything at any time, and keeps a second account of probes and incidents."""

    @initialize(budget=st.integers(1, 3), canaries=st.integers(1, 3), floor=st.integers(0, 3))
    def start(self, budget: int, canaries: int, floor: int) -> None:
        self.fleet = Fleet(
            FleetSettings(
                max_unavailable=budget,
                canary_failures=canaries,
                min_ready=floor,
                slow_for_s=2.0,
                load_slow_s=40.0,
                probe_period_s=4.0,
                probe_timeout_s=3.0,
                snapshot_stale_s=5.0,
            )
        )
        self.out: dict[str, float] = {}
        self.closed: dict[str, float] = {}
        self.open: dict[str, str] = {}

    def states(self) -> dict[str, ReplicaState]:
        return {name: replica.state for name, replica in self.fleet.state.replicas.items()}

    def hear(self, notice: Notice) -> tuple[Effect, ...]:
        before = self.states()
        effects = self.fleet.hear(notice)
        after = self.states()
        self.account_probes(notice, effects, after)
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.account_incident(effect)
        for name in told_to_leave(effects):
            assert after[name] is ReplicaState.DRAINING
        self.check_floor(before, after)
        self.check_proofs(notice, before, after)
        return effects

    def check_floor(self, before: dict[str, ReplicaState], after: dict[str, ReplicaState]) -> None:
        """Who can serve is told to leave only while enough others are ready."""
        ready = sum(state is ReplicaState.READY for state in after.values())
        for name, replica in self.fleet.state.replicas.items():
            went = after[name] is ReplicaState.DRAINING is not before.get(name)
            ordered = replica.order is not None and replica.order.kind == "replace"
            if went and ordered and replica.failures == 0 and not replica.lost_its_files:
                assert ready >= self.fleet.settings.min_ready

    def account_probes(
        self, notice: Notice, effects: tuple[Effect, ...], after: dict[str, ReplicaState]
    ) -> None:
        """Never two probes at once: one ends by its verdict, its deadline, or the replica's."""
        now_s, limit_s = self.fleet.now_s, self.fleet.settings.probe_timeout_s + PROBE_GRACE_S
        match notice:
            case ProbeFinished(result=result) if result.kind != "self":
                known = self.fleet.state.replicas.get(result.replica_id)
                if known is not None and result.generation >= known.generation:
                    self.out.pop(result.replica_id, None)
            case ProbeUnanswered(replica_id=name):
                self.out.pop(name, None)
            case SnapshotSeen(snapshot=seen) if seen.generation > 1:
                self.out.pop(seen.replica_id, None)
        for name, sent_s in list(self.out.items()):
            if not -PROBE_GRACE_S <= now_s - sent_s <= limit_s:
                del self.out[name]
        for name in probed(effects):
            assert name not in self.out
            assert after[name] not in GONE
            self.out[name] = now_s
        for name in list(self.out):
            if after.get(name) in (None, ReplicaState.LOST):
                del self.out[name]

    def account_incident(self, effect: WriteIncident) -> None:
        """A replica has one open incident at most, and a new one only well after the last."""
        incident = effect.incident
        assert incident.mitigated_s is None or incident.mitigated_s >= incident.opened_s
        if incident.cause in (Cause.HOST_HELD, Cause.LOAD_SLOW, Cause.POISON_REQUEST):
            assert incident.mitigated_s is not None
            return
        if incident.cause is Cause.REPLICA_SLOW:
            return
        was_open = self.open.get(incident.replica)
        if incident.closed_s is None:
            assert was_open in (None, incident.id)
            self.open[incident.replica] = incident.id
            if was_open is None and incident.replica in self.closed:
                again = self.fleet.now_s - self.closed[incident.replica]
                # One notice may bring a second symptom after the one that opened it again.
                reopened = any(text.startswith("again") for text in incident.evidence[-2:])
                assert reopened or again >= REOPEN_S
        else:
            assert incident.mitigated_s is not None
            assert incident.closed_s >= incident.mitigated_s
            self.closed[incident.replica] = incident.closed_s
            self.open.pop(incident.replica, None)

    def check_proofs(
        self,
        notice: Notice,
        before: dict[str, ReplicaState],
        after: dict[str, ReplicaState],
    ) -> None:
        """Only a proof makes ready, and no verdict brings back what is on its way out."""
        for name, state in after.items():
            was = before.get(name)
            if state is ReplicaState.READY and was is not ReplicaState.READY:
                assert was not in GONE
                match notice:
                    case ProbeFinished(result=result):
                        assert result.passed
                        assert result.replica_id == name
                    case SnapshotSeen(snapshot=seen):
                        assert seen.running > 0
                        assert was is not ReplicaState.SUSPENDED
                    case _:
                        raise AssertionError(f"{name} became ready by {notice}")
            if was in GONE and isinstance(notice, ProbeFinished):
                assert state is was

    @rule(members=st.sets(names))
    def list_members(self, members: set[str]) -> None:
        self.hear(MembersSeen(replica_ids=frozenset(members), at_s=self.fleet.now_s))

    @rule(
        name=names,
        generation=st.sampled_from([1, 1, 1, 1, 2]),
        sequence=st.integers(0, 60),
        state=st.sampled_from([ReplicaState.READY] * 4 + [ReplicaState.STARTING, *GONE[1:2]]),
        running=st.integers(0, 2),
        engine_steps=st.integers(0, 5),
        storage=st.sampled_from([("", 0, False)] * 4 + [("slow", 1, False), ("cut", 2, True)]),
        faults=st.sampled_from([(0, "")] * 3 + [(1, "go_on"), (2, "canary"), (3, "replace")]),
        doubts=st.integers(0, 1),
        rate=st.sampled_from([0.1, 10.0]),
        words=st.sampled_from(["", "killed", "[METAL] Command buffer execution failed: Hm"]),
    )
    def send_snapshot(
        self,
        *,
        name: str,
        generation: int,
        sequence: int,
        state: ReplicaState,
        running: int,
        engine_steps: int,
        storage: tuple[str, int, bool],
        faults: tuple[int, str],
        doubts: int,
        rate: float,
        words: str,
    ) -> None:
        trouble, troubles, lost = storage
        seen = snapshot(
            name,
            generation=generation,
            sequence=sequence,
            state=state,
            running=running,
            engine_steps=engine_steps,
            host=HOSTS[name],
            storage_trouble=trouble,
            storage_troubles=troubles,
            storage_lost=lost,
            faults=faults[0],
            fault_kind="timeout" if faults[0] else "",
            fault_answer=faults[1],
            doubts=doubts,
            step_rate=rate,
            at_s=self.fleet.now_s,
            predecessor=words,
            predecessor_generation=generation - 1,
        )
        self.hear(SnapshotSeen(snapshot=seen, at_s=self.fleet.now_s))

    @rule(
        name=names,
        passed=st.booleans(),
        kind=st.sampled_from(get_args(ProbeKind)),
        generation=st.integers(0, 2),
    )
    def send_verdict(self, name: str, passed: bool, kind: ProbeKind, generation: int) -> None:
        result = verdict(
            name, passed=passed, kind=kind, generation=generation, at_s=self.fleet.now_s
        )
        self.hear(ProbeFinished(result=result, at_s=self.fleet.now_s))

    @rule(name=names, timed_out=st.booleans())
    def leave_unanswered(self, name: str, timed_out: bool) -> None:
        self.hear(
            ProbeUnanswered(replica_id=name, timed_out=timed_out, detail="", at_s=self.fleet.now_s)
        )

    @rule(name=names, failure=failures)
    def lose_attempt(self, name: str, failure: AttemptFailure) -> None:
        self.hear(
            AttemptFailed(
                replica_id=name,
                request_id="q",
                attempt=1,
                failure=failure,
                delivered_tokens=0,
                silence_s=0.0,
                raw_text="",
                at_s=self.fleet.now_s,
            )
        )

    @rule(source=names, goal=names)
    def move_request(self, source: str, goal: str) -> None:
        self.hear(
            RequestMoved(
                request_id="q",
                from_replica=source,
                to_replica=goal,
                attempt=2,
                replayed_tokens=1,
                gap_s=0.1,
                at_s=self.fleet.now_s,
            )
        )

    @rule(name=names, drain=st.booleans())
    def order_drain(self, name: str, drain: bool) -> None:
        self.hear(DrainOrdered(replica_id=name, drain=drain, at_s=self.fleet.now_s))

    @rule(
        host=st.sampled_from(sorted(set(HOSTS.values()))),
        generation=st.integers(0, 3),
        state=st.sampled_from(HostState),
        until_s=st.sampled_from([None, 5.0, 500.0]),
        loaded=st.integers(0, 3),
        words=st.sampled_from(["", "killed"]),
    )
    def report_host(
        self,
        host: str,
        generation: int,
        state: HostState,
        until_s: float | None,
        loaded: int,
        words: str,
    ) -> None:
        self.hear(
            HostReported(
                host=host,
                device=0,
                generation=generation,
                state=state,
                until_s=None if until_s is None else self.fleet.now_s + until_s,
                loaded_bytes=loaded,
                total_bytes=3,
                predecessor=words,
                predecessor_generation=1,
                at_s=self.fleet.now_s,
            )
        )

    @rule(name=names, fingerprint=st.sampled_from("xy"))
    def find_poison(self, name: str, fingerprint: str) -> None:
        self.hear(
            PoisonFound(
                fingerprint=fingerprint,
                request_id="q",
                replica_id=name,
                losses=("one", "two"),
                until_s=self.fleet.now_s + 20.0,
                at_s=self.fleet.now_s,
            )
        )

    @rule(after_s=st.sampled_from([-2.0, 0.0, 0.25, 1.0, 5.0, 12.0, 70.0, 400.0]))
    def tick(self, after_s: float) -> None:
        self.fleet.now_s += after_s
        self.hear(Tick(at_s=self.fleet.now_s))

    def teardown(self) -> None:
        """Whatever happened, a replacement on each host that gets ready closes all incidents."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.now_s += 200.0  # past any step back of the clock, and any snapshot is stale
        newcomers = {f"new{number}": f"host-{number}" for number in range(3)}
        fleet.members(*newcomers)
        for name, host in newcomers.items():
            fleet.says(name, host=host, generation=10)
        for name in newcomers:
            fleet.answer(name, generation=10)
        assert all(fleet.state_of(name) is ReplicaState.READY for name in newcomers)
        still_open = [one.id for one in fleet.incidents.values() if one.closed_s is None]
        assert still_open == []


FleetLaws.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, print_blob=True
)
TestFleetLaws = FleetLaws.TestCase
