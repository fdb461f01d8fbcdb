"""The Ray Serve shell around `routing.pick`."""

from dataclasses import fields
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.fleet import ReplaceReplica, ReplicaSnapshot, ReplicaState
from headrace_replicas.contract.requests import GenerateRequest, ProbeRequest
from headrace_serve import board
from headrace_serve.routing import pick

_SNAPSHOT_FIELDS = frozenset(field.name for field in fields(ReplicaSnapshot))


class FleetRouter(RequestRouter):
    """Routes generation by expected finish, and probes and orders to the replica they name.

    It keeps to one request per routing task (no FIFO mixin): the replica picked for a request is
    the one that this request is sent to, so that the claim on the board is true.
    """

    def initialize_state(self, **_kwargs: Any) -> None:
        """Called by Ray Serve once for each router."""
        self._clock = SystemClock()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray Serve's list of running replicas, with the snapshots that they recorded."""
        super().update_replicas(replicas)
        snapshots = [snapshot_of(replica.routing_stats) for replica in replicas]
        board.BOARD.members_seen(
            frozenset(replica.replica_id.unique_id for replica in replicas),
            [snapshot for snapshot in snapshots if snapshot is not None],
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one replica to try now, or none; Ray Serve asks again after a pause."""
        if pending_request is None:
            return []
        # Without this an empty answer is asked for again at once, for ever.
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wanted = pending_request.args[0]
        if isinstance(wanted, (ProbeRequest, ReplaceReplica)):
            target = by_name.get(wanted.replica_id)
            return [] if target is None else [[target]]
        return self._choose_for(wanted, by_name)

    def _choose_for(
        self, request: GenerateRequest, by_name: dict[str, RunningReplica]
    ) -> list[list[RunningReplica]]:
        now_s = self._clock.now_s()
        free = [
            replica.replica_id.unique_id
            for replica in self.select_available_replicas(list(by_name.values()))
        ]
        decision = pick(board.BOARD.candidates(free), board.BOARD.ask_for(request, now_s))
        if not decision.ranked:
            # It may have been refused by the replica that it was claimed for.
            board.BOARD.unclaim(request)
            return []
        chosen = decision.ranked[0]
        board.BOARD.claim(request, chosen, now_s)
        return [[by_name[chosen]]]


def snapshot_of(stats: dict[str, Any]) -> ReplicaSnapshot | None:
    """A replica's snapshot from its routing stats; None before it recorded one."""
    if not stats.keys() >= _SNAPSHOT_FIELDS:
        return None
    known = {name: value for name, value in stats.items() if name in _SNAPSHOT_FIELDS}
    return ReplicaSnapshot(**{**known, "state": ReplicaState(known["state"])})
