"""`headrace bench stream`: what it refuses before anything is loaded."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from tests.support.engines import DEMO_FOLDER
from tests.support.tiny_shards import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("clean_environment")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "stream", *arguments])


def test_the_command_explains_itself() -> None:
    result = bench("--help")
    assert result.exit_code == 0
    for option in ("--slots", "--tokens", "--context", "--schedule", "--prompt-file", "--no-cold"):
        assert option in result.output
    assert "bench" in CliRunner().invoke(app, ["--help"]).output
    assert "stream" in CliRunner().invoke(app, ["bench", "--help"]).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--slots", "25%,half"), "engine.slots = 'half' (command line)"),
        (("--slots", " , "), "--slots names nothing"),
        (("--tokens", "0"), "--tokens"),
        (("--context", "0"), "model.context_tokens"),
        (("--device", "tpu"), "engine.device"),
        (("--schedule", "fast"), "--schedule"),
        (("--prompt", "a", "--prompt-file", "b"), "not both"),
        (("--prompt", "  "), "the prompt is empty"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt cannot be read: No such file"),
        (("--file", "nowhere.yaml"), "nowhere.yaml"),
    ],
    ids=str,
)
def test_a_mistake_ends_with_two_and_a_remedy(arguments: tuple[str, ...], says: str) -> None:
    """Before a byte of the model is read."""
    result = bench("demo", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_prompt_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    result = bench("demo", "--prompt-file", str(tmp_path / "prompt.txt"))
    assert result.exit_code == 2
    assert "prompt.txt is not UTF-8 text (byte 2)" in result.stderr


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("a word " * 200)
    result = bench(
        "demo", "--device", "cpu", "--context", "128",
        "--prompt-file", str(tmp_path / "prompt.txt"),
    )  # fmt: skip
    assert result.exit_code == 2
    assert "more than the context of 128" in result.stderr
    assert "(the model has 2048)" in result.stderr


def test_a_model_that_is_not_there_ends_with_one() -> None:
    result = bench("./nowhere")
    assert result.exit_code == 1
    assert "no such folder" in result.stderr


def test_a_model_without_experts_has_nothing_to_stream(tmp_path: Path) -> None:
    """The message says so, and what to do instead."""
    folder = tiny_checkpoint(tmp_path / "dense", DEMO_FOLDER)
    result = bench(str(folder), "--device", "cpu")
    assert result.exit_code == 1
    assert "there is nothing to stream" in result.stderr
    assert "`headrace plan` shows what it takes" in result.stderr
    assert result.stdout == ""


def test_a_state_folder_that_cannot_be_used_is_refused_first(tmp_path: Path) -> None:
    """Not after minutes of measuring."""
    (tmp_path / "file").write_text("")
    result = bench("./nowhere", "--state-dir", str(tmp_path / "file"))
    assert result.exit_code == 1
    assert "the state folder" in result.stderr
    assert "--state-dir" in result.stderr
