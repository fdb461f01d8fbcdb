"""Models that load and cannot be served are refused at the start, not at the first request."""

from pathlib import Path

import pytest

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import read_checkpoint
from tests.streaming.architectures import by_module
from tests.streaming.tiny_checkpoints import mode_named, write
from tests.support.engines import ask, request_for, start_engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("module", ["llama4", "deepseek_v41"])
def test_a_cache_that_cannot_be_batched_is_named(tmp_path: Path, module: str) -> None:
    write(tmp_path, by_module(module), mode_named("float32"))
    with pytest.raises(CheckpointError, match=r"keeps its keys and values in \w*Cache"):
        start_engine(read_checkpoint(tmp_path))


@pytest.mark.parametrize("module", ["mixtral", "gpt_oss", "qwen3_next", "jamba"])
def test_plain_rotating_and_recurrent_caches_are_served(tmp_path: Path, module: str) -> None:
    write(tmp_path, by_module(module), mode_named("float32"))
    checkpoint = read_checkpoint(tmp_path)
    engine = start_engine(checkpoint)
    answers = [
        ask(engine, request_for(checkpoint, (1, 2, 3, 4)[:length], request_id=str(length)))
        for length in (2, 4)
    ]
    assert all(answer.wait().last.finish_reason is not None for answer in answers)
    engine.stop()
