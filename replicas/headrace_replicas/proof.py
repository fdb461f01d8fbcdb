"""How an engine proves that it generates, and generates what it should."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Final

from headrace_replicas.attempts import answer_now, attempt
from headrace_replicas.canary import (
    QUESTION,
    Canary,
    canary_path,
    canary_request,
    difference,
    load_or_record,
)
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import CheckpointError, EngineFaultError, ExpertReadError
from headrace_replicas.contract.faults import NEVER_BEGUN
from headrace_replicas.contract.fleet import ProbeKind, ProbeResult
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.prompt_ids import prompt_ids
from headrace_replicas.engine.steps import Engine

# How often a probe looks whether a busy engine has finished a step.
_PROGRESS_POLL_S: Final = 0.02


class Prover:
    """Probes one engine.

    Args:
        engine: A started one.
        loaded: Its model.
        replica_id: Ray Serve's unique id of its replica.
        generation: Of its replica.
        state_dir: Where canaries are kept.
        clock: Time source.

    Raises:
        CheckpointError: The engine answers its canary wrongly; it must not become ready.
        EngineFaultError: It failed over its canary.
        ExpertReadError: An expert cannot be read that the canary needs.
    """

    def __init__(
        self,
        engine: Engine,
        loaded: LoadedModel,
        *,
        replica_id: str,
        generation: int,
        state_dir: Path,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._loaded = loaded
        self._replica_id = replica_id
        self._generation = generation
        self._clock = clock
        self._numbers = count(1)
        self._lock = asyncio.Lock()
        self._trusted_faults = 0
        self._canary = self._verified_canary(state_dir)

    def _verified_canary(self, state_dir: Path) -> Canary:
        """The canary, run once so that a replica never becomes ready on wrong tokens."""
        identity, checkpoint = self._loaded.identity, self._loaded.checkpoint
        canary = load_or_record(
            state_dir,
            identity,
            prompt_ids=lambda: prompt_ids(checkpoint, QUESTION),
            answer=self._answer_now,
        )
        wrong = difference(canary, self._answer_now(canary.prompt_ids))
        if wrong:
            raise CheckpointError(
                f"{checkpoint.path} loads but answers its canary wrongly ({wrong}): its weights "
                "changed since they were verified, or the device computes wrongly. Download the "
                f"checkpoint again; if the change is meant, delete "
                f"{canary_path(state_dir, identity)}"
            )
        return canary

    async def regain_trust(self) -> None:
        """After a fault, return only once a known answer came out right.

        Raises:
            EngineFaultError: It did not.
        """
        while self._trusted_faults != self._engine.status.faults.count:
            result = await self.prove("self", exact=True)
            if not result.passed:
                raise EngineFaultError(
                    f"{NEVER_BEGUN}: after a fault, its canary failed: {result.detail}"
                )

    async def prove(self, kind: ProbeKind, *, exact: bool = False) -> ProbeResult:
        """A verdict: by real progress when busy, else by the canary.

        Two never run at once; the second waits for the first and then runs its own.

        Args:
            kind: What the verdict is called if the canary runs.
            exact: Real work is no proof: the canary runs beside it. After a fault it always does.

        Raises:
            EngineFaultError: The engine failed or has ended.
        """
        async with self._lock:
            began_s = self._clock.monotonic_s()
            faults = self._engine.status.faults.count
            exact = exact or faults != self._trusted_faults
            if not exact and await self._works():
                return self._verdict("work", began_s, self._canary.expected_ids)
            try:
                got = await self._answer()
            except ExpertReadError as error:
                return self._verdict(kind, began_s, (), unreadable=str(error))
            verdict = self._verdict(kind, began_s, got)
            if verdict.passed:
                self._trusted_faults = faults
            return verdict

    async def _works(self) -> bool:
        """Wait for the next progress of a busy engine; False when it has nothing to do any more.

        The end of another probe is no work.

        Raises:
            EngineFaultError: The engine has ended.
        """
        engine_steps = self._engine.status.engine_steps
        if not self._engine.status.serving:
            return False
        while self._engine.status.serving:
            if self._engine.status.engine_steps != engine_steps:
                return True
            if self._engine.status.fault is not None:
                raise EngineFaultError(self._engine.status.fault)
            await asyncio.sleep(_PROGRESS_POLL_S)
        return self._engine.status.engine_steps != engine_steps

    def _verdict(
        self, kind: ProbeKind, began_s: float, got: tuple[int, ...], *, unreadable: str = ""
    ) -> ProbeResult:
        detail = unreadable or difference(self._canary, got)
        return ProbeResult(
            replica_id=self._replica_id,
            generation=self._generation,
            kind=kind,
            passed=not detail,
            latency_s=self._clock.monotonic_s() - began_s,
            expected=self._canary.expected_ids,
            got=got,
            detail=detail,
            at_s=self._clock.now_s(),
            unreadable=bool(unreadable),
        )

    async def _answer(self) -> tuple[int, ...]:
        """Greedy answer of the engine to the canary."""
        request = self._request(self._canary.prompt_ids)
        async with aclosing(attempt(self._engine, request)) as chunks:
            return tuple([token async for chunk in chunks for token in chunk.ids])

    def _answer_now(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """As `_answer`, for the constructor, which runs inside Ray Serve's event loop."""
        return answer_now(self._engine, self._request(prompt))

    def _request(self, prompt: Sequence[int]) -> GenerateRequest:
        return canary_request(
            f"canary-{self._replica_id}-{next(self._numbers)}", prompt, self._loaded.identity
        )
