"""Checkpoints that also see, hear or predict further tokens serve their text part alone."""

import gc
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from headrace_deploy.cli import app
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.checksums import Scan, compare, plans, scan
from headrace_replicas.engine.loading import LoadedModel, Streaming, load, load_lazily
from headrace_replicas.engine.model_sizes import measure
from headrace_replicas.engine.safetensors_header import read_header
from headrace_replicas.engine.steps import Engine
from tests.streaming.architectures import by_module
from tests.streaming.tiny_checkpoints import mode_named, write
from tests.support.engines import ask, request_for
from tests.support.towers import EXTRAS, TENSOR_BYTES, Placement, add_extras

pytestmark = pytest.mark.engine

PROMPTS = ((1, 2, 3, 4, 5), (9, 8, 7))
# Headers and config.json grow a little, and an engine before may leave some numbers behind; the
# smallest thing added is larger by far.
SLACK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What serving a checkpoint gave and took.

    Attributes:
        answers: Token ids for each prompt.
        loaded_bytes: What MLX held after loading.
        read_bytes: What the process read of any file meanwhile, from the page cache too.
    """

    answers: list[tuple[int, ...]]
    loaded_bytes: int
    read_bytes: int


def plain(folder: Path, module: str) -> Checkpoint:
    """The same model with nothing but text."""
    write(folder, by_module(module), mode_named("affine g32"))
    return read_checkpoint(folder)


def packed(folder: Path, module: str, placement: Placement) -> Checkpoint:
    """The model as it is published."""
    write(folder, by_module(module), mode_named("affine g32"))
    add_extras(folder, module, placement)
    return read_checkpoint(folder)


def serve(checkpoint: Checkpoint, slots: int | None) -> Service:
    """Load it, with all experts or with some of them in memory, and ask it something."""
    streaming = None
    if slots is not None:
        streaming = Streaming(slots=slots, workers=2, clock=SystemClock(), on_progress=lambda: None)

    def load_it() -> LoadedModel:
        return load(checkpoint, device="cpu", dtype="auto", streaming=streaming)

    settings = EngineSettings(device="cpu", schedule="layers", cache_limit_bytes=0)
    gc.collect()
    held, read = mx.get_active_memory(), bytes_read()
    engine = Engine(load=load_it, settings=settings, clock=SystemClock())
    engine.start()
    loaded_bytes = mx.get_active_memory() - held
    requests = [
        request_for(checkpoint, prompt, request_id=str(prompt), max_tokens=8) for prompt in PROMPTS
    ]
    answers = [ask(engine, request).wait().ids for request in requests]
    engine.stop()
    return Service(answers=answers, loaded_bytes=loaded_bytes, read_bytes=bytes_read() - read)


def bytes_read() -> int:
    """What this process has read of files and pipes; nothing where the system does not count."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        return 0
    found = re.search(r"(?m)^rchar: (\d+)$", counts.read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("placement", ["shards of its own", "the text's shards"])
@pytest.mark.parametrize("module", EXTRAS)
def test_what_the_text_does_not_need_is_neither_read_nor_kept(
    tmp_path: Path, module: str, placement: Placement
) -> None:
    """Same answers, same memory, no byte more read; with all experts in memory and with a few."""
    text, whole = plain(tmp_path / "text", module), packed(tmp_path / "whole", module, placement)
    added_bytes = len(EXTRAS[module]) * TENSOR_BYTES
    assert whole.tensor_bytes - text.tensor_bytes == added_bytes
    load_lazily(text)  # imports the model file, which would count as read
    for slots in (None, 4):
        alone, beside = serve(text, slots), serve(whole, slots)
        assert beside.answers == alone.answers
        assert all(alone.answers)
        assert abs(beside.loaded_bytes - alone.loaded_bytes) < SLACK_BYTES < added_bytes
        if sys.platform == "linux":
            assert text.tensor_bytes // 4 < alone.read_bytes
            assert beside.read_bytes < alone.read_bytes + SLACK_BYTES


@pytest.mark.parametrize("module", EXTRAS)
def test_what_the_text_does_not_need_is_not_counted(tmp_path: Path, module: str) -> None:
    """The plan shows it as never read, and nothing else of the plan changes."""
    text = plain(tmp_path / "text", module)
    whole = packed(tmp_path / "whole", module, "the text's shards")
    without, sizes = (measure(one, dtype="auto", on_gpu=False) for one in (text, whole))
    added_bytes = len(EXTRAS[module]) * TENSOR_BYTES
    assert sizes.unused_bytes == added_bytes
    assert replace(sizes, file_bytes=without.file_bytes, unused_bytes=0) == without
    shown = CliRunner().invoke(app, ["plan", str(whole.path), "--device", "cpu"])
    assert f"never read          {added_bytes / 2**20:.1f} MiB of " in shown.output


def scanned(checkpoint: Checkpoint) -> Scan:
    """Its checksums as they are now."""
    return scan(checkpoint, plans(checkpoint), workers=1, on_bytes=lambda _count: None)


def flip_a_byte(checkpoint: Checkpoint, tensor: str) -> None:
    """Change one byte of a tensor in its shard."""
    for shard in checkpoint.shards:
        entry = read_header(shard).tensors.get(tensor)
        if entry is not None:
            with shard.open("r+b") as file:
                file.seek(entry.start)
                [byte] = file.read(1)
                file.seek(entry.start)
                file.write(bytes([byte ^ 0x10]))
            return
    pytest.fail(f"no tensor {tensor}")


@pytest.mark.parametrize("tensor", EXTRAS["qwen3_5_moe"])
def test_verify_finds_a_flipped_byte_that_serving_never_meets(tmp_path: Path, tensor: str) -> None:
    """Checksums cover the whole checkpoint; text is served all the same, with equal answers."""
    checkpoint = packed(tmp_path / "whole", "qwen3_5_moe", "shards of its own")
    sound = serve(checkpoint, 4).answers
    record = scanned(checkpoint)
    flip_a_byte(checkpoint, tensor)
    again = read_checkpoint(checkpoint.path)
    assert again.fingerprint == checkpoint.fingerprint
    [finding] = compare(record.checksums, scanned(again))
    assert finding.tensor == tensor
    assert serve(again, 4).answers == sound
