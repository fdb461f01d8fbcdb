"""Streamed experts give the resident model's bits; `make stream-equality` tries everything."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import pytest

from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.loading import load_lazily
from headrace_replicas.engine.safetensors_header import read_header
from tests.streaming.architectures import by_module
from tests.streaming.comparison import loaded, run_resident, run_streamed, spoil_others
from tests.streaming.equality import gaps, row_of
from tests.streaming.model_configs import EXPERTS
from tests.streaming.subject import Subject
from tests.streaming.tiny_checkpoints import Written, mode_named, write
from tests.streaming.trials import (
    QUICK_MODES,
    QUICK_MODULES,
    REFUSED_LAYOUTS,
    STREAMING_LAYOUTS,
    try_architecture,
    try_layout,
    try_packed,
    try_refusal,
    try_scales,
)
from tests.streaming.verdicts import Setting

pytestmark = pytest.mark.engine

MIXTRAL: Final = by_module("mixtral")
DENSE: Final = mode_named("float32")


@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("module", QUICK_MODULES)
def test_a_streamed_model_says_what_the_resident_one_says_bit_for_bit(
    module: str, mode: str
) -> None:
    [verdict] = try_architecture(module, [mode])
    assert verdict.complaints == []
    assert all((one.missed > 0) == (one.setting.slots < EXPERTS) for one in verdict.outcomes)


@pytest.mark.parametrize("title", [layout.title for layout in STREAMING_LAYOUTS])
def test_a_tensor_for_each_expert_streams_as_published(title: str) -> None:
    assert try_layout(title).complaints == []


@pytest.mark.parametrize("title", [layout.title for layout in REFUSED_LAYOUTS])
def test_computed_experts_are_refused_in_words_and_stream_once_packed(title: str) -> None:
    assert try_refusal(title).complaints == []
    assert try_packed(title).complaints == []


def test_scales_of_single_experts_arrive_in_their_slots() -> None:
    assert try_scales().complaints == []


def test_every_architecture_with_the_seam_is_tried() -> None:
    assert gaps() == []


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write(tmp_path, MIXTRAL, DENSE)


@pytest.fixture
def checkpoint(written: Written) -> Checkpoint:
    return read_checkpoint(written.folder)


def test_one_changed_byte_of_an_expert_is_seen(written: Written, checkpoint: Checkpoint) -> None:
    """The comparison itself: the byte is the exponent of one weight of an expert in use."""
    resident = run_resident(MIXTRAL, DENSE, checkpoint)
    [shard] = checkpoint.shards
    entry = read_header(shard).tensors[min(written.expert_tensors)]
    with shard.open("r+b") as file:
        file.seek(entry.start + 3)
        [byte] = file.read(1)
        file.seek(entry.start + 3)
        file.write(bytes([byte ^ 1]))
    with loaded(checkpoint, DENSE, 4) as streamed:
        outcome = run_streamed(MIXTRAL, streamed, Setting(slots=4), resident, written)
    assert "prefill differs" in outcome.faults
    assert outcome.equal < outcome.compared


def test_a_weight_that_is_read_later_is_seen(written: Written, checkpoint: Checkpoint) -> None:
    resident = run_resident(MIXTRAL, DENSE, checkpoint)
    mx.set_default_device(mx.cpu)
    lazy = load_lazily(checkpoint)
    spoil_others(checkpoint, written.expert_tensors)
    assert not mx.array_equal(Subject(MIXTRAL, lazy).prefill(), resident.results["prefill"]).item()


def test_a_row_with_one_complaint_fails() -> None:
    [verdict] = try_architecture("mixtral", ["float32"])
    wrong = replace(verdict, faults=("the prompt chose only 25% of a layer's experts",))
    row = row_of("mixtral", [verdict, wrong])
    assert row.cells[0] == "1/2"
    assert row.complaints == ("mixtral, float32: the prompt chose only 25% of a layer's experts",)
    assert str(row).rstrip().endswith("FAILS")
