"""Reading a checkpoint: refused with the file or tensor named, or accepted, without MLX."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint, resolve
from headrace_replicas.engine.model_config import UNSTATED_CONTEXT_TOKENS
from tests.support.checkpoint_breaks import INDEX, edit_config, edit_json
from tests.support.checkpoint_verdicts import (
    LOADS,
    LOADS_DAMAGED,
    REFUSED_BY_LOADING,
    REFUSED_BY_READING,
)
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_shards import tiny_checkpoint, write_shard

END, END_OF_TEXT = 391, 389


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sound checkpoint that no test changes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("sound") / "model")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a test puts its checkpoint; megabytes do not outlive the test."""
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)


def refusal(folder: Path) -> str:
    """The message with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    return caught.value.message


@pytest.mark.parametrize("name", sorted(REFUSED_BY_READING))
def test_a_broken_checkpoint_is_refused_by_name(folder: Path, name: str) -> None:
    """The refusal names the file, tensor or setting at fault."""
    message = refusal(make_checkpoint(folder, breaks=[name]))
    for words in REFUSED_BY_READING[name]:
        assert words in message


@pytest.mark.parametrize("name", sorted({*LOADS, *LOADS_DAMAGED, *REFUSED_BY_LOADING}))
def test_an_odd_checkpoint_is_accepted_with_a_warning(folder: Path, name: str) -> None:
    """What does no harm, or cannot be told without MLX, is accepted; what is odd is said."""
    warnings = read_checkpoint(make_checkpoint(folder, breaks=[name])).warnings
    expected = LOADS.get(name, ())
    assert len(warnings) == (1 if expected else 0)
    for words in expected:
        assert words in warnings[0]


def test_a_sound_checkpoint_is_described(sound: Path) -> None:
    """Every field is what the files say."""
    checkpoint = read_checkpoint(sound)
    assert checkpoint == Checkpoint(
        path=sound,
        config=json.loads((sound / "config.json").read_text()),
        model_type="qwen3_moe",
        context_tokens=4096,
        vocab_size=512,
        eos_ids=frozenset({END}),
        has_chat_template=True,
        shards=tuple(sorted(sound.glob("*.safetensors"))),
        tensor_bytes=9_480_704,
        fingerprint=checkpoint.fingerprint,
        warnings=(),
    )


def test_the_demo_model_is_sound() -> None:
    """The packaged checkpoint passes without a warning."""
    checkpoint = read_checkpoint(resolve("demo", None))
    assert (checkpoint.warnings, checkpoint.has_chat_template) == ((), True)
    assert checkpoint.eos_ids == {0, 2}


def test_reading_a_checkpoint_does_not_import_mlx() -> None:
    """A gateway can read a checkpoint without loading MLX or mlx-lm."""
    program = (
        "import sys\n"
        "from headrace_replicas.engine.checkpoint import read_checkpoint, resolve\n"
        "read_checkpoint(resolve('demo', None))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_stop_tokens_are_a_union_over_all_files(folder: Path) -> None:
    """The template's turn end counts although config and generation_config name another token."""
    make_checkpoint(folder, breaks=["eos_mismatch"])
    edit_config(folder, lambda config: config.update(text_config={"eos_token_id": [7, 8]}))
    assert read_checkpoint(folder).eos_ids == {END, END_OF_TEXT, 7, 8}


