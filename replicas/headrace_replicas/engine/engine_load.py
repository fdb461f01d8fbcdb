"""What an engine says of its work: how much there is, how fast it goes, and what went wrong."""

from dataclasses import dataclass
from typing import Final

from headrace_replicas.engine.fault_handling import FaultStanding

# Weight of the newest step in the smoothed token rate: about the last twenty steps count. Tokens
# and seconds are smoothed apart: a step that takes an accepted draft takes no time, and the mean of
# rates would be that step's.
_RATE_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engine is doing, as of its last step.

    Attributes:
        running: Requests in prefill or decode.
        waiting: Requests taken and not yet started.
        serving: Those that run and are no probes.
        outstanding_tokens: Upper bound of tokens to prefill and to generate.
        step_rate: Output tokens a second, smoothed over busy steps.
        engine_steps: Marks of progress since the start: steps, and arrivals of experts inside one.
        last_progress_s: Wall-clock second of the last of them.
        fault: Raw text of what ended the engine, or None.
        faults: Faults that it has survived.
    """

    running: int = 0
    waiting: int = 0
    serving: int = 0
    outstanding_tokens: int = 0
    step_rate: float = 0.0
    engine_steps: int = 0
    last_progress_s: float = 0.0
    fault: str | None = None
    faults: FaultStanding


class StepRate:
    """The smoothed rate of output tokens of an engine's busy steps."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take one step that gave tokens."""
        self._tokens += _RATE_WEIGHT * (tokens - self._tokens)
        self._seconds += _RATE_WEIGHT * (seconds - self._seconds)

    @property
    def per_s(self) -> float:
        """Tokens a second; 0 before any step."""
        return self._tokens / self._seconds if self._seconds else 0.0
