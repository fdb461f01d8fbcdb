"""What a run of a model is compared by, and what came of it."""

from dataclasses import dataclass

import mlx.core as mx

from headrace_replicas.engine.experts.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model is streamed.

    Attributes:
        slots: Experts of a layer that fit into memory.
        schedule: How missing experts are fetched.
    """

    slots: int
    schedule: Schedule = "layers"

    def __str__(self) -> str:
        return f"{self.slots} slots" + (f", {self.schedule}" if self.schedule != "layers" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What the model says and chooses with everything in memory.

    Attributes:
        results: Logits and log probabilities, by what they are.
        prefill_needs: Distinct experts of the prompt, summed over layers.
        needs: The same with the decode steps, summed over calls too.
        hit_share: Share of the experts that the prompt chose, in the layer where it is smallest.
        ranges_per_expert: Tensors that one expert consists of.
        layers: How many have experts.
    """

    results: dict[str, mx.array]
    prefill_needs: int
    needs: int
    hit_share: float
    ranges_per_expert: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A streamed run beside the resident one.

    Attributes:
        setting: How it was streamed.
        equal: Results that were equal, bit for bit.
        compared: How many there were.
        missed: Experts brought for prompt and decode steps.
        faults: What does not hold; empty when all does.
    """

    setting: Setting
    equal: int
    compared: int
    missed: int
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One checkpoint, resident and in all settings.

    Attributes:
        what: Architecture or layout.
        mode: How it was saved.
        hit_share: As in `Resident`.
        outcomes: One for each setting.
        faults: Of the test itself; empty when it proves something.
    """

    what: str
    mode: str
    hit_share: float
    outcomes: tuple[Outcome, ...]
    faults: tuple[str, ...]

    @property
    def complaints(self) -> list[str]:
        """Everything that does not hold."""
        found = [f"{one.setting}: {fault}" for one in self.outcomes for fault in one.faults]
        return [f"{self.what}, {self.mode}: {text}" for text in (*self.faults, *found)]
