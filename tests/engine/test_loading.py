"""Loading on MLX's CPU device: every variant is refused with its reason, or speaks its text."""

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from transformers import AutoTokenizer

from headrace_replicas.contract.errors import (
    BackendMissingError,
    CheckpointError,
    SettingsError,
)
from headrace_replicas.engine.architecture import required_keys
from headrace_replicas.engine.checkpoint import read_checkpoint, resolve
from headrace_replicas.engine.loading import (
    DtypeChoice,
    LoadedModel,
    cast,
    load,
    load_lazily,
    read_weights,
    refuse_spinning_sync,
)
from tests.support.checkpoint_breaks import BREAKS, edit_config, edit_header, edit_json, shard
from tests.support.checkpoint_verdicts import (
    LOADS,
    LOADS_DAMAGED,
    REFUSED_BY_LOADING,
    REFUSED_BY_READING,
)
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.engine

HELLO = "Hello from the scripted model."


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a test puts its checkpoint; megabytes do not outlive the test."""
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)


def load_folder(folder: Path, dtype: DtypeChoice = "auto") -> LoadedModel:
    """Check and load on the CPU device."""
    return load(read_checkpoint(folder), device="cpu", dtype=dtype)


def say(loaded: LoadedModel, prompt: list[int], limit: int = 40) -> str:
    """What the model says, greedily, with plain calls."""
    tokenizer = AutoTokenizer.from_pretrained(loaded.checkpoint.path)
    cache = make_prompt_cache(loaded.model)
    said: list[int] = []
    tokens = prompt
    for _ in range(limit):
        logits = loaded.model(mx.array([tokens]), cache=cache)
        token: Any = mx.argmax(logits[0, -1]).item()
        if token in loaded.checkpoint.eos_ids:
            break
        said.append(token)
        tokens = [token]
    return str(tokenizer.decode(said))


def hello(loaded: LoadedModel) -> str:
    """What the scripted model says to the script `hello`."""
    tokenizer = AutoTokenizer.from_pretrained(loaded.checkpoint.path)
    return say(loaded, [tokenizer.convert_tokens_to_ids("<|s:hello|>")])


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_every_broken_checkpoint_is_refused_or_speaks_rightly(folder: Path, name: str) -> None:
    """Never a wrong word without an error; one flipped byte is left to the canary."""
    make_checkpoint(folder, breaks=[name])
    refused = REFUSED_BY_READING.get(name) or REFUSED_BY_LOADING.get(name)
    if refused:
        with pytest.raises(CheckpointError) as caught:
            load_folder(folder)
        for words in refused:
            assert words in caught.value.message
        return
    text = hello(load_folder(folder))
    assert (text == HELLO) == (name in LOADS)
    assert (text != HELLO) == (name in LOADS_DAMAGED)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_sound_checkpoint_speaks_its_script(folder: Path, bits: int | None, layers: int) -> None:
    """Float or packed, with any number of layers."""
    make_checkpoint(folder, bits=4 if bits else None, layers=layers)
    assert hello(load_folder(folder)) == HELLO


def test_the_demo_model_adds_nine_and_nine() -> None:
    """Its first greedy tokens are the known ones."""
    loaded = load(read_checkpoint(resolve("demo", None)), device="cpu", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(loaded.checkpoint.path)
    conversation = [{"role": "user", "content": "What is 9 + 9?"}]
    prompt = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert say(loaded, prompt) == "9 + 9 = 18"
    assert (loaded.device, loaded.dtype) == ("cpu", "float32")
    assert loaded.identity.compute_dtype == "float32"
    assert loaded.identity.fingerprint == loaded.checkpoint.fingerprint
    for part in ("mlx 0.", "cpu", f"mlx-lm {mlx_lm.__version__}"):
        assert part in loaded.identity.engine


@pytest.mark.parametrize("name", ["other name.safetensors", "model-[4bit].safetensors"])
def test_shards_of_any_name_are_loaded(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm looks for `model*.safetensors` only; it is shown links, which do not stay."""
    make_checkpoint(folder, breaks=["single_file"])
    (folder / "model.safetensors").rename(folder / name)
    (folder / "links").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "links"))
    assert hello(load_folder(folder)) == HELLO
    assert list((folder / "links").iterdir()) == []


