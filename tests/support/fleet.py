"""A fleet under `fleet.step` for tests: builders of its records, and a driver that checks laws."""

from dataclasses import replace

from headrace_replicas.contract.fleet import (
    AttemptFailed,
    AttemptFailure,
    Effect,
    Incident,
    MembersSeen,
    Notice,
    ProbeFinished,
    ProbeKind,
    ProbeResult,
    ProbeUnanswered,
    ReplaceReplica,
    ReplicaSnapshot,
    ReplicaState,
    SendProbe,
    SnapshotSeen,
    Tick,
    WriteIncident,
)
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve import fleet, fleet_orders


def snapshot(replica_id: str = "a", **changes: object) -> ReplicaSnapshot:
    """A healthy idle replica's snapshot, with changes."""
    healthy = ReplicaSnapshot(
        replica_id=replica_id,
        generation=1,
        state=ReplicaState.READY,
        sequence=1,
        running=0,
        waiting=0,
        outstanding_tokens=0,
        kv_cache_usage_ratio=0.0,
        expert_hit_ratio=1.0,
        expert_slots=32,
        expert_slots_planned=32,
        expert_slots_reason="",
        expert_resizes=0,
        step_rate=0.0,
        engine_steps=0,
        last_progress_s=0.0,
        pid=1,
        host=f"host-{replica_id}",
        device=0,
        rss_bytes=0,
        at_s=0.0,
    )
    return replace(healthy, **changes)  # type: ignore[arg-type]  # names are the test's own


def verdict(
    replica_id: str,
    *,
    passed: bool = True,
    kind: ProbeKind = "canary",
    generation: int = 1,
    at_s: float = 0.0,
    unreadable: str = "",
) -> ProbeResult:
    """A probe's verdict on the expected tokens 1, 2, 3."""
    return ProbeResult(
        replica_id=replica_id,
        generation=generation,
        kind=kind,
        passed=passed,
        latency_s=0.0,
        expected=(1, 2, 3),
        got=(1, 2, 3) if passed else () if unreadable else (1, 9, 9),
        at_s=at_s,
        detail="" if passed else unreadable or "token 1 differs",
        unreadable=bool(unreadable),
    )


# Tests that jump in time do not want their replicas to go stale meanwhile.
PATIENT = FleetSettings(snapshot_stale_s=3600.0)


class Fleet:
    """Steps a fleet along its own time, and checks after each notice what must always hold."""

    def __init__(self, settings: FleetSettings = PATIENT, now_s: float = 1000.0) -> None:
        self.settings = settings
        self.now_s = now_s
        self.state = fleet.FleetState()
        self.incidents: dict[str, Incident] = {}
        self._sequence = 0

    def hear(self, notice: Notice) -> tuple[Effect, ...]:
        before = self.state
        self.state, effects = fleet.step(before, notice, self.settings)
        fleet.check(self.state)
        if self.state is before:
            assert effects == (), "an effect without a change"
        else:
            assert self.state.version == before.version + 1
            unnumbered = replace(before, version=self.state.version)
            assert self.state != unnumbered, "a new version without a change"
        assert fleet_orders.out_by_choice(self.state) <= self.settings.max_unavailable
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.incidents[effect.incident.id] = effect.incident
        return effects

    def state_of(self, replica_id: str) -> ReplicaState:
        return self.state.replicas[replica_id].state

    def members(self, *replica_ids: str) -> tuple[Effect, ...]:
        return self.hear(MembersSeen(replica_ids=frozenset(replica_ids), at_s=self.now_s))

    def says(self, replica_id: str, **changes: object) -> tuple[Effect, ...]:
        """A fresh snapshot of this replica."""
        self._sequence += 1
        fresh = snapshot(replica_id, **{"sequence": self._sequence, "at_s": self.now_s, **changes})
        return self.hear(SnapshotSeen(snapshot=fresh, at_s=self.now_s))

    def tick(self, after_s: float = 0.0) -> tuple[Effect, ...]:
        self.now_s += after_s
        return self.hear(Tick(at_s=self.now_s))

    def answer(
        self,
        replica_id: str,
        *,
        passed: bool = True,
        kind: ProbeKind = "canary",
        generation: int = 1,
        unreadable: str = "",
    ) -> tuple[Effect, ...]:
        result = verdict(
            replica_id,
            passed=passed,
            kind=kind,
            generation=generation,
            at_s=self.now_s,
            unreadable=unreadable,
        )
        return self.hear(ProbeFinished(result=result, at_s=self.now_s))

    def no_answer(self, replica_id: str, *, timed_out: bool = True) -> tuple[Effect, ...]:
        return self.hear(
            ProbeUnanswered(
                replica_id=replica_id, timed_out=timed_out, detail="nothing came", at_s=self.now_s
            )
        )

    def lose_attempt(self, replica_id: str, failure: AttemptFailure) -> tuple[Effect, ...]:
        return self.hear(
            AttemptFailed(
                replica_id=replica_id,
                request_id="q",
                attempt=1,
                failure=failure,
                delivered_tokens=7,
                silence_s=0.5,
                raw_text=f"{failure} as it came",
                at_s=self.now_s,
            )
        )

    def make_ready(self, *replica_ids: str, **changes: object) -> None:
        """These and nobody else are listed, each with a snapshot, and proved ready if new."""
        self.members(*replica_ids)
        for replica_id in replica_ids:
            self.says(replica_id, **changes)
            if self.state_of(replica_id) is ReplicaState.STARTING:
                generation = self.state.replicas[replica_id].generation
                self.answer(replica_id, generation=generation)


def probed(effects: tuple[Effect, ...]) -> list[str]:
    """The replicas that these effects probe."""
    return [effect.replica_id for effect in effects if isinstance(effect, SendProbe)]


def told_to_leave(effects: tuple[Effect, ...]) -> list[str]:
    """The replicas that these effects replace."""
    return [effect.replica_id for effect in effects if isinstance(effect, ReplaceReplica)]
