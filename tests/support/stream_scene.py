"""One token stream on a scripted fleet: what its reader saw, and what was told and left behind."""

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import pytest

from headrace_replicas.contract.fleet import AttemptFailed, Notice, RequestMoved
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from headrace_replicas.contract.settings import FailoverSettings, FleetSettings
from headrace_serve.board import Board
from headrace_serve.gaps import GapsOfProcess
from headrace_serve.poison_guard import PoisonGuard
from headrace_serve.token_stream import StreamParts, TokenStream
from tests.support.scripted_fleet import (
    Model,
    Pace,
    Plan,
    ScriptedFleet,
    by_attempt,
    hashing_model,
)
from tests.support.virtual_time import EPOCH_S, VirtualClock, run

MAX_TOKENS: Final = 6
SETTINGS: Final = FailoverSettings()
SOUND: Final = by_attempt()
QUICK: Final = Pace()
# "length" comes with the limit, "stop" when the model ends before it.
ENDS: Final[dict[FinishReason, Model]] = {
    "length": hashing_model(1000),
    "stop": hashing_model(MAX_TOKENS),
}


def request(end: FinishReason = "length", **changes: object) -> GenerateRequest:
    """A request whose answer has `MAX_TOKENS` tokens, whichever way it ends."""
    base = GenerateRequest(
        request_id="q",
        attempt=0,
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(logprobs=2),
        seed=11,
        max_tokens=MAX_TOKENS if end == "length" else MAX_TOKENS + 3,
        stop_ids=frozenset(),
        model="m",
        fingerprint="f",
        deadline_s=EPOCH_S + 3600,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # names are the test's own


@dataclass
class Answer:
    """What a reader has seen."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    # When each piece came, and how many tokens were there then; the finish counts as one.
    arrivals: list[tuple[float, int]] = field(default_factory=list, compare=False)


class Scene:
    """A board, a scripted fleet on it, and what was told to the controller.

    Unless it is guarded, requests that lose engines move on without suspicion.
    """

    def __init__(
        self,
        plan: Plan = SOUND,
        *,
        model: Model = ENDS["length"],
        pace: Pace = QUICK,
        names: str = "abc",
        limits: FailoverSettings = SETTINGS,
        guarded: bool = False,
    ) -> None:
        self.board = Board()
        self.clock = VirtualClock()
        self.notices: list[Notice] = []
        self.gaps = GapsOfProcess(limits)
        self.fleet = ScriptedFleet(
            board=self.board, clock=self.clock, model=model, pace=pace, plan=plan, names=names
        )
        self.guard = PoisonGuard(
            settings=FleetSettings(),
            board=self.board,
            tell=self.notices.append,
            clock=self.clock,
        )
        self.parts = StreamParts(
            replicas=self.fleet,
            board=self.board,
            gaps=self.gaps,
            tell=self.notices.append,
            settings=limits,
            clock=self.clock,
            guard=self.guard if guarded else None,
        )
        self.seen = Answer()

    async def answer(self, base: GenerateRequest | None = None) -> Answer:
        """Read one stream to its end."""
        self.stream = TokenStream(self.parts, base or request())
        self.seen = seen = Answer()
        async with aclosing(self.stream.run()) as arriving:
            async for accepted in arriving:
                assert seen.finish is None, "something follows the finish"
                seen.ids += accepted.ids
                seen.logprobs += accepted.logprobs
                seen.finish, seen.usage = accepted.finish_reason, accepted.usage
                parts = len(seen.ids) + (seen.finish is not None)
                seen.arrivals.append((self.clock.monotonic_s(), parts))
        return seen

    @property
    def failed(self) -> list[AttemptFailed]:
        return [notice for notice in self.notices if isinstance(notice, AttemptFailed)]

    @property
    def moved(self) -> list[RequestMoved]:
        return [notice for notice in self.notices if isinstance(notice, RequestMoved)]

    @property
    def holders(self) -> str:
        """The replicas that got an attempt, one letter each."""
        return "".join(replica for replica, _ in self.fleet.attempts)

    def suspects(self) -> str:
        """The replicas that this process suspects."""
        return "".join(one.replica_id for one in self.board.candidates("abcd") if one.suspected)

    def check_nothing_left(self) -> None:
        """No claim, no open call, no memory of the request; late claims change nothing."""
        for replica, attempt in self.fleet.attempts:
            self.board.claim(attempt, replica, self.clock.now_s())
            assert self.board.failed_on(attempt.request_id) == frozenset()
        assert self.board.in_flight() == {}
        assert self.fleet.open_calls == 0


def read(scene: Scene, base: GenerateRequest | None = None) -> Answer:
    """Run a scene to its end, and check that nothing of it is left."""
    answer = run(scene.answer(base))
    scene.check_nothing_left()
    check_notices(scene)
    return answer


def check_notices(scene: Scene) -> None:
    """One notice for each lost attempt and one for each move, with the right names and counts."""
    attempts = scene.fleet.attempts
    assert [(notice.replica_id, notice.attempt) for notice in scene.failed] == [
        (replica, attempt.attempt) for replica, attempt in attempts[: len(scene.failed)]
    ]
    for notice in scene.moved:
        replica, attempt = attempts[notice.attempt - 1]
        assert notice.to_replica == replica
        assert notice.replayed_tokens == len(attempt.output_ids)
        until = sum(1 for _, held in scene.seen.arrivals if held <= notice.replayed_tokens)
        before_s = scene.seen.arrivals[until - 1][0] if until else 0.0
        after_s = scene.seen.arrivals[until][0]
        assert notice.gap_s == pytest.approx(after_s - before_s)


@cache
def undisturbed(end: FinishReason) -> Answer:
    """The answer that every disturbed stream must give as well."""
    return read(Scene(model=ENDS[end]), request(end))