def test_a_folder_whose_name_looks_like_a_pattern_is_loaded(tmp_path: Path, folder: Path) -> None:
    """Brackets in a path are no wildcard."""
    make_checkpoint(folder)
    folder.rename(tmp_path / "model [a-z]*")
    assert hello(load_folder(tmp_path / "model [a-z]*")) == HELLO
    shutil.rmtree(tmp_path / "model [a-z]*")


def test_a_shard_that_the_index_leaves_out_is_not_loaded(folder: Path) -> None:
    """Not even when mlx-lm would take it for its name."""
    make_checkpoint(folder)
    shutil.copy(shard(folder, 2), folder / "model-zero.safetensors")
    edit_header(
        folder / "model-zero.safetensors",
        lambda header: header["model.norm.weight"].update(dtype="U32"),
    )
    assert hello(load_folder(folder)) == HELLO


def test_missing_and_unexpected_tensors_are_refused_by_name(folder: Path) -> None:
    """Both are told from the model class before a tensor is read."""
    make_checkpoint(folder, layers=2)
    edit_config(folder, lambda config: config.update(num_hidden_layers=3))
    with pytest.raises(
        CheckpointError, match=r"lacks 12 tensors.*model\.layers\.2\.input_layernorm"
    ):
        load_folder(folder)
    edit_config(folder, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(
        CheckpointError, match=r"holds 12 tensors.*no place for: model\.layers\.1\."
    ):
        load_folder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": "four"},
        {"head_dim": None},
        {"decoder_sparse_step": 0},
        {"model_type": "gemma3"},
        {"model_type": "olmo"},
        {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": 7}},
    ],
)
def test_a_config_that_a_model_class_cannot_take_is_refused(
    folder: Path, change: dict[str, object]
) -> None:
    """Whatever mlx-lm's classes raise, or whether they end the process, it is one error."""
    make_checkpoint(folder)
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError):
        load_folder(folder)


def test_a_shard_cut_while_it_is_read_is_refused(folder: Path) -> None:
    """The headers were sound; the data is not all there any more."""
    checkpoint = read_checkpoint(make_checkpoint(folder))
    model = load_lazily(checkpoint)
    os.truncate(shard(folder, 0), 100_000)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        read_weights(model, checkpoint)


