"""What replicas, gateways and the controller tell each other about the fleet."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

ProbeKind = Literal["canary", "work", "self"]
AttemptFailure = Literal["died", "stalled", "ended_early", "faulted", "unreadable", "mismatch"]


class ReplicaState(StrEnum):
    """Where a replica stands, in an operator's words."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    SUSPENDED = "suspended"
    DRAINING = "draining"
    STOPPING = "stopping"
    LOST = "lost"


class Cause(StrEnum):
    """Why an incident was opened; each has a runbook page in docs/runbooks."""

    REPLICA_DIED = "replica_died"
    REPLICA_STALLED = "replica_stalled"
    STREAM_ENDED_EARLY = "stream_ended_early"
    ENGINE_FAULT = "engine_fault"
    CANARY_FAILED = "canary_failed"
    CANARY_TIMEOUT = "canary_timeout"
    WEIGHTS_MISMATCH = "weights_mismatch"
    STORAGE_FAULT = "storage_fault"
    METAL_FAULT = "metal_fault"
    WRONG_OUTPUT = "wrong_output"
    REPLICA_SLOW = "replica_slow"
    LOAD_SLOW = "load_slow"
    HOST_HELD = "host_held"
    POISON_REQUEST = "poison_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """What one replica says of itself.

    Attributes:
        replica_id: Ray Serve's unique id of the replica; a new one with every start.
        generation: Counts the starts of an engine on this device; rises with every start.
        state: The replica's own view: starting, ready, or stopping once told to go.
        sequence: Rises with every snapshot of this replica; an unchanged one is stale.
        running: Requests in prefill or decode.
        waiting: Requests accepted and not yet started.
        outstanding_tokens: Upper bound of tokens still to prefill and to generate.
        kv_cache_usage_ratio: Share of the KV budget in use, 0 to 1.
        expert_hit_ratio: Share of expert uses found in memory, 0 to 1 (1 when resident).
        expert_slots: Experts of a layer in memory at most, now; 0 in a model without experts.
        expert_slots_planned: The same as it was planned before the model was loaded.
        expert_slots_reason: Why the two differ, for a person; empty when they do not.
        expert_resizes: How often the slots have changed since the start.
        step_rate: Output tokens per second over the last busy seconds; 0 when never busy.
        engine_steps: Marks of progress since the engine started: finished steps, and arrivals of
            experts inside a step.
        last_progress_s: Wall-clock second of the last finished step or read.
        pid: The engine's process id on its host.
        host: The host's label.
        device: Index of the device on the host.
        rss_bytes: Resident memory of the process.
        at_s: Wall-clock second at which this was taken.
        storage_trouble: The newest trouble with reading experts, as a sentence that names the file;
            empty when there was none.
        storage_troubles: How many there were since the engine started.
        storage_lost: Whether a file has changed or failed again and again, so that the replica
            should be replaced.
        injecting: The faults that are injected on purpose, for people; empty unless armed.
        warm_up_done_bytes: Experts read into the page cache since the start, while idle.
        warm_up_planned_bytes: What of them fits there; 0 when the warm-up is off.
        faults: Faults of the engine since its start that did not end its process.
        fault_kind: `FaultKind` of the newest of them; empty while there was none.
        fault_text: Its own words, unchanged.
        fault_answer: What it asks for: `go_on`, `canary` or `replace`; empty while there was none.
        doubts: How often its output looked wrong without proof, so that a canary should decide.
        prefill_chunk_tokens: Tokens of a prefill chunk now; halved after timeouts of the GPU.
        admitted: Requests that it runs at a time at most, now; lowered after running out of memory.
        predecessor: How the process before it on its device ended, as a sentence; empty when it is
            the first, or when that one left in order.
        predecessor_generation: That one's generation; 0 without one.
        neighbours: Other processes that use the GPU of its host, for a person; empty when there are
            none or nobody can tell.
    """

    replica_id: str
    generation: int
    state: ReplicaState
    sequence: int
    running: int
    waiting: int
    outstanding_tokens: int
    kv_cache_usage_ratio: float
    expert_hit_ratio: float
    expert_slots: int
    expert_slots_planned: int
    expert_slots_reason: str
    expert_resizes: int
    step_rate: float
    engine_steps: int
    last_progress_s: float
    pid: int
    host: str
    device: int
    rss_bytes: int
    at_s: float
    storage_trouble: str = ""
    storage_troubles: int = 0
    storage_lost: bool = False
    injecting: str = ""
    warm_up_done_bytes: int = 0
    warm_up_planned_bytes: int = 0
    faults: int = 0
    fault_kind: str = ""
    fault_text: str = ""
    fault_answer: str = ""
    doubts: int = 0
    prefill_chunk_tokens: int = 0
    admitted: int = 0
    predecessor: str = ""
    predecessor_generation: int = 0
    neighbours: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The verdict of one generation probe.

    Attributes:
        kind: `canary` ran the known prompt; `work` means that real tokens proved life meanwhile;
            `self` is a canary that the replica ran unasked, because no controller did.
        passed: Whether the tokens were exactly the expected ones.
        latency_s: Seconds from asking to the last token.
        expected: The recorded token ids.
        got: The token ids that came.
        detail: Why it failed, for a person; empty when it passed.
        at_s: Wall-clock second of the verdict.
        unreadable: Whether it broke off because an expert's bytes could not be read.
    """

    replica_id: str
    generation: int
    kind: ProbeKind
    passed: bool
    latency_s: float
    expected: tuple[int, ...]
    got: tuple[int, ...]
    at_s: float
    detail: str = ""
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersSeen:
    """Ray Serve's own list of running replicas."""

    replica_ids: frozenset[str]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSeen:
    """A replica's snapshot arrived."""

    snapshot: ReplicaSnapshot
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFinished:
    """A probe came back with a verdict."""

    result: ProbeResult
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeUnanswered:
    """A probe got no verdict: it ran out of time or the call failed.

    Attributes:
        timed_out: True when the deadline passed, False when the call itself failed.
    """

    replica_id: str
    timed_out: bool
    detail: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """A gateway lost an attempt on a replica.

    Attributes:
        delivered_tokens: Output tokens that the client's journal held at that moment.
        silence_s: Seconds since the attempt's last sign of life.
        raw_text: The exception's text, kept as it came.
    """

    replica_id: str
    request_id: str
    attempt: int
    failure: AttemptFailure
    delivered_tokens: int
    silence_s: float
    raw_text: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoved:
    """A request goes on elsewhere: its first chunk came from the new replica.

    Attributes:
        replayed_tokens: Output tokens that the new replica had to process again.
        gap_s: Seconds without a token, as the client saw them.
    """

    request_id: str
    from_replica: str
    to_replica: str
    attempt: int
    replayed_tokens: int
    gap_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrdered:
    """An operator takes a replica out of rotation (or back, with `drain=False`)."""

    replica_id: str
    drain: bool
    at_s: float


