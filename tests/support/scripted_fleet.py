"""A fleet of scripted replicas behind `token_stream.Replicas`: a known model, paces and faults.

The next token is a function of the request and of all output before it, so every replica continues
every other's answer, as engines with the same weights and position-keyed sampling do. What goes
wrong in an attempt, a plan says.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, Literal

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.fleet import AttemptFailed, Notice, ReplicaState, RequestMoved
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    Progress,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve.board import Board
from headrace_serve.routing import pick
from headrace_serve.token_stream import AttemptLostError, GapsOfProcess, StreamParts
from tests.support.fleet import snapshot
from tests.support.virtual_time import VirtualClock

Model = Callable[[GenerateRequest, tuple[int, ...]], int | None]
"""The next token after this output; None where the model ends by itself."""

FaultKind = Literal[
    # These end the attempt.
    "die",
    "engine_fault",
    "refuse_weights",
    "end_cleanly",
    "cancelled_inside",
    "stall",
    "contradict",
    "leave_gap",
    "never_accept",
    # These do no harm.
    "pause",
    "duplicate",
    "overlap",
    "late_chunk",
]

LOSSES: Final[tuple[FaultKind, ...]] = (
    "die",
    "engine_fault",
    "refuse_weights",
    "end_cleanly",
    "cancelled_inside",
    "stall",
    "contradict",
    "leave_gap",
    "never_accept",
)
HARMLESS: Final[tuple[FaultKind, ...]] = ("pause", "duplicate", "overlap", "late_chunk")

_ROUTER_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens in one attempt.

    Attributes:
        at: Output position before which it happens; an attempt that begins later begins with it.
        for_s: Length of a pause, seconds.
    """

    kind: FaultKind
    at: int = 0
    for_s: float = 0.0


Plan = Callable[[GenerateRequest], Fault | None]


