"""The processes of one session, and how they are ended.

Ray gives each worker a process group of its own, but none leaves the session in which
`ray start` runs. So the session is the fence: what is in it is ours, and nothing else is.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psutil

from headrace_replicas.contract.clock import Clock

_POLL_S: Final = 0.05
_DEAD: Final = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One living process.

    Attributes:
        pid: Its id, which the system gives to others later.
        started_s: Its start; with the pid it names a process for good.
        parent: Its parent's id.
        session: The id of its session.
    """

    pid: int
    started_s: float
    parent: int
    session: int


def members(session: int) -> frozenset[Member]:
    """Living processes of a session, and what descends from them in other sessions."""
    everybody = _processes()
    found = {process for process in everybody if process.session == session}
    while True:
        pids = {process.pid for process in found}
        children = {process for process in everybody if process.parent in pids} - found
        if not children:
            return frozenset(found)
        found |= children


def alive(known: Iterable[Member]) -> frozenset[Member]:
    """Those that still live and are still the same process."""
    now = {(process.pid, process.started_s) for process in _processes()}
    return frozenset(member for member in known if (member.pid, member.started_s) in now)


def kill_all(
    session: int, known: Iterable[Member], spare: int, give_up_s: float, clock: Clock
) -> frozenset[Member]:
    """SIGKILL what is left of a session until nothing is.

    Args:
        session: The session.
        known: Processes seen in it earlier; one of them may have moved to a session of its own.
        spare: A process id that stays.
        give_up_s: Time on `clock.monotonic_s` after which the rest is reported.
        clock: Where the time comes from.

    Returns:
        What could not be ended.
    """
    while True:
        rest = {one for one in members(session) | alive(known) if one.pid != spare}
        if not rest or clock.monotonic_s() >= give_up_s:
            return frozenset(rest)
        for one in rest:
            send(one, signal.SIGKILL)
        time.sleep(_POLL_S)


def send(member: Member, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone by now."""
    try:
        os.kill(member.pid, number)
    except ProcessLookupError:
        return


def _processes() -> list[Member]:
    """All processes that this user can see, without the dead that wait for their parent."""
    found = []
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                member = Member(
                    pid=process.pid,
                    started_s=process.create_time(),
                    parent=process.ppid(),
                    session=os.getsid(process.pid),
                )
                status = process.status()
        except (psutil.Error, ProcessLookupError, PermissionError):
            # Gone meanwhile, or another user's, which is never ours.
            continue
        if status not in _DEAD:
            found.append(member)
    return found
