"""Loading a checkpoint's tokenizer, raw prompts, and who may write control tokens."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from headrace_replicas.contract.errors import CheckpointError, InvalidRequestError
from headrace_serve.text.detokenizer import text_of
from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.demo_tokenizer import DEMO, END, copy_without_template, shown, user


@pytest.fixture(scope="module")
def demo() -> TextTokenizer:
    return TextTokenizer.from_folder(DEMO)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model's tokenizer without its template."""
    return copy_without_template(tmp_path)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_no_network(demo: TextTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading opens no connection and asks no name server."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert TextTokenizer.from_folder(folder).encode("hello") == demo.encode("hello")


def test_loading_is_quiet() -> None:
    """A first load in a fresh process prints nothing: no advice to install PyTorch."""
    code = (
        "import sys; from pathlib import Path; "
        "from headrace_serve.text.tokenizer import TextTokenizer; "
        "TextTokenizer.from_folder(Path(sys.argv[1])); "
        "print([m for m in ('torch', 'mlx', 'ray', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(DEMO)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_cut_file_is_named(folder: Path, name: str) -> None:
    """A truncated file is refused by its name."""
    text = (folder / name).read_bytes()
    (folder / name).write_bytes(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=f"^{name} in .* cannot be loaded"):
        TextTokenizer.from_folder(folder)


def test_wrong_content_is_named(folder: Path) -> None:
    """Sound JSON that is no tokenizer is refused by the file's name too."""
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json in "):
        TextTokenizer.from_folder(folder)


def test_missing_tokenizer_is_refused(folder: Path) -> None:
    """Without a vocabulary there is no tokenizer, and never an empty one in silence."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"looked for tokenizer\.json, tokenizer\.model"):
        TextTokenizer.from_folder(folder)


@pytest.mark.parametrize("place", ["jinja", "config", "legacy"])
def test_template_is_found(folder: Path, place: str) -> None:
    """A template is found in its own file, in tokenizer_config.json, and in chat_template.json."""
    assert not TextTokenizer.from_folder(folder).has_chat_template
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    elif place == "legacy":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        text = json.dumps({**config, "chat_template": TEMPLATE})
        (folder / "tokenizer_config.json").write_text(text)
    tokenizer = TextTokenizer.from_folder(folder)
    ids = tokenizer.render_chat([user("hi")])
    assert shown(tokenizer, ids) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_broken_legacy_template(folder: Path) -> None:
    """A chat_template.json without a template is refused by its name."""
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"chat_template\.json holds no chat template"):
        TextTokenizer.from_folder(folder)


def test_template_that_does_not_parse(folder: Path) -> None:
    """A template with a syntax error is the checkpoint's fault and is found at load."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }")
    with pytest.raises(CheckpointError, match=r"does not parse: .*\(line 1\)"):
        TextTokenizer.from_folder(folder)


def test_no_template_says_where_it_looked(folder: Path) -> None:
    """A base model loads and encodes; chat answers with the files that were looked for."""
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer.encode("hello")
    with pytest.raises(InvalidRequestError, match=r"no chat template.*chat_template\.jinja"):
        tokenizer.render_chat([user("hi")])


def test_template_switches(demo: TextTokenizer) -> None:
    """A switch keeps the template's own default unless it is given."""
    default = shown(demo, demo.render_chat([user("hi")]))
    thinking = shown(
        demo, demo.render_chat([user("hi")], template_kwargs={"enable_thinking": True})
    )
    assert default.endswith("<|im_start|>assistant\n")
    assert thinking == default + "<think>\n"


def test_tools_are_rendered(demo: TextTokenizer) -> None:
    """Tools reach the template among its switches."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    ids = demo.render_chat([user("hi")], template_kwargs={"tools": [tool]})
    assert '"name": "get_weather"' in shown(demo, ids)


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "add_generation_prompt", "messages", "eos_token"]
)
def test_library_switches_are_refused(demo: TextTokenizer, name: str) -> None:
    """A client cannot send a template of its own or turn the library's switches."""
    with pytest.raises(InvalidRequestError) as caught:
        demo.render_chat([user("hi")], template_kwargs={name: "{{ 1 }}"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "has no attribute 'nothing'"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ range(999999999) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_errors_are_the_clients(folder: Path, body: str, said: str) -> None:
    """Whatever fails inside a template is an invalid request that carries its words."""
    (folder / "chat_template.jinja").write_text(body)
    tokenizer = TextTokenizer.from_folder(folder)
    with pytest.raises(InvalidRequestError, match=said) as caught:
        tokenizer.render_chat([user("hi")])
    assert (caught.value.param, caught.value.http_status) == ("messages", 400)


def test_deep_nesting_is_refused(demo: TextTokenizer) -> None:
    """A tool nested beyond the interpreter's depth is an invalid request, not a crash."""
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequestError):
        demo.render_chat([user("hi")], template_kwargs={"tools": [deep]})


def test_raw_prompt_reads_special_tokens(demo: TextTokenizer) -> None:
    """Whoever writes a raw prompt may write control tokens."""
    assert END in demo.encode("a<|im_end|>b")


def test_raw_prompt_begins_once(tmp_path: Path) -> None:
    """The beginning of sequence is put before a raw prompt that does not have it already."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", None, [("<|im_start|>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = TextTokenizer.from_folder(tmp_path)
    assert loaded.encode("x") == (1, *loaded.encode("<|im_start|>x")[1:])
    assert loaded.encode("<|im_start|>x").count(1) == 1
    assert len(loaded.encode("a b c d e f g h i j")) > 4


def test_lone_surrogates(demo: TextTokenizer) -> None:
    """Half an emoji becomes U+FFFD, two halves an emoji, and the rest of the text is untouched."""
    assert text_of(demo, demo.encode("a\ud83d b")) == "a\ufffd b"
    assert text_of(demo, demo.encode("a\ud83d\ude00 b\ud83d")) == "a\U0001f600 b\ufffd"
    assert "a\ufffd b" in shown(demo, demo.render_chat([user("a\ud83d b")]))


def test_turn_end(demo: TextTokenizer, folder: Path) -> None:
    """The turn's end is the tokenizer's own and the one that the template writes."""
    assert demo.turn_end_ids == {END}
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}\n<|endoftext|>{% endfor %}"
    )
    assert TextTokenizer.from_folder(folder).turn_end_ids == {END, 0}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}. Next <|endoftext|>")
    assert TextTokenizer.from_folder(folder).turn_end_ids == {END}
