"""Checksums of a checkpoint: one flipped byte anywhere is found, named, and told by the status."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine import file_digests
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.checksums import (
    CHECKSUMS_FILE,
    Checksums,
    Finding,
    Scan,
    compare,
    plans,
    read_checksums,
    scan,
    write_checksums,
)
from headrace_replicas.engine.durable_files import write_whole
from headrace_replicas.engine.file_digests import FilePlan, Span, digest_files
from headrace_replicas.engine.safetensors_header import read_header
from tests.support.checkpoint_breaks import edit_config, edit_header
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint that no test changes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("sound") / "model", bits=4)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may change."""
    yield Path(shutil.copytree(sound, tmp_path / "model"))
    shutil.rmtree(tmp_path / "model", ignore_errors=True)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")


def look(folder: Path, workers: int = 2) -> Scan:
    checkpoint = read_checkpoint(folder)
    work = plans(checkpoint)
    return scan(checkpoint, work, workers=workers, on_bytes=lambda _count: None)


def findings(folder: Path, recorded: Checksums) -> tuple[Finding, ...]:
    return compare(recorded, look(folder))


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        old = file.read(1)[0]
        file.seek(position)
        file.write(bytes([old ^ 0x10]))


def verify(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["verify", str(folder), *options])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_checkpoint_equals_its_own_record(sound: Path, tmp_path: Path) -> None:
    found = look(sound)
    write_checksums(tmp_path / "record.json", found.checksums)
    assert read_checksums(tmp_path / "record.json") == found.checksums
    assert compare(read_checksums(tmp_path / "record.json"), look(sound, workers=1)) == ()


def test_every_byte_of_every_file_counts(folder: Path) -> None:
    """Bytes drawn from every tensor, header and settings file; each flip names where it is."""
    recorded = look(folder).checksums
    draw = np.random.default_rng(5)
    for shard in shards(folder):
        for name, entry in read_header(shard).tensors.items():
            position = int(draw.integers(entry.start, entry.end))
            flip(shard, position)
            [found] = findings(folder, recorded)
            assert (found.file, found.tensor) == (shard.name, name)
            assert "differs" in found.problem
            flip(shard, position)
    assert findings(folder, recorded) == ()


@pytest.mark.parametrize("file", ["generation_config.json", "SCRIPTS.txt"])
def test_a_settings_file_that_changed_is_named(folder: Path, file: str) -> None:
    recorded = look(folder).checksums
    (folder / file).write_text((folder / file).read_text() + " ")
    assert findings(folder, recorded) == (
        Finding(file=file, tensor=None, problem="differs from its checksum"),
    )


def test_a_config_that_changed_is_named(folder: Path) -> None:
    recorded = look(folder).checksums
    edit_config(folder, lambda config: config.update(rope_theta=1e5))
    assert [found.file for found in findings(folder, recorded)] == ["config.json"]


def test_a_header_that_changed_around_the_same_tensors_is_named(folder: Path) -> None:
    recorded = look(folder).checksums
    shard = shards(folder)[0]
    edit_header(shard, lambda header: header.update(__metadata__={"format": "xyz"}))
    [found] = findings(folder, recorded)
    assert (found.file, found.tensor) == (shard.name, None)
    assert "header" in found.problem


def test_missing_and_extra_tensors_are_named(folder: Path) -> None:
    recorded = look(folder).checksums
    (folder / "model.safetensors.index.json").unlink()
    shard = shards(folder)[0]
    [old, *_] = read_header(shard).tensors
    edit_header(shard, lambda header: header.update(other=header.pop(old)))
    found = findings(folder, recorded)
    assert {(one.tensor, one.problem) for one in found if one.tensor} == {
        (old, "is missing"),
        ("other", "is not in the checksums"),
    }
    assert ("model.safetensors.index.json", "is missing") in {(f.file, f.problem) for f in found}


def test_a_new_template_is_named_and_a_new_note_is_not(folder: Path) -> None:
    """What changes neither tokens nor prompts may be added."""
    recorded = look(folder).checksums
    (folder / "notes.txt").write_text("mine")
    assert findings(folder, recorded) == ()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "chat_template.jinja" in {found.file for found in findings(folder, recorded)}


def test_a_file_that_cannot_be_read_to_its_end_is_named_and_the_others_are_read(
    folder: Path,
) -> None:
    """It shrinks after its header was checked; no tensor of it is called missing."""
    recorded = look(folder).checksums
    checkpoint = read_checkpoint(folder)
    work = plans(checkpoint)
    first, second, _third = shards(folder)
    flip(second, second.stat().st_size - 1)
    cut_tensor, entry = max(read_header(first).tensors.items(), key=lambda item: item[1].end)
    os.truncate(first, entry.end - 1)
    found = scan(checkpoint, work, workers=2, on_bytes=lambda _count: None)
    cut, flipped = compare(recorded, found)
    assert (cut.file, cut.tensor) == (first.name, cut_tensor)
    assert f"ends at byte {entry.end - 1}, 1 bytes too early" in cut.problem
    assert (flipped.file, flipped.problem) == (second.name, "differs from its checksum")


