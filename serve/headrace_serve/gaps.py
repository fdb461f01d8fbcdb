"""What a gateway's process has learned of silence, over all of its streams."""

from headrace_replicas.contract.settings import FailoverSettings
from headrace_serve import stalls


class GapsOfProcess:
    """The gaps between signs of life that this process has measured, over all streams."""

    def __init__(self, settings: FailoverSettings) -> None:
        self._settings = settings
        self._gaps = stalls.PhaseGaps()

    def observe(self, phase: stalls.Phase, gap_s: float) -> None:
        """Learn from one gap."""
        self._gaps = stalls.observe_phase(self._gaps, phase, gap_s)

    def deadline_s(self, phase: stalls.Phase) -> float:
        """Seconds of silence that count as a stall.

        Before the first token what was learned can only lengthen it: the steps of a prefill are
        as long as its prompt makes them, and a longer prompt than any so far is no stall.
        """
        learned_s = stalls.phase_deadline_s(self._gaps, phase, self._settings)
        if phase == "decode":
            return learned_s
        return max(learned_s, stalls.phase_deadline_s(stalls.PhaseGaps(), phase, self._settings))
