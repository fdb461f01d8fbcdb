"""What this process knows of the replicas, shared by the gateway, its routers and the controller.

Ray Serve runs a request router on a thread of its own and pickles the router's class by value, so
what gateway and router share lives here, in an installed module. Knowledge comes from three
sides, fastest first: this process's own lost attempts, the controller's board, and the snapshots
that Ray Serve carries to every router.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from headrace_replicas.contract.fleet import (
    FleetView,
    ReplicaSnapshot,
    ReplicaState,
    ReplicaStatus,
)
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve.routing import Candidate, RouteAsk, pick

AttemptKey = tuple[str, int, int]
Stir = Callable[[], object]

_SERVING = (ReplicaState.READY, ReplicaState.SUSPECT)


def attempt_key(request: GenerateRequest) -> AttemptKey:
    """What tells the attempts of one gateway apart."""
    return (request.request_id, request.choice, request.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An attempt that the router gave to a replica and that has not ended.

    Attributes:
        tokens: Prompt and answer tokens at most.
        claimed_s: Wall-clock second of the decision.
    """

    replica_id: str
    tokens: int
    claimed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    at_s: float
    why: str


def _newer(held: ReplicaStatus | None, said: ReplicaStatus) -> ReplicaStatus:
    """The status that holds: a controller that just started calls everybody `starting`."""
    if held is None or said.state is not ReplicaState.STARTING or held.state not in _SERVING:
        return said
    return said if said.generation > held.generation else held


