"""Which draft models are taken, what they take, and that a replica uses them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.draft_checkpoint import read_draft
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.steps import Engine
from headrace_serve.text.tokenizer import TextTokenizer
from tests.streaming.architectures import by_module
from tests.streaming.tiny_checkpoints import mode_named, write
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import DraftingEngine
from tests.support.engines import DEMO_FOLDER, ask, load_on_cpu, request_for
from tests.support.replicas import make_replica

pytestmark = pytest.mark.engine


def test_a_replica_loads_its_draft_model_plans_for_it_and_answers_the_same(
    tmp_path: Path, engine: Engine, checkpoint: Checkpoint, tokenizer: TextTokenizer
) -> None:
    replica = make_replica(tmp_path, engine={"draft_model": "demo"})
    leaves: Any = tree_flatten(load_on_cpu(checkpoint).model.parameters())  # type: ignore[no-untyped-call]  # MLX's own
    weights_bytes = sum(array.nbytes for _, array in leaves)
    # Keys and values of 2 heads of 64 in 8 layers, 2048 tokens, float32.
    assert replica.memory_plan.draft_bytes == weights_bytes + 2 * 2 * 64 * 8 * 2048 * 4
    prompt = tokenizer.render_chat([{"role": "user", "content": "Count from 1 to 9."}])
    request = request_for(checkpoint, prompt)

    async def answer() -> tuple[int, ...]:
        return tuple([token async for chunk in replica.generate(request) for token in chunk.ids])

    assert asyncio.run(answer()) == ask(engine, request).wait().ids
    assert asyncio.run(replica.probe()).passed


def test_another_vocabulary_is_refused_with_a_token_that_differs(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    make_checkpoint(tmp_path / "draft")
    with pytest.raises(
        CheckpointError, match=r"another vocabulary .* tokens differ, '.*' for"
    ) as e:
        read_draft(str(tmp_path / "draft"), checkpoint)
    assert e.value.param == "engine.draft_model"
    assert "set engine.draft_model to null" in e.value.message


def test_the_same_vocabulary_is_taken(checkpoint: Checkpoint) -> None:
    assert read_draft(str(DEMO_FOLDER), checkpoint).fingerprint == checkpoint.fingerprint


@pytest.mark.parametrize("breaks", [("no_tokenizer",), ("empty_shard",)])
def test_a_broken_draft_model_is_refused_under_its_own_setting(
    tmp_path: Path, breaks: tuple[str, ...]
) -> None:
    whole = read_checkpoint(make_checkpoint(tmp_path / "whole"))
    make_checkpoint(tmp_path / "broken", breaks=breaks)
    with pytest.raises(CheckpointError, match=r"^engine\.draft_model: ") as refused:
        read_draft(str(tmp_path / "broken"), whole)
    assert refused.value.param == "engine.draft_model"


def test_a_folder_that_is_not_there_is_refused_under_its_own_setting(
    checkpoint: Checkpoint,
) -> None:
    with pytest.raises(CheckpointError, match=r"^engine\.draft_model: no such folder") as refused:
        read_draft("./nowhere", checkpoint)
    assert refused.value.param == "engine.draft_model"


def test_a_draft_model_that_cannot_take_a_guess_back_is_refused(tmp_path: Path) -> None:
    write(tmp_path, by_module("qwen3_next"), mode_named("float32"))
    recurrent = load_on_cpu(read_checkpoint(tmp_path))
    tiny = read_checkpoint(make_checkpoint(tmp_path / "tiny", random_seed=7))

    def instead(_loaded: LoadedModel) -> LoadedModel:
        return recurrent

    with pytest.raises(CheckpointError, match="ArraysCache, from which a wrong guess cannot"):
        DraftingEngine(tiny, instead)