@pytest.mark.parametrize("value", [-1, True, "2", [2, None], 1.5, [[2]], 2**40])
def test_a_stop_token_that_is_no_token_id_is_refused(
    tmp_path: Path, sound: Path, value: object
) -> None:
    """The refusal names the file and the key."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    edit_json(tiny / "generation_config.json", lambda g: g.update(eos_token_id=value))
    assert "generation_config.json: eos_token_id" in refusal(tiny)


def test_a_checkpoint_without_any_usable_stop_token_says_so(tmp_path: Path, sound: Path) -> None:
    """Ids outside of the vocabulary cannot end an answer."""
    tiny = tiny_checkpoint(tmp_path / "model", sound, config={"vocab_size": 100})
    assert "every answer runs to max_tokens" in read_checkpoint(tiny).warnings[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", True),
        ("hidden_size", "512"),
        ("hidden_size", 2**40),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("num_experts", -1),
        ("num_experts", 1e300),
        ("vocab_size", {}),
        ("vocab_size", 10**30),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", False),
    ],
)
def test_a_size_that_no_model_has_is_refused(
    tmp_path: Path, sound: Path, key: str, value: object
) -> None:
    """At the top level and in text_config, naming the key."""
    top = tiny_checkpoint(tmp_path / "top", sound, config={key: value})
    assert f"config.json: {key} is" in refusal(top)
    nested = tiny_checkpoint(
        tmp_path / "nested",
        sound,
        config={"max_position_embeddings": None, "text_config": {key: value}},
    )
    assert f"config.json: text_config.{key} is" in refusal(nested)


def test_what_config_leaves_out_is_taken_from_other_files(tmp_path: Path, sound: Path) -> None:
    """The vocabulary from the embedding, the context from the tokenizer, or a stated default."""
    embedding = {"model.embed_tokens.weight": ("F32", (24, 2))}
    bare = {"vocab_size": None, "max_position_embeddings": None}
    tiny = tiny_checkpoint(tmp_path / "model", sound, embedding, config=bare)
    assert read_checkpoint(tiny).vocab_size == 24
    assert read_checkpoint(tiny).context_tokens == 4096
    edit_json(tiny / "tokenizer_config.json", lambda t: t.update(model_max_length=10**30))
    checkpoint = read_checkpoint(tiny)
    assert checkpoint.context_tokens == UNSTATED_CONTEXT_TOKENS
    assert any("no file states a context length" in text for text in checkpoint.warnings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_file": "modeling.py"}, "'modeling.py'"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "../utils"}, "not known"),
        ({"model_type": "switch_layers"}, "not known"),
        ({"model_type": "QWEN3_MOE"}, "not known"),
    ],
)
def test_a_model_that_mlx_lm_cannot_build_is_refused(
    tmp_path: Path, sound: Path, change: dict[str, object], words: str
) -> None:
    """Custom code, and a type without a model class."""
    assert words in refusal(tiny_checkpoint(tmp_path / "model", sound, config=change))


def test_a_config_without_a_key_that_the_model_needs_is_refused(
    tmp_path: Path, sound: Path
) -> None:
    """The key is named."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    edit_config(tiny, lambda config: config.pop("moe_intermediate_size"))
    assert "has no moe_intermediate_size, which model type 'qwen3_moe' needs" in refusal(tiny)


@pytest.mark.parametrize("model_type", ["kimi_k2", "mistral", "nemotron-nas", "Klear"])
def test_every_spelling_of_a_type_that_mlx_lm_knows_is_found(
    tmp_path: Path, sound: Path, model_type: str
) -> None:
    """Remapped types and module names that are no identifiers are known; keys may be missing."""
    message = ""
    try:
        read_checkpoint(
            tiny_checkpoint(tmp_path / "model", sound, config={"model_type": model_type})
        )
    except CheckpointError as error:
        message = error.message
    assert "not known" not in message


def test_without_index_any_safetensors_name_is_taken(tmp_path: Path, sound: Path) -> None:
    """`model*` goes first; without such, every file that is no leftover."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / "model.safetensors").rename(tiny / "weights.0.safetensors")
    write_shard(tiny / "weights.1.safetensors", {"b": ("U8", (1,))})
    (tiny / "._weights.0.safetensors").write_bytes(b"leftover")
    (tiny / "weights.2.safetensors.incomplete").write_bytes(b"leftover")
    names = [shard.name for shard in read_checkpoint(tiny).shards]
    assert names == ["weights.0.safetensors", "weights.1.safetensors"]
    write_shard(tiny / "model.safetensors", {"b": ("U8", (1,))})
    assert [shard.name for shard in read_checkpoint(tiny).shards] == ["model.safetensors"]


def test_without_index_a_gap_in_the_numbers_is_an_incomplete_download(
    tmp_path: Path, sound: Path
) -> None:
    """The refusal says how many shards there should be."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / "model.safetensors").rename(tiny / "model-00002-of-00003.safetensors")
    assert "incomplete download? 1 of 3 shards 'model-*-of-00003.safetensors'" in refusal(tiny)


