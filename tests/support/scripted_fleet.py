"""A fleet of scripted replicas behind `token_stream.Replicas`: a known model, paces and faults.

The next token is a function of the request and of all output before it, so every replica continues
every other's answer, as engines with the same weights and position-keyed sampling do. What goes
wrong in an attempt, a plan says.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final, Literal

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import InvalidRequestError
from headrace_replicas.contract.fleet import ReplicaState
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    Progress,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from headrace_serve.board import Board
from headrace_serve.routing import pick
from headrace_serve.token_stream import AttemptLostError
from tests.support.fleet import snapshot

Model = Callable[[GenerateRequest, tuple[int, ...]], int | None]
"""The next token after this output; None where the model ends by itself."""

FaultKind = Literal[
    "die",
    "engine_fault",
    "refuse_weights",
    "end_cleanly",
    "cancelled_inside",
    "stall",
    "never_accept",
    "contradict",
    "leave_gap",
    "pause",
    "duplicate",
    "overlap",
    "late_chunk",
    "refuse_request",
]

LOSSES: Final[tuple[FaultKind, ...]] = (
    "die",
    "engine_fault",
    "refuse_weights",
    "end_cleanly",
    "stall",
    "never_accept",
    "contradict",
    "leave_gap",
)
"""Faults that end their attempt, for which its replica is to blame. (`cancelled_inside` ends one
too, and nobody is.)"""

HARMLESS: Final[tuple[FaultKind, ...]] = ("pause", "duplicate", "overlap", "late_chunk")
"""Faults that an attempt survives."""

_ROUTER_PAUSE_S: Final = 0.05
# A fault that is not here and does not wait for ever just ends the stream.
_ERRORS: Final[Mapping[FaultKind, Callable[[], BaseException]]] = {
    "die": lambda: AttemptLostError("died", "ActorUnavailableError"),
    "engine_fault": lambda: AttemptLostError("faulted", "GPU Timeout Error"),
    "refuse_weights": lambda: AttemptLostError("mismatch", "other weights"),
    "cancelled_inside": asyncio.CancelledError,
    "refuse_request": lambda: InvalidRequestError("It cannot run. Change it."),
}


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
        prefill_s: From there to the first token's step.
        sign_s: Between two signs of life during prefill, at most.
        token_s: For each token.
        chunk_tokens: Tokens that travel together.
        finish_apart: Whether the finish comes in a chunk of its own.
        close_s: How long a call needs to end when it is taken back.
        hops: Turns of the event loop that a chunk takes from the wire to the reader.
    """

    accept_s: float = 0.002
    prefill_s: float = 0.3
    sign_s: float = 0.2
    token_s: float = 0.02
    chunk_tokens: int = 1
    finish_apart: bool = True
    close_s: float = 0.0
    hops: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """After a while a chunk arrives, or else an error, or else the end of the stream."""

    after_s: float
    chunk: TokenChunk | None = None
    error: BaseException | None = None


class _Script:
    """One replica's work on one attempt, step by step."""

    def __init__(
        self, request: GenerateRequest, model: Model, pace: Pace, fault: Fault | None
    ) -> None:
        self._request = request
        self._model = model
        self._pace = pace
        self._fault = fault
        self._output = request.output_ids
        self._sent = len(self._output)

    def steps(self) -> Iterator[_Step]:
        """Everything that arrives if nobody takes the call back."""
        never = self._fault is not None and self._fault.kind == "never_accept"
        yield _Step(after_s=math.inf if never else self._pace.accept_s, chunk=self._sign())
        if not self._output:
            yield from self._fault_if_due()
        signs = math.ceil(self._pace.prefill_s / self._pace.sign_s)
        for _ in range(signs):
            yield _Step(after_s=self._pace.prefill_s / signs, chunk=self._sign())
        yield from self._fault_if_due()
        while (finish := self._finish()) is None:
            self._output = (*self._output, self._next_token())
            full = len(self._output) - self._sent >= self._pace.chunk_tokens
            yield _Step(after_s=self._pace.token_s, chunk=self._unsent() if full else self._sign())
            yield from self._fault_if_due()
        if self._pace.finish_apart and self._sent < len(self._output):
            yield _Step(after_s=0, chunk=self._unsent())
        yield _Step(after_s=0, chunk=self._unsent(finish))

    def _fault_if_due(self) -> Iterator[_Step]:
        fault = self._fault
        if fault is None or len(self._output) < fault.at:
            return
        self._fault = None
        if self._sent < len(self._output):
            yield _Step(after_s=0, chunk=self._unsent())
        if fault.kind == "pause":
            yield _Step(after_s=fault.for_s, chunk=self._sign())
        elif fault.kind in ("duplicate", "overlap", "late_chunk", "contradict", "leave_gap"):
            yield from (_Step(after_s=0, chunk=chunk) for chunk in self._odd_chunks(fault.kind))
        else:
            yield self._loss(fault.kind)

    def _loss(self, kind: FaultKind) -> _Step:
        if kind in ("stall", "never_accept"):
            return _Step(after_s=math.inf)
        return _Step(after_s=0, error=_ERRORS[kind]() if kind in _ERRORS else None)

    def _odd_chunks(self, kind: FaultKind) -> tuple[TokenChunk, ...]:
        held = len(self._output)
        last = self._chunk(max(0, held - 2), self._output[-2:])
        match kind:
            case "duplicate":
                return (last, last)
            case "overlap":
                self._output += () if self._finish() else (self._next_token(),)
                self._sent = len(self._output)
                return (self._chunk(max(0, held - 3), self._output[max(0, held - 3) :]),)
            case "late_chunk":
                late = self._chunk(held, (7,))
                return (replace(late, attempt=late.attempt - 1),)
            case "contradict" if held:
                return (self._chunk(held - 1, (self._output[-1] + 1,)),)
            case _:
                return (self._chunk(held + 1, (7,)),)

    def _finish(self) -> FinishReason | None:
        if len(self._output) >= self._request.max_tokens:
            return "length"
        return "stop" if self._model(self._request, self._output) is None else None

    def _next_token(self) -> int:
        token = self._model(self._request, self._output)
        assert token is not None
        return token

    def _sign(self) -> TokenChunk:
        progress = Progress(engine_steps=1, prefill_done_tokens=1, prefill_total_tokens=2)
        return replace(self._chunk(self._sent, ()), progress=progress)

    def _unsent(self, finish: FinishReason | None = None) -> TokenChunk:
        position, self._sent = self._sent, len(self._output)
        return self._chunk(position, self._output[position:], finish)

    def _chunk(
        self, position: int, ids: tuple[int, ...], finish: FinishReason | None = None
    ) -> TokenChunk:
        usage = Usage(
            prompt_tokens=len(self._request.prompt_ids), completion_tokens=position + len(ids)
        )
        return TokenChunk(
            request_id=self._request.request_id,
            attempt=self._request.attempt,
            position=position,
            ids=ids,
            logprobs=_logprobs(self._request, position, ids),
            finish_reason=finish,
            usage=usage if finish else None,
        )


