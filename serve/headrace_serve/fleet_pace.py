"""Whether a replica is far slower than it is used to be.

Laws: slowness changes no state and asks for no replacement; a slow spell teaches nothing, so that
it cannot become usual; a replica is compared with itself at about the same batch, since a larger
batch makes more tokens a second, and that is not speed.
"""

from dataclasses import replace
from typing import Final

from headrace_replicas.contract.fleet import Cause, Incident, ReplicaSnapshot
from headrace_serve import incidents
from headrace_serve.fleet_records import Pace, is_open
from headrace_serve.fleet_state import WATCHED, Moment, Replica

# About the last ten busy minutes make what is usual.
_MEMORY_S: Final = 600.0
# Busy seconds of one size of batch after which its rate is known.
_LEARNED_S: Final = 20.0
# Snapshots that are further apart say nothing of the time between them.
_GAP_S: Final = 5.0


def heard(replica: Replica, before: ReplicaSnapshot | None, moment: Moment) -> Replica:
    """The replica after a snapshot, which its record holds already."""
    now = replica.snapshot
    if now is None or replica.state not in WATCHED:
        return replica
    if before is not None and before.generation != now.generation:
        return replace(replica, pace=Pace(incident=_closed(replica, moment)))
    if before is None or before.running == 0 or now.running == 0:
        return replica
    busy_s = now.at_s - before.at_s
    moves = now.engine_steps > before.engine_steps
    if not (0 < busy_s <= _GAP_S and moves and now.step_rate > 0):
        return replica
    return _judged(replica, now, busy_s, moment)


def _judged(replica: Replica, now: ReplicaSnapshot, busy_s: float, moment: Moment) -> Replica:
    pace, size = replica.pace, now.running.bit_length()
    usual = _usual(pace, size)
    ratio = moment.settings.slow_ratio
    if usual is None or now.step_rate >= ratio * usual:
        pace = replace(_learned(pace, size, now.step_rate, busy_s), slow_s=0.0)
    else:
        pace = replace(pace, slow_s=pace.slow_s + busy_s)
    if usual is None:
        return replace(replica, pace=pace)
    if is_open(pace.incident):
        # A rate between the two limits is neither slow nor back.
        back = now.step_rate >= min(1.0, 2 * ratio) * usual
        text = f"{now.step_rate:.1f} tokens/s again"
        return replace(
            replica,
            pace=replace(pace, incident=_closed(replica, moment, text) if back else pace.incident),
        )
    if pace.slow_s >= moment.settings.slow_for_s:
        pace = replace(pace, incident=_opened(replica, now, usual, pace.slow_s, moment))
    return replace(replica, pace=pace)


def _usual(pace: Pace, size: int) -> float | None:
    """The usual rate at this size of batch, or at the next smaller one that is known."""
    known = [one for one, learned_s in pace.learned_s.items() if learned_s >= _LEARNED_S]
    fitting = [one for one in known if one <= size]
    return pace.usual[max(fitting)] if fitting else None


def _learned(pace: Pace, size: int, rate: float, busy_s: float) -> Pace:
    learned_s = min(pace.learned_s.get(size, 0.0), _MEMORY_S)
    share = busy_s / (learned_s + busy_s)
    usual = pace.usual.get(size, rate)
    return replace(
        pace,
        usual={**pace.usual, size: usual + share * (rate - usual)},
        learned_s={**pace.learned_s, size: learned_s + busy_s},
    )


def _opened(
    replica: Replica, now: ReplicaSnapshot, usual: float, slow_s: float, moment: Moment
) -> Incident:
    text = (
        f"{now.step_rate:.2f} tokens/s with {now.running} requests for {slow_s:.0f} busy seconds; "
        f"usual is {usual:.2f}, and below {moment.settings.slow_ratio:.0%} of it is slow"
    )
    if now.neighbours:
        text += f"\nOther processes on the GPU: {now.neighbours}."
    return incidents.open_(
        cause=Cause.REPLICA_SLOW,
        host=now.host,
        replica=replica.replica_id,
        generation=now.generation,
        text=text,
        at_s=moment.at_s,
        subject=f"{replica.replica_id}-slow",
    )


def _closed(replica: Replica, moment: Moment, why: str = "that engine is gone") -> Incident | None:
    incident = replica.pace.incident
    return None if incident is None else incidents.close(incident, why=why, at_s=moment.at_s)


def gone(replica: Replica, moment: Moment) -> Replica:
    """The replica once it is on its way out: nobody waits for its speed any more."""
    if replica.state in WATCHED or not is_open(replica.pace.incident):
        return replica
    return replace(replica, pace=replace(replica.pace, incident=_closed(replica, moment)))