class Board:
    """The process-wide table. Every method takes the lock once and does no I/O.

    Attributes:
        stale_s: A snapshot older than this is no sign of life; set from the fleet's settings.
    """

    def __init__(self) -> None:
        self.stale_s = FleetSettings().snapshot_stale_s
        self._lock = threading.Lock()
        self._snapshots: dict[str, ReplicaSnapshot] = {}
        self._members: frozenset[str] = frozenset()
        self._suspicions: dict[str, _Suspicion] = {}
        self._open: dict[AttemptKey, Stir] = {}
        self._claims: dict[AttemptKey, Claim] = {}
        self._failed: dict[str, frozenset[str]] = {}
        self._view = FleetView(version=0, at_s=0.0, replicas=())

    def members_seen(
        self, replica_ids: frozenset[str], snapshots: Iterable[ReplicaSnapshot]
    ) -> None:
        """Ray Serve listed the running replicas and what each says of itself."""
        with self._lock:
            before = self._prospects()
            self._members = replica_ids
            for snapshot in snapshots:
                held = self._snapshots.get(snapshot.replica_id)
                if held is None or held.sequence < snapshot.sequence:
                    self._snapshots[snapshot.replica_id] = snapshot
            for gone in (self._snapshots.keys() | self._suspicions.keys()) - replica_ids:
                self._snapshots.pop(gone, None)
                self._suspicions.pop(gone, None)
            stirs = self._stirs_since(before)
        for stir in stirs:
            stir()

    def members(self) -> tuple[frozenset[str], tuple[ReplicaSnapshot, ...]]:
        """The running replicas and their newest snapshots."""
        with self._lock:
            return self._members, tuple(self._snapshots.values())

    def publish(self, view: FleetView) -> None:
        """The controller's board arrived.

        A restarted controller counts from the start again, and knows nothing at first. What the
        last one said of a replica holds until the new one has an opinion of its own.
        """
        with self._lock:
            before = self._prospects()
            self._view = replace(view, replicas=self._believed(view))
            proved = {
                status.replica_id: status.last_probe.at_s
                for status in view.replicas
                if status.last_probe is not None and status.last_probe.passed
            }
            for replica_id, suspicion in list(self._suspicions.items()):
                if proved.get(replica_id, 0.0) > suspicion.at_s:
                    del self._suspicions[replica_id]
            stirs = self._stirs_since(before)
        for stir in stirs:
            stir()

    def _believed(self, view: FleetView) -> tuple[ReplicaStatus, ...]:
        held = {status.replica_id: status for status in self._view.replicas}
        said = {
            status.replica_id: _newer(held.get(status.replica_id), status)
            for status in view.replicas
        }
        unsaid = {name: held[name] for name in held.keys() & self._members - said.keys()}
        return tuple(status for _, status in sorted((said | unsaid).items()))

    def _prospects(self) -> object:
        """All that decides whether a replica may be picked."""
        return (
            self._members,
            {name: snapshot.state for name, snapshot in self._snapshots.items()},
            {status.replica_id: status.state for status in self._view.replicas},
        )

    def _stirs_since(self, before: object) -> tuple[Stir, ...]:
        return () if self._prospects() == before else tuple(self._open.values())

    @property
    def view(self) -> FleetView:
        """The controller's last board."""
        return self._view

    def suspect(self, replica_id: str, why: str, at_s: float) -> None:
        """An attempt was lost on this replica; it is avoided until a later probe clears it."""
        with self._lock:
            self._suspicions[replica_id] = _Suspicion(at_s=at_s, why=why)

    def open(self, request: GenerateRequest, stir: Stir) -> None:
        """An attempt begins; `release` ends it.

        Args:
            request: The attempt.
            stir: Called, on any thread and soon back, when a router gives the attempt to a
                replica, and when a replica comes, goes, or changes its state.
        """
        with self._lock:
            self._open[attempt_key(request)] = stir

    def claim(self, request: GenerateRequest, replica_id: str, at_s: float) -> None:
        """The router gives an attempt to a replica: chosen and counted in one step.

        A router works on another thread and may come too late: nothing is counted for an attempt
        that has ended, since nobody would release it.
        """
        key = attempt_key(request)
        tokens = len(request.prompt_ids) + request.max_tokens
        with self._lock:
            stir = self._open.get(key)
            if stir is None:
                return
            self._claims[key] = Claim(replica_id=replica_id, tokens=tokens, claimed_s=at_s)
        stir()

    def unclaim(self, request: GenerateRequest) -> None:
        """The router has nobody for this attempt any more: it waits again."""
        with self._lock:
            self._claims.pop(attempt_key(request), None)

    def holder(self, request: GenerateRequest) -> str | None:
        """The replica that has this attempt, or None while it waits for one."""
        with self._lock:
            claim = self._claims.get(attempt_key(request))
            return None if claim is None else claim.replica_id

    def release(self, request: GenerateRequest, *, failed: bool) -> None:
        """An attempt ended; a failed one makes its replica the request's last resort."""
        with self._lock:
            self._open.pop(attempt_key(request), None)
            claim = self._claims.pop(attempt_key(request), None)
            if claim is not None and failed:
                before = self._failed.get(request.request_id, frozenset())
                self._failed[request.request_id] = before | {claim.replica_id}

    def in_flight(self) -> dict[str, int]:
        """Attempts of this process on each replica that has any."""
        with self._lock:
            return dict(Counter(claim.replica_id for claim in self._claims.values()))

    def forget(self, request_id: str) -> None:
        """A request ended; nothing of it is kept."""
        with self._lock:
            self._failed.pop(request_id, None)

    def failed_on(self, request_id: str) -> frozenset[str]:
        """The replicas on which this request has already lost an attempt."""
        with self._lock:
            return self._failed.get(request_id, frozenset())

    def candidates(self, replica_ids: Sequence[str]) -> tuple[Candidate, ...]:
        """What routing needs to know of each replica."""
        with self._lock:
            statuses = {status.replica_id: status for status in self._view.replicas}
            return tuple(self._candidate(name, statuses.get(name)) for name in replica_ids)

    def ask_for(self, request: GenerateRequest, now_s: float) -> RouteAsk:
        """What routing is asked for one attempt."""
        return RouteAsk(
            prompt_tokens=len(request.prompt_ids) + len(request.output_ids),
            max_tokens=request.max_tokens - len(request.output_ids),
            avoid=self.failed_on(request.request_id),
            now_s=now_s,
            tiebreak=request.seed,
            stale_s=self.stale_s,
        )

    def has_another(self, request: GenerateRequest, holder: str | None, now_s: float) -> bool:
        """Whether routing would now find a replica other than `holder` for this request."""
        members, _snapshots = self.members()
        others = sorted(members - {holder})
        return bool(pick(self.candidates(others), self.ask_for(request, now_s)).ranked)

    def _candidate(self, replica_id: str, status: ReplicaStatus | None) -> Candidate:
        mine = [claim for claim in self._claims.values() if claim.replica_id == replica_id]
        snapshot = self._snapshots.get(replica_id)
        return Candidate(
            replica_id=replica_id,
            state=None if status is None else status.state,
            snapshot=snapshot,
            in_flight_requests=len(mine),
            in_flight_tokens=sum(claim.tokens for claim in mine),
            suspected=replica_id in self._suspicions,
            seen_s=0.0 if snapshot is None else snapshot.at_s,
        )

    def describe(self) -> tuple[ReplicaStatus, ...]:
        """The controller's statuses with this process's newest snapshots, for people."""
        with self._lock:
            return tuple(
                replace(status, snapshot=self._snapshots.get(status.replica_id, status.snapshot))
                for status in self._view.replicas
            )


BOARD = Board()
