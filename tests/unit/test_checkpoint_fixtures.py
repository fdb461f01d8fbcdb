"""The test checkpoints: their bytes are fixed, because other tests know what they say."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint_breaks import BREAKS
from tests.support.checkpoints import main, make_checkpoint

Make = Callable[[Path], Path]

DIGESTS: dict[str, tuple[Make, str]] = {
    "scripted": (
        make_checkpoint,
        "c3544e60455e3bce3a8f1192fb5c770f2213cec7d98dec7a285b0bc2e010c6a1",
    ),
    "packed": (
        lambda folder: make_checkpoint(folder, bits=4),
        "5e4e5cfdfb09eb75fd16b39d4ae63b82daa81abace57b5b461949215678ba486",
    ),
    "random": (
        lambda folder: make_checkpoint(folder, random_seed=7, layers=3),
        "72826d5bfdd23ec34475cc71926937d91379afc581a68ef93a1c6323f7e4f900",
    ),
    "thinking": (
        lambda folder: make_checkpoint(folder, template="open_think", context=8192, layers=1),
        "d262c84c4dbe1cb9c561385c813c3daff058a3b73904a62eb6f64f3c6bc9a740",
    ),
    "strict": (
        lambda folder: make_checkpoint(folder, template="strict_alternate"),
        "583cadd8a40886c1c8e6bede4c09d5644f0a41f5bcf25309746de08f3787877e",
    ),
    "broken": (
        lambda folder: make_checkpoint(
            folder, breaks=["misaligned", "bits1", "stale_index", "no_template", "appledouble"]
        ),
        "1d14fda8e80e72570e5088ad317d37f229751854ee3fb27e77c88e18c7a337c7",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a test puts its checkpoint; megabytes do not outlive the test."""
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files."""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        total.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


@pytest.mark.parametrize("name", DIGESTS)
def test_a_checkpoint_has_the_recorded_bytes(folder: Path, name: str) -> None:
    """The same options give the same bytes, whatever was in the folder before."""
    make, expected = DIGESTS[name]
    folder.mkdir()
    (folder / "stale").touch()
    assert digest(make(folder)) == expected


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_every_break_changes_the_files(tmp_path: Path, folder: Path, name: str) -> None:
    """No break is without effect."""
    sound = digest(make_checkpoint(folder, bits=4))
    packed = digest(make_checkpoint(folder))
    assert digest(make_checkpoint(folder, breaks=[name])) not in {sound, packed}
    assert BREAKS[name].description


def test_an_unknown_break_is_refused_before_anything_is_deleted(folder: Path) -> None:
    """The folder stays as it was."""
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(ValueError, match="no such break: nonsense"):
        make_checkpoint(folder, breaks=["nonsense"])
    assert (folder / "precious").exists()


def test_the_command_line_takes_the_same_options(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes what the function writes, and lists the breaks."""
    main([str(folder), "--random", "7", "--layers", "3"])
    assert digest(folder) == DIGESTS["random"][1]
    capsys.readouterr()
    main(["--list"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(BREAKS)