def test_the_index_decides_which_files_count(tmp_path: Path, sound: Path) -> None:
    """A second set of weights beside the named one is left out, with a warning."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    write_shard(tiny / "model-fp8.safetensors", {"model.norm.weight": ("U8", (1,))})
    assert "tensor 'model.norm.weight' is both in" in refusal(tiny)
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (tiny / INDEX).write_text(json.dumps(index))
    checkpoint = read_checkpoint(tiny)
    assert [shard.name for shard in checkpoint.shards] == ["model.safetensors"]
    assert "model-fp8.safetensors" in checkpoint.warnings[0]


@pytest.mark.parametrize(
    "weight_map",
    [None, [], {}, {"a": 1}, {"a": "../x.safetensors"}, {"a": "/etc/passwd"}, {"a": None}],
)
def test_an_index_that_maps_to_no_file_name_is_refused(
    tmp_path: Path, sound: Path, weight_map: object
) -> None:
    """The index cannot lead out of the folder."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert INDEX in refusal(tiny)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800", "..", ""])
def test_an_index_with_an_impossible_file_name_is_an_incomplete_download(
    tmp_path: Path, sound: Path, name: str
) -> None:
    """A name that no file can have is a file that is not there."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / INDEX).write_text(json.dumps({"weight_map": {"absent": name}}))
    assert "incomplete download?" in refusal(tiny)


def test_a_folder_without_weights_says_what_is_expected(tmp_path: Path, sound: Path) -> None:
    """Other formats are named, an empty shard too."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    write_shard(tiny / "model.safetensors", {})
    assert "no tensor in model.safetensors" in refusal(tiny)
    (tiny / "model.safetensors").unlink()
    assert "GGUF" in refusal(tiny)
    (tiny / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "model.safetensors is missing" in refusal(tiny)
    assert "no such folder" in refusal(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused(
    tmp_path: Path, sound: Path, name: str
) -> None:
    """Reading must not block."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / name).unlink()
    os.mkfifo(tiny / name)
    assert f"{name} is not a regular file" in refusal(tiny)
    (tiny / name).unlink()
    (tiny / name).mkdir()
    assert f"{name} is not a regular file" in refusal(tiny)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "7",
        "[" * 50_000,
        '{"a":' * 80 + "1" + "}" * 80,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_no_sane_object_is_refused(
    tmp_path: Path, sound: Path, name: str, text: str
) -> None:
    """Deep nesting, endless numbers and other kinds of values are refused, naming the file."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / name).write_text(text)
    assert name in refusal(tiny)


def test_the_fingerprint_tells_checkpoints_apart(tmp_path: Path, sound: Path) -> None:
    """A copy has the same; another config, template, tokenizer or tensor has not."""
    first, copy = (tiny_checkpoint(tmp_path / name, sound) for name in ("first", "copy"))
    seen = {read_checkpoint(first).fingerprint}
    assert read_checkpoint(copy).fingerprint in seen
    for change in (
        lambda: edit_config(copy, lambda config: config.update(rope_theta=5e5)),
        lambda: (copy / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        lambda: edit_json(copy / "tokenizer.json", lambda t: t["model"]["vocab"].update(zz=500)),
        lambda: write_shard(copy / "model.safetensors", {"model.norm.weight": ("U32", (4,))}),
    ):
        change()
        fingerprint = read_checkpoint(copy).fingerprint
        assert fingerprint not in seen
        seen.add(fingerprint)


JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    INDEX,
    "chat_template.jinja",
    "model.safetensors",
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(), v))


@given(name=st.sampled_from(JSON_FILES), raw=st.binary(max_size=80) | values.map(json.dumps))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_content_of_any_file_gives_a_checkpoint_or_a_refusal(
    tmp_path: Path, sound: Path, name: str, raw: bytes | str
) -> None:
    """No file content makes anything but a CheckpointError."""
    expect_checkpoint_or_refusal(tmp_path, sound, name, raw)


@given(data=st.data(), name=st.sampled_from(JSON_FILES[:3]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_value_of_any_key_gives_a_checkpoint_or_a_refusal(
    tmp_path: Path, sound: Path, data: st.DataObject, name: str
) -> None:
    """No value of a known key makes anything but a CheckpointError."""
    content = json.loads((sound / name).read_text())
    extra = ["quantization", "quantization_config", "text_config", "model_file", "architectures"]
    content[data.draw(st.sampled_from([*content, *extra]))] = data.draw(values)
    expect_checkpoint_or_refusal(tmp_path, sound, name, json.dumps(content))


def expect_checkpoint_or_refusal(tmp_path: Path, sound: Path, name: str, raw: bytes | str) -> None:
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    (tiny / name).write_bytes(raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw)
    try:
        read_checkpoint(tiny)
    except CheckpointError as error:
        assert error.message.isprintable()  # noqa: PT017 - acceptance is as good as this refusal