def _logprobs(
    request: GenerateRequest, position: int, ids: tuple[int, ...]
) -> tuple[TokenLogprob, ...]:
    count = request.sampling.logprobs
    if count is None:
        return ()
    return tuple(
        TokenLogprob(
            token_id=token,
            logprob=-token / 1000 - place / 10,
            top=tuple((token + rank, -float(rank)) for rank in range(count)),
        )
        for place, token in enumerate(ids, start=position)
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
        open_calls: Calls of `generate` that have begun and not ended.
        cut_short: Calls that were not left the time to close.
    """

    def __init__(
        self,
        *,
        board: Board,
        clock: Clock,
        model: Model,
        pace: Pace,
        plan: Plan,
        names: Iterable[str],
    ) -> None:
        self._board = board
        self._clock = clock
        self._model = model
        self._pace = pace
        self._plan = plan
        self._names = frozenset(names)
        self._sequence = 0
        self.attempts: list[tuple[str, GenerateRequest]] = []
        self.open_calls = 0
        self.cut_short = 0
        self._announce()

    def appear(self, *names: str) -> None:
        """These replicas are listed from now on, and ready."""
        self._names |= set(names)
        self._announce()

    def vanish(self, *names: str) -> None:
        """These replicas are listed no more."""
        self._names -= set(names)
        self._announce()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Run one attempt; see `Replicas.generate`."""
        async with self._counted():
            self.attempts.append((await self._route(request), request))
            for step in _Script(request, self._model, self._pace, self._plan(request)).steps():
                await _pause(step.after_s)
                for _ in range(self._pace.hops):
                    await asyncio.sleep(0)
                if step.error is not None:
                    raise step.error
                if step.chunk is None:
                    return
                yield step.chunk

    @asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None, None]:
        self.open_calls += 1
        try:
            yield
        finally:
            self.cut_short += 1
            try:
                await asyncio.sleep(self._pace.close_s)
                self.cut_short -= 1
            finally:
                self.open_calls -= 1

    async def _route(self, request: GenerateRequest) -> str:
        while True:
            self._announce()
            names, now_s = sorted(self._names), self._clock.now_s()
            decision = pick(self._board.candidates(names), self._board.ask_for(request, now_s))
            if decision.ranked:
                self._board.claim(request, decision.ranked[0], now_s)
                return decision.ranked[0]
            await asyncio.sleep(_ROUTER_PAUSE_S)

    def _announce(self) -> None:
        """Fresh snapshots, as Ray Serve carries them to every router all the time."""
        self._sequence += 1
        now_s = self._clock.now_s()
        told = {
            "state": ReplicaState.READY,
            "sequence": self._sequence,
            "at_s": now_s,
            "last_progress_s": now_s,
        }
        self._board.members_seen(self._names, [snapshot(name, **told) for name in self._names])


async def _pause(for_s: float) -> None:
    if math.isinf(for_s):
        await asyncio.get_running_loop().create_future()
    elif for_s:
        await asyncio.sleep(for_s)