def test_memory_is_bounded_by_chunks_whatever_the_tensors_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span longer than a chunk has the digest of its bytes, and progress adds up."""
    monkeypatch.setattr(file_digests, "CHUNK_BYTES", 64)
    content = np.random.default_rng(1).bytes(1000)
    (tmp_path / "file").write_bytes(content)
    spans = (Span(name="a", start=0, end=300), Span(name="b", start=300, end=1000))
    plan = FilePlan(path=tmp_path / "file", spans=spans, whole=True)
    pieces: list[int] = []
    [found] = digest_files([plan], workers=1, on_bytes=pieces.append)
    assert found.spans == {
        "a": sha256(content[:300]).hexdigest(),
        "b": sha256(content[300:]).hexdigest(),
    }
    assert found.whole == sha256(content).hexdigest()
    assert sum(pieces) == 1000
    assert max(pieces) <= 64


def test_a_file_that_is_not_there_is_a_result(tmp_path: Path) -> None:
    plan = FilePlan(path=tmp_path / "no", spans=(Span(name="a", start=0, end=9),), whole=True)
    [found] = digest_files([plan], workers=1, on_bytes=lambda _count: None)
    assert found.problem == "cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda _text: "", "is no record of checksums"),
        (lambda text: text[: len(text) // 2], "is no record of checksums"),
        (lambda text: text.replace('"version": 1', '"version": 2'), r"\(version: "),
        (lambda text: text.replace('"fingerprint"', '"other"'), r"\(fingerprint: Field required"),
    ],
)
def test_a_damaged_record_is_refused(
    sound: Path, tmp_path: Path, damage: Callable[[str], str], says: str
) -> None:
    record = tmp_path / "record.json"
    write_checksums(record, look(sound).checksums)
    record.write_text(damage(record.read_text()))
    with pytest.raises(CheckpointError, match=says):
        read_checksums(record)


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle: the old content stays, and nothing else is left."""
    path = tmp_path / "record.json"
    write_whole(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_anything_to_compare_with_the_status_is_two(folder: Path) -> None:
    result = verify(folder)
    assert result.exit_code == 2
    assert "record them with --create" in result.stderr


def test_what_was_recorded_is_compared_and_the_status_tells(folder: Path) -> None:
    assert verify(folder, "--create").exit_code == 0
    sound = verify(folder)
    assert (sound.exit_code, sound.output.splitlines()[-1]) == (0, "everything is as recorded")
    flip(shards(folder)[1], shards(folder)[1].stat().st_size - 3)
    damaged = verify(folder)
    assert damaged.exit_code == 1
    assert f"{shards(folder)[1].name}: tensor 'model.layers.1." in damaged.output


def test_json_names_file_and_tensor(folder: Path) -> None:
    verify(folder, "--create")
    flip(shards(folder)[0], shards(folder)[0].stat().st_size - 3)
    result = verify(folder, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["findings"][0]["file"] == shards(folder)[0].name
    assert told["findings"][0]["tensor"].startswith("model.layers.0.")
    assert told["tensors"] == sum(len(read_header(shard).tensors) for shard in shards(folder))
    assert told["compared_with"] == [str(folder / CHECKSUMS_FILE)]


def test_a_record_is_replaced_only_by_force(folder: Path) -> None:
    verify(folder, "--create")
    before = (folder / CHECKSUMS_FILE).read_bytes()
    flip(shards(folder)[0], shards(folder)[0].stat().st_size - 3)
    refused = verify(folder, "--create")
    assert refused.exit_code == 2
    assert (folder / CHECKSUMS_FILE).read_bytes() == before
    assert verify(folder, "--create", "--force").exit_code == 0
    assert (folder / CHECKSUMS_FILE).read_bytes() != before
    assert verify(folder).exit_code == 0


def test_a_folder_that_cannot_be_written_is_explained_and_output_helps(
    folder: Path, tmp_path: Path
) -> None:
    """The error says how; a name that leaves no room for a temporary one stands for any cause."""
    elsewhere = tmp_path / "records" / "model.json"
    missing = verify(folder, "--create", "--output", str(elsewhere))
    assert (missing.exit_code, "no such folder" in missing.stderr) == (2, True)
    elsewhere.parent.mkdir()
    assert verify(folder, "--create", "--output", str(elsewhere)).exit_code == 0
    assert not (folder / CHECKSUMS_FILE).exists()
    assert verify(folder, "--output", str(elsewhere)).exit_code == 0
    blocked = verify(folder, "--create", "--output", str(tmp_path / ("x" * 254)))
    assert (blocked.exit_code, "--output PATH" in blocked.stderr) == (2, True)


def test_a_broken_checkpoint_is_refused_by_name(folder: Path) -> None:
    verify(folder, "--create")
    os.truncate(shards(folder)[2], 5000)
    result = verify(folder)
    assert result.exit_code == 1
    assert shards(folder)[2].name in result.stderr


def test_files_of_the_hubs_cache_are_compared_with_what_it_published(
    folder: Path, tmp_path: Path
) -> None:
    """The cache keeps a large file under its SHA-256, so that no record is needed."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    digests = {name: file.sha256 for name, file in look(folder).checksums.files.items()}
    for shard in shards(folder):
        shard.rename(blobs / digests[shard.name])
        shard.symlink_to(blobs / digests[shard.name])
    assert verify(folder).exit_code == 0
    flip(shards(folder)[1], shards(folder)[1].stat().st_size - 1)
    damaged = verify(folder)
    assert damaged.exit_code == 1
    assert f"{shards(folder)[1].name} is not the file that the hub published" in damaged.output
    refused = verify(folder, "--create")
    assert refused.exit_code == 1
    assert "no checksums were recorded" in refused.stderr
    assert not (folder / CHECKSUMS_FILE).exists()
