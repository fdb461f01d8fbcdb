"""One choice's tokens, from whichever replicas it takes.

The shell around `journal`, `stalls` and `failover`: it runs attempts one after the other, judges
their silence, and gives the next attempt what the earlier ones delivered. Whoever reads it sees
one sequence of ids and one ending.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import DeadlineExceededError, NoReplicaError
from headrace_replicas.contract.fleet import AttemptFailed, AttemptFailure, Notice, RequestMoved
from headrace_replicas.contract.requests import GenerateRequest, ResumeMode, TokenChunk
from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve import failover, stalls
from headrace_serve.board import Board
from headrace_serve.gaps import GapsOfProcess
from headrace_serve.journal import Accepted, Journal, Refused
from headrace_serve.poison import fingerprint_of
from headrace_serve.poison_guard import PoisonGuard

# A timer that rings later than this says that this process stood still: its event loop was held
# up, or the machine slept. Timers of a loop that runs ring within a few milliseconds.
_STANDSTILL_S: Final = 0.1


class AttemptLostError(Exception):
    """An attempt will bring nothing more; its request may go on elsewhere.

    Attributes:
        failure: What kind of loss it was; None when the call was taken back and no replica is to
            blame, as Ray Serve does when it hears first that the client has left.
        raw_text: The text of the failure as it came.
    """

    def __init__(self, failure: AttemptFailure | None, raw_text: str) -> None:
        super().__init__(failure, raw_text)
        self.failure = failure
        self.raw_text = raw_text


class Replicas(Protocol):
    """Where attempts run: Ray Serve in production, a scripted fleet in tests."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Run one attempt.

        Raises:
            AttemptLostError: The replica or its engine is lost to this attempt.
            HeadraceError: The request itself cannot be served.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamParts:
    """What all token streams of a gateway share.

    Attributes:
        replicas: Where attempts run.
        board: What this process knows of the fleet.
        gaps: What it learned of silence.
        tell: Takes notices for the controller; returns at once.
        settings: Moves, waits and deadlines.
        clock: Time source.
        guard: Stops requests that engines die of; None lets them move like all others.
    """

    replicas: Replicas
    board: Board
    gaps: GapsOfProcess
    tell: Callable[[Notice], None]
    settings: FailoverSettings
    clock: Clock
    guard: PoisonGuard | None = None