class HostState(StrEnum):
    """Whether engines may be started on a device of a host."""

    USABLE = "usable"
    BACKING_OFF = "backing_off"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported:
    """An engine that is being started tells how that goes, before it can be asked.

    Attributes:
        host: The host's label.
        device: Index of the device on the host.
        generation: Of the engine that is being started; 0 while it may not be.
        state: Whether it may be started now.
        reason: Why not, and what to do about it, for a person; empty when it may.
        until_s: Wall-clock second until when it waits; None for until an operator acts.
        loaded_bytes: Bytes of the checkpoint that are in memory so far.
        total_bytes: Bytes that must get there; 0 while that is not known.
        predecessor: As `ReplicaSnapshot.predecessor`.
        predecessor_generation: As `ReplicaSnapshot.predecessor_generation`.
    """

    host: str
    device: int
    generation: int
    state: HostState
    reason: str = ""
    until_s: float | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    predecessor: str = ""
    predecessor_generation: int = 0
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonFound:
    """A gateway has stopped a request that was there at too many deaths.

    Attributes:
        fingerprint: Of the request's prompt and sampling; no text can be had from it.
        replica_id: Where it was last.
        losses: One sentence for each loss that it was there at, oldest first.
        until_s: Wall-clock second until when the same request is refused.
    """

    fingerprint: str
    request_id: str
    replica_id: str
    losses: tuple[str, ...]
    until_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""

    at_s: float


Notice = (
    MembersSeen
    | SnapshotSeen
    | ProbeFinished
    | ProbeUnanswered
    | AttemptFailed
    | RequestMoved
    | DrainOrdered
    | HostReported
    | PoisonFound
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One record of something that went wrong, from first symptom to closed.

    Attributes:
        id: Unique; sorts by time of opening.
        opened_s: Wall-clock second of the first symptom.
        mitigated_s: When nothing was routed to the culprit any more.
        closed_s: When the culprit was replaced or proved well again.
        requests_moved: Requests that went on elsewhere because of it.
        replayed_tokens: Output tokens processed a second time for them.
        worst_gap_s: Longest pause that a client saw.
        evidence: Raw texts and measurements, oldest first.
        timeline: (wall-clock second, what happened) pairs.
    """

    id: str
    cause: Cause
    host: str
    replica: str
    generation: int
    opened_s: float
    mitigated_s: float | None = None
    closed_s: float | None = None
    requests_moved: int = 0
    replayed_tokens: int = 0
    worst_gap_s: float = 0.0
    evidence: tuple[str, ...] = ()
    timeline: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendProbe:
    """Ask this replica for a canary, and give up after `deadline_s` seconds.

    Attributes:
        exact: Whether real work is no proof, and the known answer is asked for all the same.
    """

    replica_id: str
    deadline_s: float
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceReplica:
    """Tell this replica to leave, so that Ray Serve starts another."""

    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteIncident:
    """Store this state of an incident."""

    incident: Incident


Effect = SendProbe | ReplaceReplica | WriteIncident


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as the controller sees it, for gateways, /readyz and people."""

    replica_id: str
    generation: int
    state: ReplicaState
    reason: str
    since_s: float
    last_probe: ProbeResult | None
    snapshot: ReplicaSnapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The controller's board, published to the gateways; `version` rises with each change.

    Attributes:
        hosts: What was last heard of each place where no engine is ready, by host and device.
        poison: Requests that every gateway refuses now.
        ready_in_s: Seconds from `at_s` until an engine may be ready, as loads and holds stand; None
            while one can be asked, or when nobody can tell.
    """

    version: int
    at_s: float
    replicas: tuple[ReplicaStatus, ...]
    hosts: tuple[HostReported, ...] = ()
    poison: tuple[PoisonFound, ...] = ()
    ready_in_s: float | None = None
