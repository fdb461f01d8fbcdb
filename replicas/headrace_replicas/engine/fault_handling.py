"""What an engine does in the moment of a fault, and how it stands after its faults so far.

After a Metal error nothing can be blamed on one request, and every cache that was touched since is
suspect: all requests in flight fail here and go on elsewhere, and the caches are dropped with their
generator. Whether the process may go on at all is `faults.decide`'s answer. When it may not, it
ends here, with no further call to the device: recovery that calls what just failed is what keeps
servers dead for hours.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.contract.flight import FlightRecorder, Phase
from headrace_replicas.faults import TIMEOUTS, FaultAnswer, careful_chunk_tokens, classify

EXIT_STATUS: Final = 70
"""A process ends with this after a terminal fault (EX_SOFTWARE of sysexits.h)."""

# A batch that ran out of memory is halved; so long without another, it may grow again.
_GROWS_AFTER_S: Final = 600.0

Judge = Callable[[FaultReport], FaultAnswer]
"""Remembers a fault for its host and says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStanding:
    """An engine after the faults that it has survived.

    Attributes:
        prefill_chunk_tokens: Prompt tokens of a prefill step from now on.
        admitted: Requests that run at a time at most.
        count: Faults so far.
        report: The newest.
        answer: What was done about it, or has to be.
        doubts: Answers that looked wrong without proof.
    """

    prefill_chunk_tokens: int
    admitted: int
    count: int = 0
    report: FaultReport | None = None
    answer: FaultAnswer | None = None
    doubts: int = 0


class FaultHandler:
    """Takes the faults of one engine, on its thread.

    Args:
        prefill_chunk_tokens: As configured.
        admitted: Requests at a time, as configured.
        judge: Says what to do.
        recorder: Takes the fault down before anything else is done.
        clock: Time source.
        end_process: Ends the process with a status, at once.

    Attributes:
        standing: Replaced as a whole; other threads may read it.
        worked: Whether the device has completed work for this process.
    """

    def __init__(
        self,
        *,
        prefill_chunk_tokens: int,
        admitted: int,
        judge: Judge,
        recorder: FlightRecorder,
        clock: Clock,
        end_process: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._judge = judge
        self._recorder = recorder
        self._clock = clock
        self._end_process = end_process
        self._most_admitted = admitted
        self._shrunk_s = 0.0
        self.worked = False
        self.standing = FaultStanding(prefill_chunk_tokens=prefill_chunk_tokens, admitted=admitted)

    def completed(self) -> None:
        """Note that the device has completed a step."""
        if not self.worked:
            self.worked = True
            self._recorder.worked()
        if self.standing.admitted < self._most_admitted:
            self._grow()

    def take(self, error: BaseException, *, phase: Phase, in_flight: int) -> FaultAnswer:
        """Take a fault down and decide about it; never returns when the process must end.

        Args:
            error: What was raised.
            phase: What the engine was doing.
            in_flight: Requests that ran.
        """
        text = f"{type(error).__name__}: {error}"
        report = FaultReport(
            kind=classify(text),
            raw_text=text,
            phase=phase,
            in_flight=in_flight,
            gpu_work_done_before=self.worked,
            at_s=self._clock.now_s(),
        )
        self._recorder.faulted(report)
        answer = self._judge(report)
        if answer is FaultAnswer.EXIT:
            self._recorder.ended(f"{report.kind}: {text}", EXIT_STATUS)
            self._end_process(EXIT_STATUS)
        self.standing = self._after(report, answer)
        return answer

    def doubt(self) -> None:
        """Count an answer that looks wrong; a canary should decide."""
        self.standing = replace(self.standing, doubts=self.standing.doubts + 1)

    def _after(self, report: FaultReport, answer: FaultAnswer) -> FaultStanding:
        standing = self.standing
        chunk, admitted = standing.prefill_chunk_tokens, standing.admitted
        if report.kind in TIMEOUTS:
            chunk = careful_chunk_tokens(chunk, timeouts=1)
        if report.kind is FaultKind.OUT_OF_MEMORY:
            admitted = max(1, min(admitted, report.in_flight) // 2)
            self._shrunk_s = self._clock.monotonic_s()
        return replace(
            standing,
            prefill_chunk_tokens=chunk,
            admitted=admitted,
            count=standing.count + 1,
            report=report,
            answer=answer,
        )

    def _grow(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._shrunk_s < _GROWS_AFTER_S:
            return
        self._shrunk_s = now_s
        admitted = min(self._most_admitted, 2 * self.standing.admitted)
        self.standing = replace(self.standing, admitted=admitted)


def is_of_device(error: BaseException) -> bool:
    """Whether an error is the device's or the driver's, and not a wrong checkpoint or setting."""
    return classify(str(error)) is not FaultKind.OTHER
