"""The checkpoint that benches generate: whole, and with the routing that was asked for."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.experts.preload import preload
from tests.bench.decoding import Feed, Load, Restart, Routing
from tests.bench.generated_model import Shape, kept_model
from tests.bench.limits_models import TOPICS
from tests.bench.routing import locality, misses

pytestmark = pytest.mark.engine

SHAPE = Shape(
    layers=2,
    hidden=128,
    experts=64,
    top_k=4,
    expert_hidden=64,
    skew=0.0,
    shared=0.3,
    topics=TOPICS,
    packed_rest=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("generated") / "model"
    assert kept_model(made, SHAPE)
    return made


def test_it_is_a_checkpoint_with_experts_in_four_bit(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    assert checkpoint.context_tokens == 8192
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    up = "model.layers.1.mlp.switch_mlp.up_proj."
    codes = np.array(tensors[f"{up}weight"]).view(np.uint8)
    nibbles = np.bincount(np.concatenate([codes & 15, codes >> 4]).ravel(), minlength=16)
    assert nibbles.min() > 0.9 * nibbles.mean()
    packed, scales, biases = (tensors[up + name] for name in ("weight", "scales", "biases"))
    weights = np.array(
        mx.dequantize(packed, scales, biases, group_size=64, bits=4, dtype=mx.float32)
    )
    assert 0.9 < np.abs(weights).max() * SHAPE.hidden**0.5 <= 1.01
    assert "model.layers.1.mlp.gate.scales" not in tensors


def test_it_is_written_anew_only_for_another_shape(folder: Path, tmp_path: Path) -> None:
    assert not kept_model(folder, SHAPE)
    other = tmp_path / "other"
    assert kept_model(other, SHAPE)
    assert kept_model(other, replace(SHAPE, layers=1))
    assert not kept_model(other, replace(SHAPE, layers=1))


def test_texts_with_topics_keep_experts_and_texts_without_do_not(folder: Path) -> None:
    subject = Load(folder=folder, records=True)()
    kept: list[float] = []
    drawn = np.random.default_rng(0).integers(1, SHAPE.vocabulary, 200).tolist()
    for text in (TOPICS.text(SHAPE.vocabulary, 200, seed=1), drawn):
        Restart().run(subject)
        Feed(tokens=text).run(subject)
        trace = Routing().run(subject)
        assert trace.shape == (200, SHAPE.layers, SHAPE.top_k)
        kept.append(locality(trace, SHAPE.experts).kept)
    assert kept[0] > 1.5 * kept[1]


def test_the_engine_misses_what_the_replay_of_its_trace_says(folder: Path) -> None:
    text = TOPICS.text(SHAPE.vocabulary, 60, seed=2)
    resident = Load(folder=folder, records=True)()
    wanted = Feed(tokens=text).run(resident)
    trace = Routing().run(resident)
    streamed = Load(folder=folder, slots=16)()
    assert streamed.streamed is not None
    preload(streamed.streamed, [range(stream.capacity) for stream in streamed.streamed.streams])
    settled = Feed(tokens=text[:20]).run(streamed)
    found = Feed(tokens=text[20:]).run(streamed)
    assert settled.logits + found.logits == wanted.logits
    replayed = misses(trace, slots=16, settling=20)
    assert found.work.misses == replayed.engine
    assert found.work.hits + found.work.misses == replayed.needed
