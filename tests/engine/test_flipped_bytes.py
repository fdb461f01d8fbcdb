"""One flipped byte of an expert: the canary finds what spoils its answer, `headrace verify` any."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace_deploy.cli import app
from headrace_replicas.canary import canary_request
from headrace_replicas.contract.errors import CheckpointError, EngineFaultError
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.replica import Replica
from tests.support.engines import DEMO_FOLDER, ask
from tests.support.replicas import STREAMING, make_replica
from tests.support.streaming_engines import StreamingEngine

pytestmark = pytest.mark.engine

EXPERTS = 32


# Bits in the upper byte of a bfloat16 scale: one makes it 2**128 times as large, one 256 times.
GROSS, SLIGHT = 0x40, 0x04


@dataclass(frozen=True, slots=True, kw_only=True)
class Byte:
    """The upper byte of an expert's scale."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Two such bytes of one layer.

    Attributes:
        used: In an expert that the canary needs.
        unused: In one that it does not.
    """

    used: Byte
    unused: Byte


@pytest.fixture(scope="module")
def choice(checkpoint: Checkpoint) -> Choice:
    """With room for all experts but one, those that the canary never needed are still missing."""
    running = StreamingEngine(checkpoint, EXPERTS - 1)
    assert running.loaded is not None
    packaged = resources.files("headrace_replicas") / "demo_model" / "canary.json"
    prompt = json.loads(packaged.read_text())["prompt_ids"]
    ask(running.engine, canary_request("canary", prompt, running.loaded.identity)).wait()
    # Not the last layer: what it makes of the prompt's tokens nobody looks at, but for one.
    layer = running.streamed.streams[-2]
    unused = layer.missing(list(range(EXPERTS)))
    used = [expert for expert in range(EXPERTS) if expert not in unused]
    assert unused, "the canary needs every expert of the layer"
    scales = layer._pools[7]  # of the projection back to the hidden state
    jobs = [scales.job(expert, 0) for expert in (used[len(used) // 2], unused[0])]
    found = [Byte(file=running.reader.files[job.file].name, offset=job.offset + 1) for job in jobs]
    running.stop()
    return Choice(used=found[0], unused=found[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    return tmp_path / "model"


def flip(folder: Path, byte: Byte, bit: int) -> None:
    with (folder / byte.file).open("r+b") as shard:
        shard.seek(byte.offset)
        content = shard.read(1)
        shard.seek(byte.offset)
        shard.write(bytes([content[0] ^ bit]))


def start(folder: Path, state_dir: Path) -> Replica:
    """A replica that streams a quarter of the experts."""
    return make_replica(state_dir, engine=STREAMING, model={"path": str(folder)})


def test_the_canary_refuses_a_byte_that_spoils_its_answer(
    folder: Path, tmp_path: Path, choice: Choice
) -> None:
    flip(folder, choice.used, GROSS)
    refusals = "answers its canary wrongly|non-finite logits"
    with pytest.raises((CheckpointError, EngineFaultError), match=refusals):
        start(folder, tmp_path / "state")


@pytest.mark.parametrize(("part", "bit"), [("unused", GROSS), ("used", SLIGHT)])
def test_only_verify_finds_a_byte_that_does_not(
    folder: Path,
    tmp_path: Path,
    choice: Choice,
    part: str,
    bit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lies in an expert that the canary does not need, or changes too little to show."""
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "state"))
    assert CliRunner().invoke(app, ["verify", str(folder), "--create"]).exit_code == 0
    byte: Byte = getattr(choice, part)
    flip(folder, byte, bit)
    assert asyncio.run(start(folder, tmp_path / "state").probe()).passed
    verified = CliRunner().invoke(app, ["verify", str(folder)])
    assert verified.exit_code == 1
    assert byte.file in verified.output
    assert "down_proj.scales" in verified.output
    assert "1 finding: do not serve this copy" in verified.output