def test_reading_weights_is_told_part_by_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that moves can be told from one that hangs."""
    monkeypatch.setattr("headrace_replicas.engine.weight_reads.PART_BYTES", 1000)
    checkpoint = read_checkpoint(make_checkpoint(folder))
    told: list[tuple[int, int]] = []
    read_weights(
        load_lazily(checkpoint), checkpoint, lambda done, total: told.append((done, total))
    )
    assert len(told) > 3
    done = [one for one, _ in told]
    assert done == sorted(done)
    assert {total for _, total in told} == {done[-1]}


def test_all_weights_are_in_memory_when_load_returns(folder: Path) -> None:
    """The files can go: nothing is read later, on the thread that serves."""
    make_checkpoint(folder)
    loaded: list[LoadedModel] = []
    thread = threading.Thread(target=lambda: loaded.append(load_folder(folder)))
    thread.start()
    thread.join()
    for file in sorted(folder.glob("*.safetensors")):
        os.truncate(file, 0)
    assert hello(loaded[0]) == HELLO


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_compute_type_reaches_scales_and_spares_packed_weights(
    folder: Path, dtype: DtypeChoice
) -> None:
    """What a packed multiplication gives has the type of its scales."""
    make_checkpoint(folder, bits=4)
    loaded = load_folder(folder, dtype)
    experts: Any = loaded.model.model.layers[1].mlp.switch_mlp.down_proj
    kinds = {
        (name, str(array.dtype).removeprefix("mlx.core."))
        for name, array in experts.parameters().items()
    }
    assert kinds == {("weight", "uint32"), ("scales", dtype), ("biases", dtype)}
    assert loaded.model(mx.array([[1]])).dtype == getattr(mx, dtype)
    assert (loaded.dtype, loaded.identity.compute_dtype) == (dtype, dtype)


def test_as_shipped_means_unchanged(folder: Path) -> None:
    """`auto` on a GPU names the type that most parameters have."""
    model = load_lazily(read_checkpoint(make_checkpoint(folder)))
    assert cast(model, "auto") == "float32"
    demo = load_lazily(read_checkpoint(resolve("demo", None)))
    assert cast(demo, "auto") == "bfloat16"


def test_a_weight_that_float16_cannot_hold_is_refused_by_name(folder: Path) -> None:
    """Infinity is not a weight."""
    model = load_lazily(read_checkpoint(make_checkpoint(folder)))
    model.model.norm.weight = mx.full((512,), 1e5)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' does not fit into float16"):
        cast(model, "float16")


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="this MLX has a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    """The error names what to install."""
    checkpoint = read_checkpoint(resolve("demo", None))
    with pytest.raises(BackendMissingError, match=r"engine\.device is `gpu`.*headrace\["):
        load(checkpoint, device="gpu", dtype="auto")


def test_mlx_without_a_backend_is_explained(tmp_path: Path) -> None:
    """Importing an engine module names the extras instead of a shared library."""
    core = tmp_path / "mlx" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('libmlx.so: cannot open shared object')")
    (tmp_path / "mlx" / "__init__.py").touch()
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from headrace_replicas.contract.errors import BackendMissingError
try:
    import headrace_replicas.engine.loading
except BackendMissingError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    for words in ("libmlx.so", "headrace[cpu]", "headrace[cuda13]"):
        assert sys.platform == "darwin" or words in done.stdout


@pytest.mark.parametrize("value", ["1", "2", "on", " 1 "])
def test_the_spinning_sync_is_refused(value: str) -> None:
    """It can leave the GPU spinning until a reboot."""
    with pytest.raises(SettingsError, match="MLX_METAL_FAST_SYNCH"):
        refuse_spinning_sync({"MLX_METAL_FAST_SYNCH": value})
    refuse_spinning_sync({"MLX_METAL_FAST_SYNCH": "0"})
    refuse_spinning_sync({})


def test_load_refuses_the_spinning_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte is read."""
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    with pytest.raises(SettingsError):
        load(read_checkpoint(resolve("demo", None)), device="cpu", dtype="auto")


def test_keys_that_a_model_needs_are_those_of_its_class() -> None:
    """What is told from mlx-lm's source is what its classes say, for every model type."""
    folder = Path(str(mlx_lm.__file__)).parent / "models"
    told = 0
    for file in sorted(folder.glob("*.py")):
        keys = required_keys(file.stem, folder)
        if keys is None or file.stem == "olmo":  # importing olmo can end the process
            continue
        module = importlib.import_module(f"mlx_lm.models.{file.stem}")
        assert keys == {
            field.name
            for field in dataclasses.fields(module.ModelArgs)
            if field.default is field.default_factory is dataclasses.MISSING and field.init
        }
        told += 1
    assert told > 100


def test_an_index_of_another_packing_loads_what_is_there(folder: Path) -> None:
    """A stale index and weights in one file under another name together."""
    make_checkpoint(folder, breaks=["single_file"])
    (folder / "model.safetensors").rename(folder / "w.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text("{}")
    edit_json(folder / "model.safetensors.index.json", lambda existing: existing.update(index))
    loaded = load_folder(folder)
    assert "is stale" in loaded.checkpoint.warnings[0]
    assert hello(loaded) == HELLO
