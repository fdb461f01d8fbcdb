"""When a replica is probed, and what a verdict, or its absence, means.

Laws: never two probes at once on one replica; a passing probe moves nothing that is on its way
out; a probe that ran out of time while the engine progressed says nothing against the replica; a
replica that works without a pause is asked for the known answer once in `canary_period_s` all the
same, since real tokens prove life, not that they are right.
"""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import (
    Cause,
    ProbeResult,
    ProbeUnanswered,
    ReplicaSnapshot,
    ReplicaState,
)
from headrace_serve.fleet_orders import ask_replacement, cancel_replacement
from headrace_serve.fleet_state import (
    WATCHED,
    Moment,
    Replica,
    SentProbe,
    Trigger,
    first_backoff_s,
    moved,
)
from headrace_serve.fleet_symptoms import over, symptom

# A verdict travels at most this long after the deadline; then the probe is taken as lost.
PROBE_GRACE_S: Final = 5.0


def send_if_due(replica: Replica, moment: Moment) -> Replica:
    """The replica with a probe out, when one is due and none is out."""
    replica = _forget_lost_probe(replica, moment)
    if replica.probe is not None or not _wants_probe(replica):
        return replica
    exact = _exact_due(replica, moment)
    if not _due(replica, moment) and not (exact and replica.state is ReplicaState.READY):
        return replica
    # Only the known answer ends a suspension, so nothing less is asked for.
    exact = exact or replica.state is ReplicaState.SUSPENDED
    snapshot = replica.snapshot
    sent = SentProbe(
        sent_s=moment.at_s,
        deadline_s=moment.settings.probe_timeout_s,
        engine_steps=0 if snapshot is None else snapshot.engine_steps,
        last_progress_s=None if snapshot is None else snapshot.last_progress_s,
        exact=exact,
    )
    next_exact_s = moment.at_s if exact else replica.next_exact_s
    return replace(replica, probe=sent, next_exact_s=next_exact_s)


def _wants_probe(replica: Replica) -> bool:
    """A replica that still loads its model has nothing to answer with."""
    loading = replica.snapshot is not None and replica.snapshot.state is ReplicaState.STARTING
    return replica.state in WATCHED and not loading


def _due(replica: Replica, moment: Moment) -> bool:
    # Nothing is ever due later than one period ahead, unless the clock was set back since.
    wait_s = replica.next_probe_s - moment.at_s
    return wait_s <= 0 or wait_s > moment.settings.probe_period_s


def _exact_due(replica: Replica, moment: Moment) -> bool:
    wait_s = replica.next_exact_s - moment.at_s
    return wait_s <= 0 or wait_s > moment.settings.canary_period_s


def _probe_over(replica: Replica, moment: Moment) -> Replica:
    """The replica without its probe, however that ended."""
    sent = replica.probe
    if sent is not None and sent.exact:
        replica = _exact_asked(replica, sent.sent_s, moment)
    return replace(replica, probe=None)


def _exact_asked(replica: Replica, began_s: float, moment: Moment) -> Replica:
    """The replica with its next known answer due a period later, unless a doubt came meanwhile."""
    if began_s < replica.next_exact_s <= moment.at_s:
        return replica
    return replace(replica, next_exact_s=moment.at_s + moment.settings.canary_period_s)


def ask_at_once(replica: Replica, moment: Moment) -> Replica:
    """The replica with a known answer due now, whatever it is busy with."""
    if replica.state not in WATCHED:
        return replica
    return replace(replica, next_probe_s=moment.at_s, next_exact_s=moment.at_s)


def _forget_lost_probe(replica: Replica, moment: Moment) -> Replica:
    if replica.probe is None:
        return replica
    age_s = moment.at_s - replica.probe.sent_s
    if -PROBE_GRACE_S <= age_s <= replica.probe.deadline_s + PROBE_GRACE_S:
        return replica
    return _asked_again_later(_probe_over(replica, moment), moment)


def _asked_again_later(replica: Replica, moment: Moment) -> Replica:
    period_s = moment.settings.probe_period_s
    if replica.state is ReplicaState.READY:
        return replace(replica, next_probe_s=moment.at_s + period_s)
    return replace(
        replica,
        next_probe_s=moment.at_s + min(replica.backoff_s, period_s),
        backoff_s=min(2 * replica.backoff_s, period_s),
    )


def judge(replica: Replica, result: ProbeResult, moment: Moment) -> Replica:
    """The replica after a verdict. One of an earlier generation is dropped."""
    if result.generation < replica.generation:
        return replica
    began_s = result.at_s - result.latency_s
    if result.kind != "self" and replica.probe is not None:
        began_s = replica.probe.sent_s
        replica = _probe_over(replica, moment)
    if result.kind != "work":
        replica = _exact_asked(replica, began_s, moment)
    if replica.state not in WATCHED:
        return replica
    if not result.passed:
        return _asked_again_later(_failed(replica, result, moment), moment)
    if replica.state is ReplicaState.SUSPENDED and began_s < replica.since_s:
        # It began before the fault, and says nothing of what came after.
        return replace(replica, next_probe_s=moment.at_s)
    return _asked_again_later(_passed(replica, result, moment), moment)


