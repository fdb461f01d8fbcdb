"""How an engine finds out by which schedule it decodes single tokens, and drafts to verify."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.schedule import Decoding, Schedule, decide_decoding
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import WorkClock

pytestmark = pytest.mark.engine

LAYERS_S = 1.0


class Timed:
    """A streaming model whose runs take a time that depends on how they are run."""

    def __init__(self, loaded: LoadedModel, clock: WorkClock, pass_s: dict[int, float]) -> None:
        self._model: Any = loaded.model
        self._streams = _streamed(loaded).streams
        self._clock = clock
        self._pass_s = pass_s

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        speculating = self._streams[0].speculating
        self._clock.work(self._pass_s[tokens.shape[1]] if speculating else LAYERS_S)
        logits: mx.array = self._model(tokens, **options)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _streamed(loaded: LoadedModel) -> StreamedModel:
    assert loaded.streamed is not None
    return loaded.streamed


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """Six of eight experts in memory, of which three tokens use six at most."""
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("tiny"), random_seed=7)
    streaming = Streaming(slots=6, workers=2, clock=SystemClock(), on_progress=lambda: None)
    made = load(read_checkpoint(folder), device="cpu", dtype="auto", streaming=streaming)
    yield made
    _streamed(made).reader.close()


def decide(
    loaded: LoadedModel, setting: Any, pass_s: dict[int, float], most_tokens: int = 3
) -> Decoding:
    clock = WorkClock()
    model = Timed(loaded, clock, pass_s)
    return decide_decoding(model, _streamed(loaded), setting, most_tokens=most_tokens, clock=clock)


@pytest.mark.parametrize("setting", ["layers", "overlap", "speculate"])
def test_a_schedule_that_is_named_holds_for_all_steps(
    loaded: LoadedModel, setting: Schedule
) -> None:
    """Nothing runs to find out."""
    assert decide(loaded, setting, {}) == Decoding(schedule=setting, step_tokens=3)


def test_verify_passes_speculate_where_that_is_faster_for_them_too(loaded: LoadedModel) -> None:
    found = decide(loaded, "auto", {1: 0.01, 3: 0.01})
    assert found == Decoding(schedule="speculate", step_tokens=3)


def test_verify_passes_go_layer_by_layer_where_only_single_tokens_gain(
    loaded: LoadedModel,
) -> None:
    found = decide(loaded, "auto", {1: 0.01, 3: 2.0})
    assert found == Decoding(schedule="speculate", step_tokens=1)


def test_nothing_speculates_where_single_tokens_do_not_gain(loaded: LoadedModel) -> None:
    """Whatever it would give to several: they are the exception."""
    found = decide(loaded, "auto", {1: 2.0, 3: 0.01})
    assert found.schedule in {"layers", "overlap"}
    assert found.step_tokens == 1


def test_without_drafts_only_single_tokens_are_measured(loaded: LoadedModel) -> None:
    found = decide(loaded, "auto", {1: 0.01}, most_tokens=1)
    assert found == Decoding(schedule="speculate", step_tokens=1)