def by_attempt(*faults: Fault | None) -> Plan:
    """The first fault in the first attempt, and so on; later attempts run well."""

    def plan(request: GenerateRequest) -> Fault | None:
        return faults[request.attempt - 1] if request.attempt <= len(faults) else None

    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast replicas work.

    Attributes:
        accept_s: From the claim to the first chunk, which says that the replica has the request.
        prefill_s: From there to the first token.
        sign_s: Between two signs of life during prefill.
        token_s: For each token.
        chunk_tokens: Tokens that travel together.
        finish_apart: Whether the finish comes in a chunk of its own.
        close_s: How long a generator needs to end when it is told to.
    """

    accept_s: float = 0.002
    prefill_s: float = 0.3
    sign_s: float = 0.2
    token_s: float = 0.02
    chunk_tokens: int = 1
    finish_apart: bool = True
    close_s: float = 0.0


def hashing_model(answer_tokens: int, vocabulary: int = 1000) -> Model:
    """A model whose every token depends on all before it; it ends after `answer_tokens`."""

    def next_token(request: GenerateRequest, output: tuple[int, ...]) -> int | None:
        if len(output) >= answer_tokens:
            return None
        seen = (request.seed, request.choice, request.prompt_ids, output)
        return int.from_bytes(blake2b(repr(seen).encode(), digest_size=8).digest()) % vocabulary

    return next_token


def speaking_model(ids: Iterable[int]) -> Model:
    """A model that always says the same."""
    answer = tuple(ids)
    return lambda _request, output: answer[len(output)] if len(output) < len(answer) else None


def logprob_of(request: GenerateRequest, position: int, token: int) -> TokenLogprob:
    """A known log probability for each token and place."""
    alternatives = request.sampling.logprobs or 0
    return TokenLogprob(
        token_id=token,
        logprob=-token / 1000 - position / 10,
        top=tuple((token + rank, -float(rank)) for rank in range(alternatives)),
    )


class ScriptedFleet:
    """Replicas by name; each attempt goes where `routing.pick` sends it.

    Args:
        board: What routing knows; attempts are claimed there as the router does it.
        clock: Time source.
        model: What all replicas compute.
        pace: How fast.
        plan: What goes wrong.
        names: The replicas at the beginning.

    Attributes:
        attempts: (replica, request) of every attempt that a replica got, in order.
        open_attempts: Attempts whose generator has begun and not ended.
    """

    def __init__(
        self,
        *,
        board: Board,
        clock: Clock,
        model: Model,
        pace: Pace,
        plan: Plan,
        names: Iterable[str] = ("a", "b", "c"),
    ) -> None:
        self._board = board
        self._clock = clock
        self._model = model
        self._pace = pace
        self.plan = plan
        self._states = dict.fromkeys(names, ReplicaState.READY)
        self._sequence = 0
        self.attempts: list[tuple[str, GenerateRequest]] = []
        self.open_attempts = 0
        self._announce()

    def appear(self, *names: str) -> None:
        """These replicas are listed from now on, and ready."""
        self._states |= dict.fromkeys(names, ReplicaState.READY)
        self._announce()

    def vanish(self, *names: str) -> None:
        """These replicas are listed no more."""
        for name in names:
            del self._states[name]
        self._announce()

    def _announce(self) -> None:
        self._sequence += 1
        now_s = self._clock.now_s()
        snapshots = [
            snapshot(
                name, state=state, sequence=self._sequence, at_s=now_s, last_progress_s=now_s
            )
            for name, state in self._states.items()
        ]
        self._board.members_seen(frozenset(self._states), snapshots)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Run one attempt; see `Replicas.generate`."""
        async with self._counted():
            self.attempts.append((await self._route(request), request))
            fault = self.plan(request)
            if fault is not None and fault.kind == "never_accept":
                await _for_ever()
            async with aclosing(self._work(request, fault)) as chunks:
                async for chunk in chunks:
                    yield chunk

    @asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None, None]:
        self.open_attempts += 1
        try:
            yield
        finally:
            if self._pace.close_s:
                await asyncio.sleep(self._pace.close_s)
            self.open_attempts -= 1

    async def _route(self, request: GenerateRequest) -> str:
        while True:
            self._announce()
            now_s = self._clock.now_s()
            names = sorted(self._states)
            decision = pick(self._board.candidates(names), self._board.ask_for(request, now_s))
            if decision.ranked:
                self._board.claim(request, decision.ranked[0], now_s)
                return decision.ranked[0]
            await asyncio.sleep(_ROUTER_PAUSE_S)

    async def _work(
        self, request: GenerateRequest, fault: Fault | None
    ) -> AsyncGenerator[TokenChunk, None]:
        await asyncio.sleep(self._pace.accept_s)
        yield _chunk(request, len(request.output_ids), progress=True)
        if fault is not None and fault.at <= len(request.output_ids) == 0:
            async for chunk in self._go_wrong(request, (), fault):
                yield chunk
            fault = None
        left_s = self._pace.prefill_s
        while left_s > 0:
            await asyncio.sleep(min(self._pace.sign_s, left_s))
            left_s -= self._pace.sign_s
            yield _chunk(request, len(request.output_ids), progress=True)
        output, sent = request.output_ids, len(request.output_ids)
        while True:
            if fault is not None and len(output) >= fault.at:
                if sent < len(output):
                    yield _chunk(request, sent, output[sent:])
                    sent = len(output)
                async for chunk in self._go_wrong(request, output, fault):
                    yield chunk
                fault = None
            finish = self._finish(request, output)
            if finish is not None:
                if sent < len(output) and self._pace.finish_apart:
                    yield _chunk(request, sent, output[sent:])
                    sent = len(output)
                yield _chunk(request, sent, output[sent:], finish=finish)
                return
            await asyncio.sleep(self._pace.token_s)
            output = (*output, self._token(request, output))
            if len(output) - sent >= self._pace.chunk_tokens:
                yield _chunk(request, sent, output[sent:])
                sent = len(output)

    def _finish(self, request: GenerateRequest, output: tuple[int, ...]) -> FinishReason | None:
        if len(output) >= request.max_tokens:
            return "length"
        return "stop" if self._model(request, output) is None else None

    def _token(self, request: GenerateRequest, output: tuple[int, ...]) -> int:
        token = self._model(request, output)
        assert token is not None
        return token

    async def _go_wrong(  # noqa: C901  one case for each kind of fault
        self, request: GenerateRequest, output: tuple[int, ...], fault: Fault
    ) -> AsyncGenerator[TokenChunk, None]:
        held = len(output)
        match fault.kind:
            case "die":
                raise AttemptLostError("died", "ActorUnavailableError: the replica is gone")
            case "engine_fault":
                raise AttemptLostError("faulted", "kIOGPUCommandBufferCallbackErrorTimeout")
            case "refuse_weights":
                raise AttemptLostError("mismatch", "other weights")
            case "end_cleanly":
                raise _EndedCleanly
            case "cancelled_inside":
                raise asyncio.CancelledError
            case "stall" | "never_accept":
                await _for_ever()
            case "contradict":
                wrong = 7 if held == 0 or output[-1] != 7 else 8
                if held == 0:
                    raise AttemptLostError("mismatch", "other weights")
                yield _chunk(request, held - 1, (wrong,))
            case "leave_gap":
                yield _chunk(request, held + 1, (7,))
            case "pause":
                await asyncio.sleep(fault.for_s)
            case "duplicate":
                yield _chunk(request, max(0, held - 2), output[-2:])
                yield _chunk(request, max(0, held - 2), output[-2:])
            case "overlap":
                more = () if self._finish(request, output) else (self._token(request, output),)
                yield _chunk(request, max(0, held - 3), (*output[-3:], *more))
            case "late_chunk":
                yield replace(_chunk(request, held, (7,)), attempt=request.attempt - 1)


class _EndedCleanly(Exception):
    """Ends a scripted attempt as a transport does that lost its other side without noticing."""


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def _chunk(
    request: GenerateRequest,
    position: int,
    ids: tuple[int, ...] = (),
    *,
    finish: FinishReason | None = None,
    progress: bool = False,
) -> TokenChunk:
    usage = Usage(
        prompt_tokens=len(request.prompt_ids), completion_tokens=position + len(ids)
    )
    logprobs = tuple(
        logprob_of(request, place, token) for place, token in enumerate(ids, start=position)
    )
    return TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        position=position,
        ids=ids,
        logprobs=logprobs if request.sampling.logprobs is not None else (),
        finish_reason=finish,
        usage=None if finish is None else usage,
        progress=Progress(engine_steps=1, prefill_done_tokens=0, prefill_total_tokens=1)
        if progress
        else None,
    )
