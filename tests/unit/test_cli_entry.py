"""The program's first and last moments: an interruption is quiet whenever it comes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ENTRY = "headrace_deploy.entry"
QUIET_S = 60


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Programs that a test starts hear signals, even if the tests run where those are ignored."""
    signals = (signal.SIGINT, signal.SIGHUP)
    before = {one: signal.signal(one, signal.default_int_handler) for one in signals}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**kept, "HOME": str(tmp_path)}


def interrupt_at(
    module: str, environ: dict[str, str], which: signal.Signals, *arguments: str
) -> tuple[int, str]:
    """Interrupt the program when it has just imported a module.

    Returns:
        The exit status, and what the program itself wrote from then on.
    """
    command = [sys.executable, "-X", "importtime", "-m", ENTRY, *arguments]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("import time:") and line.split("|")[-1].strip() == module:
                program.send_signal(which)
                break
        rest = [line for line in program.stdout if not line.startswith("import time:")]
        return program.wait(QUIET_S), "".join(rest)


@pytest.mark.parametrize(
    "module", ["typer", "pydantic_core", "yaml", "httpx", "headrace_deploy.local"]
)
def test_interrupted_imports_end_quietly(module: str, environ: dict[str, str]) -> None:
    """Ctrl-C while the command line is still being imported ends with 130 and not a word."""
    assert interrupt_at(module, environ, signal.SIGINT, "config", "show") == (130, "")


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGHUP])
def test_other_interruptions_end_quietly_too(
    which: signal.Signals, environ: dict[str, str]
) -> None:
    """What asks politely to end is treated as Ctrl-C is."""
    assert interrupt_at("pydantic_core", environ, which, "config", "show") == (130, "")


@pytest.mark.parametrize("module", ["huggingface_hub", "transformers", "tokenizers"])
def test_a_command_that_is_interrupted_says_so_without_a_traceback(
    module: str, environ: dict[str, str]
) -> None:
    """Commands import more when they run, and an interruption there is told in one word."""
    status, rest = interrupt_at(module, environ, signal.SIGINT, "verify", "demo")
    assert (status, rest.strip()) == (130, "interrupted")


def test_what_the_parent_ignores_stays_ignored(environ: dict[str, str]) -> None:
    """A program under nohup outlives its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    status, rest = interrupt_at("pydantic_core", environ, signal.SIGHUP, "--version")
    assert status == 0
    assert rest.startswith("headrace ")


@pytest.mark.parametrize("module", [ENTRY, "headrace_deploy"])
def test_the_program_runs_as_a_module(module: str, environ: dict[str, str]) -> None:
    """`python -m` is the same program."""
    done = subprocess.run(
        [sys.executable, "-m", module, "config", "show", "--set", "gateway.prot=1"],
        env=environ, capture_output=True, text=True, check=False, timeout=QUIET_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "did you mean gateway.port?" in done.stderr


def test_the_beginning_imports_nothing_slow(environ: dict[str, str]) -> None:
    """Until signals are provided for, only the standard library is loaded."""
    code = (
        f"import sys, {ENTRY}\n"
        "own = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(*sorted(name for name in own if not name.startswith('_')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**environ, "PYTHONPATH": str(Path("k8s-free-deploy").absolute())},
        capture_output=True, text=True, check=True, timeout=QUIET_S,
    )  # fmt: skip
    assert done.stdout.split() == ["headrace_deploy"]
