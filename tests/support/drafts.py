"""Engines that draft: draft models of every quality, and a clock that work moves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.drafts.batch import DraftCounters
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.steps import Engine
from tests.support.engines import load_on_cpu

RUN_S = 1.0
DRAFT_RUN_S = 0.1
# Standard deviation of what a perturbed model's parameters are multiplied by.
NOISE = 0.15
# A token that no answer in these tests holds.
NEVER_SAID = 511


class WorkClock:
    """Time as work makes it pass: the models' runs, and a little for each look at the clock."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds since the clock was made."""
        return self.monotonic_s()

    def monotonic_s(self) -> float:
        """As `now_s`."""
        self._now_s += 1e-9
        return self._now_s

    def work(self, spent_s: float) -> None:
        """Let time pass."""
        self._now_s += spent_s


class Worked:
    """A model whose runs are counted and take time.

    Args:
        model: Any.
        clock: What its runs move.
        run_s: Seconds of a run, whatever its length.
    """

    def __init__(self, model: Any, clock: WorkClock, run_s: float) -> None:
        self._model = model
        self._clock = clock
        self._run_s = run_s
        self.runs = 0

    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        self.runs += 1
        self._clock.work(self._run_s)
        logits: mx.array = self._model(*arguments, **options)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class AlwaysWrong:
    """A draft model that knows one token only, which no answer holds."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        logits: mx.array = self._model(*arguments, **options)
        return mx.where(mx.arange(logits.shape[-1]) == NEVER_SAID, 0.0, -mx.inf) + 0 * logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def itself(loaded: LoadedModel) -> LoadedModel:
    """A draft model that is always right."""
    return loaded


def perturbed(loaded: LoadedModel) -> LoadedModel:
    """A draft model that is sometimes right: its real-valued parameters are off by a part."""

    def disturb(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.random.normal(array.shape, key=mx.random.key(len(path)))
        return (array * (1 + NOISE * noise)).astype(array.dtype)

    parameters: Any = loaded.model.parameters()  # type: ignore[no-untyped-call]  # MLX's own
    loaded.model.update(tree_map_with_path(disturb, parameters))
    mx.eval(parameters)
    return loaded


def always_wrong(loaded: LoadedModel) -> LoadedModel:
    """A draft model that is never right."""
    model: Any = AlwaysWrong(loaded.model)
    return replace(loaded, model=model)


class DraftingEngine:
    """An engine with a draft model, on a clock that the two models' work moves.

    Args:
        checkpoint: Of the model and of its draft model.
        make_draft: Makes the draft model out of another copy; None does without.
        slots: Experts of a layer in memory; None keeps all.
        settings: Changes to the engine's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        make_draft: Callable[[LoadedModel], LoadedModel] | None = itself,
        *,
        slots: int | None = None,
        **settings: Any,
    ) -> None:
        self._checkpoint = checkpoint
        self._make_draft = make_draft
        self._slots = slots
        self._clock = WorkClock()
        self.engine = Engine(
            load=self._load,
            settings=EngineSettings.model_validate({"device": "cpu"} | settings),
            clock=self._clock,
        )
        self.loaded = self.engine.start()

    def _load(self) -> LoadedModel:
        loaded = load(self._checkpoint, device="cpu", dtype="auto", streaming=self._streaming())
        self.target = Worked(loaded.model, self._clock, RUN_S)
        model: Any = self.target
        loaded = replace(loaded, model=model)
        if self._make_draft is None:
            return loaded
        draft = self._make_draft(load_on_cpu(self._checkpoint))
        draft_model: Any = Worked(draft.model, self._clock, DRAFT_RUN_S)
        return replace(loaded, draft=replace(draft, model=draft_model))

    @property
    def counters(self) -> DraftCounters:
        """What drafts have done."""
        return self.engine.drafts

    def _streaming(self) -> Streaming | None:
        if self._slots is None:
            return None
        return Streaming(
            slots=self._slots,
            workers=4,
            clock=SystemClock(),
            on_progress=self.engine.progressed,
        )