def _passed(replica: Replica, result: ProbeResult, moment: Moment) -> Replica:
    if replica.state is ReplicaState.SUSPENDED and result.kind == "work":
        # Tokens that flow are no proof that they are the right ones.
        return replica
    replica = replace(replica, failures=0, last_probe=result)
    if replica.lost_its_files:
        # What it answered it had in memory, or read from another file.
        return replica
    replica = cancel_replacement(replica)
    if replica.state is ReplicaState.SUSPECT and replica.stale(moment.at_s, moment.settings):
        # Ready now would be suspect again at the next tick.
        return replica
    trigger = Trigger.WORKED if result.kind == "work" else Trigger.PROVED
    replica = moved(replica, trigger, f"passed a probe ({result.kind})", moment)
    if replica.replacement_owed:
        # It serves until it is its turn; what made its replacement necessary is not over.
        return replica
    return over(replica, f"the replica passed a probe ({result.kind})", moment.at_s)


def _failed(replica: Replica, result: ProbeResult, moment: Moment) -> Replica:
    cause = Cause.STORAGE_FAULT if result.unreadable else Cause.CANARY_FAILED
    replica = replace(replica, last_probe=result)
    replica = symptom(replica, cause, _story(result), moment)
    replica = moved(replica, Trigger.DISTRUSTED, "its canary failed", moment)
    return _count_failure(replica, moment)


def _story(result: ProbeResult) -> str:
    if result.unreadable:
        return f"canary ({result.kind}) broke off after {result.latency_s:.2f} s: {result.detail}"
    right = sum(1 for want, got in zip(result.expected, result.got, strict=False) if want == got)
    return (
        f"canary ({result.kind}) gave {right} of {len(result.expected)} expected tokens in "
        f"{result.latency_s:.2f} s: {result.detail or 'no detail'}; got {list(result.got)}"
    )


def unanswered(replica: Replica, notice: ProbeUnanswered, moment: Moment) -> Replica:
    """The replica after a probe without a verdict; one that was not out says nothing."""
    sent = replica.probe
    if sent is None:
        return replica
    replica = _probe_over(replica, moment)
    if replica.state not in WATCHED:
        return replica
    if notice.timed_out and _progressed(replica.snapshot, sent):
        return _asked_again_later(replica, moment)
    what = "ran out of time" if notice.timed_out else "could not be asked"
    text = f"canary {what}: {notice.detail}"
    replica = symptom(replica, Cause.CANARY_TIMEOUT, text, moment)
    replica = moved(replica, Trigger.DOUBTED, f"its canary {what}", moment)
    return _asked_again_later(_count_failure(replica, moment), moment)


def _progressed(snapshot: ReplicaSnapshot | None, sent: SentProbe) -> bool:
    if snapshot is None:
        return False
    if snapshot.engine_steps > sent.engine_steps:
        return True
    # One step over streamed experts may outlast a probe; its reads are progress too.
    return sent.last_progress_s is not None and snapshot.last_progress_s > sent.last_progress_s


def _count_failure(replica: Replica, moment: Moment) -> Replica:
    replica = replace(replica, failures=replica.failures + 1)
    if replica.failures < moment.settings.canary_failures:
        return replica
    return ask_replacement(replica, f"{replica.failures} failed canaries in a row", moment)


def credit_work(replica: Replica, before: ReplicaSnapshot, moment: Moment) -> Replica:
    """The replica after a newer snapshot: real tokens since `before` are a proof of life.

    While a probe is out they are not, because the canary itself may have made them: one that
    streams a token and freezes would pass.
    """
    now = replica.snapshot
    if now is None or replica.probe is not None or replica.state not in WATCHED:
        return replica
    if now.running == 0 or now.engine_steps <= before.engine_steps:
        return replica
    work = ProbeResult(
        replica_id=replica.replica_id,
        generation=now.generation,
        kind="work",
        passed=True,
        latency_s=0.0,
        expected=(),
        got=(),
        at_s=moment.at_s,
    )
    return judge(replica, work, moment)


def newborn(replica_id: str, moment: Moment) -> Replica:
    """A replica that was just heard of for the first time."""
    return Replica(
        replica_id=replica_id,
        state=ReplicaState.STARTING,
        reason="waits for its first passed probe",
        since_s=moment.at_s,
        next_probe_s=moment.at_s,
        next_exact_s=moment.at_s,
        backoff_s=first_backoff_s(moment.settings),
    )


def restarted(replica: Replica, moment: Moment) -> Replica:
    """The replica when another engine answers under its id: nothing proved so far counts."""
    fresh = replace(replica, probe=None, failures=0, order=None, last_probe=None, storage_s=None)
    return moved(fresh, Trigger.RESTARTED, "its engine started again", moment)


def came_back(replica: Replica, moment: Moment) -> Replica:
    """A lost replica that turned out to live: it starts anew and a canary decides."""
    fresh = replace(replica, failures=0, listed=True)
    return moved(fresh, Trigger.LISTED_AGAIN, "it is listed again", moment)


def went_silent(replica: Replica, moment: Moment) -> Replica:
    """The replica at a tick: a ready one whose snapshots stopped is suspect, not lost."""
    if replica.state is not ReplicaState.READY or not replica.stale(moment.at_s, moment.settings):
        return replica
    why = f"no snapshot for {moment.settings.snapshot_stale_s:.1f} s"
    return moved(replica, Trigger.DOUBTED, why, moment)