class TokenStream:
    """The tokens of one choice.

    Args:
        parts: What it shares with the gateway's other streams.
        base: The request; its attempt number and output are set for each attempt.
        fingerprint: What makes it the same as another, if that is known already.

    Attributes:
        resume: How the last move replayed the output; None while no output was replayed.
    """

    def __init__(
        self, parts: StreamParts, base: GenerateRequest, fingerprint: str | None = None
    ) -> None:
        self._parts = parts
        self._base = base
        self._guard = parts.guard
        self._fingerprint = "" if parts.guard is None else fingerprint or fingerprint_of(base)
        self._journal = Journal()
        self._phase: stalls.Phase = "prefill"
        self._delivered_s = parts.clock.monotonic_s()
        self._quiet_since_s = self._delivered_s
        self._holder: str | None = None
        self._arriving: asyncio.Future[TokenChunk | None] | None = None
        self._stirred: asyncio.Future[None] | None = None
        self._left: str | None = None
        self.resume: ResumeMode | None = None

    @property
    def attempts(self) -> int:
        """Replicas that this choice was given to, one after the other."""
        return self._journal.attempt

    async def run(self) -> AsyncGenerator[Accepted, None]:
        """Yield accepted tokens; the last one carries the finish reason.

        Raises:
            DeadlineExceededError: The request's deadline passed.
            NoReplicaError: No replica took it in time.
            PoisonRequestError: Engines die of it.
            HeadraceError: Why it cannot be completed, when moving on does not help.
        """
        try:
            while not self._journal.finished:
                guard = self._guard
                turn = guard.turn(self._base, self._fingerprint) if guard else nullcontext()
                async with turn, aclosing(self._next_attempt()) as arriving:
                    async for accepted in arriving:
                        yield accepted
            self.satisfied()
        finally:
            self._parts.board.forget(self._base.request_id)

    def satisfied(self) -> None:
        """Note that the answer is as long as it is wanted, finished or not."""
        if self._guard is not None:
            self._guard.completed(self._fingerprint)

    async def _next_attempt(self) -> AsyncGenerator[Accepted, None]:
        """One more attempt's accepted tokens; it returns when there must be another, or none.

        Raises:
            HeadraceError: As `run`.
        """
        self._journal.begin_attempt()
        request = self._journal.request_for_attempt(self._base)
        try:
            async with aclosing(self._attempt(request)) as arriving:
                async for accepted in arriving:
                    yield accepted
        except AttemptLostError as lost:
            self._move_on(lost, request)
        finally:
            if self._guard is not None:
                self._guard.left(request)

    async def _attempt(self, request: GenerateRequest) -> AsyncGenerator[Accepted, None]:
        """One attempt's accepted tokens.

        Raises:
            AttemptLostError: It ended, or went silent, before the answer did.
        """
        self._phase = "prefill"
        self._holder = None
        lost = False
        board = self._parts.board
        stir = partial(asyncio.get_running_loop().call_soon_threadsafe, self._stir)
        chunks = self._parts.replicas.generate(request)
        try:
            board.open(request, stir)
            while not self._journal.finished:
                chunk = await self._next(chunks, request)
                accepted = self._record(chunk)
                if accepted is not None:
                    self._note_delivery(request)
                    yield accepted
        except AttemptLostError as error:
            lost = error.failure is not None
            raise
        finally:
            self._holder = board.holder(request)
            board.release(request, failed=lost)
            await self._stop_waiting()
            await chunks.aclose()

    def _record(self, chunk: TokenChunk) -> Accepted | None:
        outcome = self._journal.record(chunk)
        if isinstance(outcome, Refused):
            raise AttemptLostError(outcome.failure, outcome.detail)
        return outcome

    async def _next(
        self, chunks: AsyncGenerator[TokenChunk, None], request: GenerateRequest
    ) -> TokenChunk:
        """The next chunk of an attempt.

        Raises:
            AttemptLostError: There is none, or it is late and another replica can take over.
            DeadlineExceededError, NoReplicaError: As `run`.
        """
        self._quiet_since_s = self._parts.clock.monotonic_s()
        arriving = self._arriving = asyncio.ensure_future(anext(chunks, None))
        await self._wait(arriving, request)
        if arriving.cancelled():
            raise AttemptLostError(None, "the call to the replica was taken back")
        chunk = arriving.result()
        if chunk is None:
            raise AttemptLostError("ended_early", "the stream ended without a finish reason")
        if self._holder is not None:
            gap_s = self._parts.clock.monotonic_s() - self._quiet_since_s
            self._parts.gaps.observe(self._phase, gap_s)
        if chunk.ids:
            self._phase = "decode"
        return chunk

    async def _stop_waiting(self) -> None:
        """Take back the call for a chunk, if one is out, and wait until it is.

        Cancelled in this wait, the call still comes to its end by itself. Only then may its
        generator be closed: one that runs refuses to be.
        """
        arriving = self._arriving
        if arriving is None:
            return
        if not arriving.done():
            arriving.cancel()
            await asyncio.wait({arriving})
        if not arriving.cancelled():
            arriving.exception()  # nobody wants it any more, and asyncio reports what nobody reads

    async def _wait(
        self, arriving: "asyncio.Future[TokenChunk | None]", request: GenerateRequest
    ) -> None:
        """Wait for a chunk as long as its replica may be silent, and longer if nobody is better."""
        stood_still = False
        while True:
            self._see_holder(request)
            if arriving.done():
                return
            stirred = self._stirred = asyncio.get_running_loop().create_future()
            timeout_s = self._rest_s()
            rings_s = self._parts.clock.monotonic_s() + timeout_s
            await asyncio.wait(
                {arriving, stirred},
                timeout=None if math.isinf(timeout_s) else timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            now_s = self._parts.clock.monotonic_s()
            if now_s > rings_s + _STANDSTILL_S and not stood_still:
                # Whoever stood still could not hear: the silence counts from here, once.
                stood_still = True
                self._quiet_since_s = now_s

    def _stir(self) -> None:
        """The board changed in a way that may matter to this stream."""
        if self._stirred is not None and not self._stirred.done():
            self._stirred.set_result(None)

    def _see_holder(self, request: GenerateRequest) -> None:
        """Count the silence of a replica from the moment at which it got the attempt."""
        holder = self._parts.board.holder(request)
        if holder != self._holder:
            self._holder = holder
            self._quiet_since_s = self._parts.clock.monotonic_s()
            if self._guard is not None and holder is not None:
                self._guard.seated(request, self._fingerprint, holder)

    def _rest_s(self) -> float:
        """Seconds for which to wait now; infinite when only the fleet or a chunk can end it.

        Raises:
            AttemptLostError: The attempt has stalled, and another replica can take over.
            DeadlineExceededError, NoReplicaError: As `run`.
        """
        left_s = self._until_deadline_s()
        if left_s <= 0:
            raise DeadlineExceededError(
                f"The request's deadline passed after {self._journal.delivered} tokens. "
                "Send it again with a longer timeout."
            )
        now_s = self._parts.clock.monotonic_s()
        limit_s = self._quiet_since_s + self._patience_s()
        if now_s < limit_s:
            return min(left_s, limit_s - now_s)
        self._judge_silence(now_s - self._quiet_since_s)
        return left_s

    def _patience_s(self) -> float:
        if self._holder is None:
            return self._parts.settings.no_replica_wait_s
        return self._parts.gaps.deadline_s(self._phase)

    def _until_deadline_s(self) -> float:
        deadline_s = self._base.deadline_s
        return math.inf if deadline_s is None else deadline_s - self._parts.clock.now_s()

    def _judge_silence(self, silence_s: float) -> None:
        """Leave a silent replica if another one can take over; else go on waiting for it.

        Raises:
            AttemptLostError: The attempt has stalled.
            NoReplicaError: No replica has taken the request.
        """
        if self._holder is None:
            raise NoReplicaError(
                f"No replica could take the request within {silence_s:.0f} s. Send it again later."
            )
        lost = AttemptLostError("stalled", f"no sign of life for {silence_s:.2f} s")
        match failover.decide(self._loss(lost), self._parts.settings):
            case failover.Wait() | failover.Complete():
                return
            case failover.Fail(error=error):
                raise error
            case failover.Resume() | failover.Retry():
                raise lost

    def _move_on(self, lost: AttemptLostError, request: GenerateRequest) -> None:
        """Tell everybody of a lost attempt, and return if the next one may begin.

        A request without a replica to go to begins its next attempt too: it waits in the router,
        which knows first when one comes.

        Raises:
            HeadraceError: The request ends here.
        """
        self._blame(lost)
        if self._guard is not None and self._holder is not None and not self._journal.finished:
            self._guard.lost(request, self._fingerprint, self._holder, lost.failure, lost.raw_text)
        match failover.decide(self._loss(lost), self._parts.settings):
            case failover.Fail(error=error):
                raise error
            case failover.Resume():
                self.resume = self._base.resume_mode
            case failover.Retry() | failover.Wait() | failover.Complete():
                if self._journal.delivered:
                    self.resume = self._base.resume_mode

    def _blame(self, lost: AttemptLostError) -> None:
        if self._holder is None or lost.failure is None:
            return
        now_s = self._parts.clock.now_s()
        self._left = self._left or self._holder
        self._parts.board.suspect(self._holder, lost.failure, now_s)
        self._parts.tell(
            AttemptFailed(
                replica_id=self._holder,
                request_id=self._base.request_id,
                attempt=self._journal.attempt,
                failure=lost.failure,
                delivered_tokens=self._journal.delivered,
                silence_s=self._parts.clock.monotonic_s() - self._quiet_since_s,
                raw_text=lost.raw_text,
                at_s=now_s,
            )
        )

    def _loss(self, lost: AttemptLostError) -> failover.Loss:
        now_s = self._parts.clock.now_s()
        return failover.Loss(
            replica_id=self._holder or "(none)",
            failure=lost.failure,
            raw_text=lost.raw_text,
            delivered_tokens=self._journal.delivered,
            finished=self._journal.finished,
            moves=self._journal.attempt - 1,
            # Whoever must prove its innocence gets the chance to.
            extra_moves=int(bool(self._guard and self._guard.runs_alone(self._fingerprint))),
            another_available=self._parts.board.has_another(self._base, self._holder, now_s),
            deadline_s=self._base.deadline_s,
            now_s=now_s,
        )

    def _note_delivery(self, request: GenerateRequest) -> None:
        """After a move, the first new token tells the controller how the move went."""
        now_s = self._parts.clock.monotonic_s()
        holder = self._parts.board.holder(request)
        if self._left is not None and holder is not None:
            self._parts.tell(
                RequestMoved(
                    request_id=request.request_id,
                    from_replica=self._left,
                    to_replica=holder,
                    attempt=request.attempt,
                    replayed_tokens=len(request.output_ids),
                    gap_s=now_s - self._delivered_s,
                    at_s=self._parts.clock.now_s(),
                )
            )
            self._left = None
        self._delivered_s = now_s
