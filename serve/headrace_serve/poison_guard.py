"""A gateway's guard against requests that engines die of: the shell around `poison`.

It knows which requests each replica works on, as far as this gateway gave them to it. Requests of
other gateways are not in its sight, so with several of them a second loss proves nothing yet; what
those have condemned comes with the controller's board.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import DeadlineExceededError, PoisonRequestError
from headrace_replicas.contract.fleet import (
    AttemptFailure,
    Notice,
    PoisonFound,
    ReplicaState,
)
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import FleetSettings
from headrace_serve import poison
from headrace_serve.board import AttemptKey, Board, attempt_key

_TEXT_CHARS: Final = 300
# These end because they were told to: nobody's request is to blame.
_TOLD_TO_GO: Final = (ReplicaState.DRAINING, ReplicaState.STOPPING)


class _Seat(NamedTuple):
    """An attempt's place at a replica."""

    fingerprint: str
    replica_id: str
    since_s: float


class PoisonGuard:
    """Lives on the gateway's event loop; only `check` may be called from other threads.

    Args:
        settings: How long marks and verdicts last.
        board: What this process knows of the fleet.
        tell: Takes notices for the controller; returns at once.
        clock: Time source.
        is_only_gateway: Whether all requests of the fleet go through here.
    """

    def __init__(
        self,
        *,
        settings: FleetSettings,
        board: Board,
        tell: Callable[[Notice], None],
        clock: Clock,
        is_only_gateway: bool = True,
    ) -> None:
        self._is_only_gateway = is_only_gateway
        self._settings = settings
        self._board = board
        self._tell = tell
        self._clock = clock
        self._suspects = poison.Suspects()
        self._seats: dict[AttemptKey, _Seat] = {}
        self._lane = asyncio.Lock()

    def check(self, fingerprint: str) -> None:
        """Refuse a condemned request.

        Raises:
            PoisonRequestError: It is one.
        """
        now_s = self._clock.now_s()
        sentence = poison.sentence_of(self._suspects, fingerprint, now_s)
        if sentence is not None:
            raise _refusal(sentence.losses, sentence.until_s - now_s)
        for found in self._board.view.poison:
            if found.fingerprint == fingerprint and found.until_s > now_s:
                raise _refusal(found.losses, found.until_s - now_s)

    def runs_alone(self, fingerprint: str) -> bool:
        """Whether a request is marked twice, and waits for its turn."""
        return poison.runs_alone(self._suspects, fingerprint)

    @asynccontextmanager
    async def turn(self, request: GenerateRequest, fingerprint: str) -> AsyncGenerator[None, None]:
        """Run one attempt: at once, or alone among those that are marked twice.

        Raises:
            PoisonRequestError: The request was condemned, at the latest while it waited.
            DeadlineExceededError: Its deadline passed while it waited.
        """
        self.check(fingerprint)
        if not self.runs_alone(fingerprint):
            yield
            return
        await self._enter_lane(request)
        try:
            self.check(fingerprint)
            yield
        finally:
            self._lane.release()

    async def _enter_lane(self, request: GenerateRequest) -> None:
        left_s = (
            math.inf if request.deadline_s is None else request.deadline_s - self._clock.now_s()
        )
        try:
            async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                await self._lane.acquire()
        except TimeoutError as error:
            raise DeadlineExceededError(
                "The request's deadline passed while it waited for its turn: engines were lost "
                "under it twice, and such requests run one at a time. Send it again with a longer "
                "timeout."
            ) from error

    def seated(self, request: GenerateRequest, fingerprint: str, replica_id: str) -> None:
        """Note that a replica works on an attempt; `left` ends that."""
        self._seats[attempt_key(request)] = _Seat(fingerprint, replica_id, self._clock.now_s())

    def left(self, request: GenerateRequest) -> None:
        """Note that an attempt has ended and, if it was lost, `lost` was told."""
        self._seats.pop(attempt_key(request), None)

    def lost(
        self,
        request: GenerateRequest,
        fingerprint: str,
        replica_id: str,
        failure: AttemptFailure | None,
        raw_text: str,
    ) -> None:
        """Take a lost attempt.

        Raises:
            PoisonRequestError: Its request is condemned from now on.
        """
        if not poison.blames(failure, raw_text) or self._told_to_go(replica_id):
            return
        now_s = self._clock.now_s()
        seat = self._seats.get(attempt_key(request))
        mark = poison.Mark(
            replica_id=replica_id,
            text=f"{failure} under it: {raw_text[:_TEXT_CHARS] or 'no words'}",
            at_s=now_s,
            began_s=now_s if seat is None else seat.since_s,
        )
        present = [one.fingerprint for one in self._seats.values() if one.replica_id == replica_id]
        self._suspects, verdict = poison.lost(
            self._suspects,
            fingerprint,
            mark,
            present=present,
            sees_all=self._is_only_gateway,
            poison_for_s=self._settings.poison_for_s,
        )
        if verdict is poison.Verdict.CONDEMNED:
            sentence = self._suspects.sentences[fingerprint]
            self._tell(
                PoisonFound(
                    fingerprint=fingerprint,
                    request_id=request.request_id,
                    replica_id=replica_id,
                    losses=sentence.losses,
                    until_s=sentence.until_s,
                    at_s=now_s,
                )
            )
            raise _refusal(sentence.losses, sentence.until_s - now_s)

    def _told_to_go(self, replica_id: str) -> bool:
        return any(
            status.replica_id == replica_id and status.state in _TOLD_TO_GO
            for status in self._board.view.replicas
        )

    def completed(self, fingerprint: str) -> None:
        """Note that an answer came to its end: its request is above suspicion."""
        self._suspects = poison.completed(self._suspects, fingerprint)


def _refusal(losses: tuple[str, ...], left_s: float) -> PoisonRequestError:
    return PoisonRequestError(
        f"The same request was there when {len(losses)} engines were lost, so it is refused for "
        f"another {max(1, math.ceil(left_s / 60))} minutes: {'; '.join(losses)}. Change the "
        "prompt or the sampling, or see docs/runbooks/poison_request.md."
    )
