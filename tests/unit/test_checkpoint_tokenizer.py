"""Tokenizer and chat template files: what works is found, what does not is named."""

import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import sentencepiece

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from tests.support.checkpoint_breaks import Json, edit_config, edit_json
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_shards import tiny_checkpoint

END, START, END_OF_TEXT = 391, 390, 389
TRAINING = (
    "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% endfor %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>think{{ m.thinking }}"
    "<|im_end|>{{ m.content }}%END%{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sound checkpoint that no test changes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("sound") / "model")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tiny(tmp_path: Path, sound: Path) -> Path:
    """A copy without stop tokens in its configs and without a template."""
    folder = tiny_checkpoint(tmp_path / "model", sound, config={"eos_token_id": None})
    (folder / "generation_config.json").unlink()
    settings(folder, {"chat_template": None, "eos_token": None})
    return folder


def settings(folder: Path, values: Mapping[str, object]) -> None:
    """Alter tokenizer_config.json."""
    edit_json(folder / "tokenizer_config.json", lambda existing: existing.update(values))


def with_template(folder: Path, template: object) -> Checkpoint:
    """The checkpoint with this template in tokenizer_config.json."""
    settings(folder, {"chat_template": template})
    return read_checkpoint(folder)


@pytest.mark.parametrize("eos", ["<|endoftext|>", {"content": "<|endoftext|>", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_tokenizers_own_end_token_is_found(tiny: Path, file: str, eos: object) -> None:
    """As text or as object, in the newer or the older file."""
    edit_json(tiny / "tokenizer_config.json", lambda existing: existing.pop("eos_token"))
    content: Json = json.loads((tiny / file).read_text()) if (tiny / file).exists() else {}
    (tiny / file).write_text(json.dumps(content | {"eos_token": eos}))
    assert read_checkpoint(tiny).eos_ids == {END_OF_TEXT}


def test_an_end_token_that_the_tokenizer_does_not_know_is_a_warning(tiny: Path) -> None:
    """It is named; it cannot stop anything."""
    settings(tiny, {"eos_token": "<eot>"})
    assert "'<eot>'" in read_checkpoint(tiny).warnings[0]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}", {END}),
        ("{% for m in messages %}{{ m.content }} <|endoftext|>{% endfor %}", {END_OF_TEXT}),
        ("{% for m in messages %}{{ m.content }}{{ pad_token }}{% endfor %}", {END_OF_TEXT}),
        (TRAINING, {END}),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content }}</think>{% endfor %}", set()),
        (CHANNELS.replace("%END%", "<|im_end|>"), set()),
        (CHANNELS.replace("%END%", "<|endoftext|>"), {END_OF_TEXT}),
        ("{{ raise_exception('only tools') }}", set()),
        ("{{ messages[9].content }}{{ 1 // 0 }}", set()),
        ("{{ messages.__class__.__mro__ }}", set()),
        ("no answer at all", set()),
    ],
)
def test_the_token_after_an_assistants_turn_ends_an_answer(
    tiny: Path, template: str, ends: set[int]
) -> None:
    """A special token, unless it also stands between reasoning and answer; else nothing is told."""
    checkpoint = with_template(tiny, template)
    assert checkpoint.has_chat_template
    assert checkpoint.eos_ids == ends


def test_named_templates_and_template_files_are_found(tiny: Path) -> None:
    """Only a default makes chat possible; files go before the config."""
    tools = {"name": "tool_use", "template": "{{ messages }}"}
    default = {"name": "default", "template": "{{ messages[1].content }}<|im_end|>"}
    assert not with_template(tiny, []).has_chat_template
    assert not with_template(tiny, "").has_chat_template
    assert not with_template(tiny, [tools]).has_chat_template
    assert with_template(tiny, [tools, default]).eos_ids == {END}
    (tiny / "chat_template.jinja").write_text("{{ messages[1].content }}<|endoftext|>")
    assert read_checkpoint(tiny).eos_ids == {END_OF_TEXT}
    settings(tiny, {"chat_template": None})
    assert read_checkpoint(tiny).has_chat_template


@pytest.mark.parametrize("template", [7, {"default": "x"}, ["x"], [{"name": "default"}]])
def test_a_template_of_another_kind_is_refused(tiny: Path, template: object) -> None:
    """The file is named."""
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: `chat_template`"):
        with_template(tiny, template)


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_a_template_file_that_does_not_parse_is_refused(tiny: Path, file: str) -> None:
    """Wherever it stands, its name is in the refusal."""
    (tiny / file).parent.mkdir(exist_ok=True)
    (tiny / file).write_text("\n{% if %}")
    with pytest.raises(CheckpointError, match=r"jinja: the chat template does not parse \(line 2"):
        read_checkpoint(tiny)
    (tiny / file).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        read_checkpoint(tiny)


def test_a_sentencepiece_tokenizer_is_loaded_to_see_that_it_works(tiny: Path) -> None:
    """Without tokenizer.json a tokenizer.model serves, if it can be read."""
    (tiny / "tokenizer.json").unlink()
    llama = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "pad_token": None}
    settings(tiny, llama)
    edit_config(tiny, lambda config: config.update(model_type="mixtral"))
    (tiny / "tokenizer.model").write_bytes(b"\x0a\x05junk")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: transformers cannot load"):
        read_checkpoint(tiny)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f g", "hello scripted model"] * 20),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tiny / "tokenizer.model").write_bytes(model.getvalue())
    assert read_checkpoint(tiny).eos_ids == {2}


@pytest.mark.parametrize("text", ["{}", "[]", '{"model": {"type": "New"}}', "\ufeff{}", "1e999"])
def test_a_tokenizer_of_an_unknown_format_is_refused(tiny: Path, text: str) -> None:
    """The file is named, and that the installed library may be too old."""
    (tiny / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged, or newer than"):
        read_checkpoint(tiny)
