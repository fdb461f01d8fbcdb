"""Packs: what streams from one equals the resident model, whatever was killed, cut or replaced."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import CheckpointError, SettingsError
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.durable_files import locked
from headrace_replicas.engine.experts.pack import take
from headrace_replicas.engine.experts.pack_index import (
    INDEX_FILE,
    PAGE_BYTES,
    PARTIAL_FILE,
    PackIndex,
    damages,
    read_index,
    state_folder,
)
from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.loading import (
    LoadedModel,
    Streaming,
    _named_arrays,
    load,
    load_lazily,
)
from headrace_replicas.engine.packing import PackReport, pack_checkpoint
from tests.support import fused_checkpoints
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import DEMO_FOLDER

pytestmark = pytest.mark.engine

SLOTS = 4
IDS = mx.array([[5, 17, 3, 60, 41, 8, 77, 2, 33, 9, 12, 70]])
LAYERS = 8  # of the demo model

Make = Callable[[Path], Path]


@contextmanager
def no_bar(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _count: None


def pack(folder: Path, output: Path | None = None, **options: object) -> PackReport:
    arguments = {"workers": 2, "bar": no_bar} | options
    return pack_checkpoint(read_checkpoint(folder), output or folder, **arguments)  # type: ignore[arg-type]


def streamed(folder: Path, *elsewhere: Path, slots: int = SLOTS) -> LoadedModel:
    streaming = Streaming(
        slots=slots,
        workers=4,
        clock=SystemClock(),
        on_progress=lambda: None,
        pack_folders=elsewhere,
    )
    return load(read_checkpoint(folder), device="cpu", dtype="auto", streaming=streaming)


def logits(loaded: LoadedModel) -> mx.array:
    found: mx.array = loaded.model(IDS)
    mx.eval(found)
    return found


def resident_logits(folder: Path) -> mx.array:
    return logits(load(read_checkpoint(folder), device="cpu", dtype="auto"))


def files_read(loaded: LoadedModel) -> set[str]:
    """Names of the files that experts come from."""
    assert loaded.streamed is not None
    return {file.name for file in loaded.streamed.reader.files}


def is_packed(loaded: LoadedModel) -> bool:
    return all(name.startswith("headrace.experts-") for name in files_read(loaded))


def flip(path: Path, position: int) -> None:
    """Change one bit, in a new file of the same name: who has the old one open does not see it."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.with_suffix(".flipped").write_bytes(content)
    path.with_suffix(".flipped").replace(path)


def damaged(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Layers and experts that are not as they were written."""
    found = damages(
        folder, read_index(folder / INDEX_FILE).layers, workers=2, on_bytes=lambda _count: None
    )
    return [(damage.layer.layout.path, damage.experts) for damage in found]


def pack_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("headrace.experts-*.bin"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model with a pack in several files; no test changes it."""
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path_factory.mktemp("packed") / "model"))
    pack(folder, file_limit_bytes=7_000_000)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Path]:
    """The demo model in a folder of its own."""
    yield Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    shutil.rmtree(tmp_path / "model")


@pytest.fixture
def packed_copy(packed: Path, tmp_path: Path) -> Iterator[Path]:
    """A packed demo model that a test may change."""
    yield Path(shutil.copytree(packed, tmp_path / "packed"))
    shutil.rmtree(tmp_path / "packed")


def scripted_in_four_bits(folder: Path) -> Path:
    return make_checkpoint(folder, bits=4, random_seed=3)


def dense(folder: Path) -> Path:
    return make_checkpoint(folder, random_seed=3)


def test_the_demo_model_streams_from_its_pack_as_it_computes_resident(packed: Path) -> None:
    """And each expert comes with one read, not nine."""
    loaded = streamed(packed)
    assert is_packed(loaded)
    assert len(pack_files(packed)) == 4
    assert mx.array_equal(logits(loaded), resident_logits(packed)).item()
    assert loaded.streamed is not None
    totals = loaded.streamed.reader.totals
    assert totals.jobs == 9 * totals.runs


@pytest.mark.parametrize("make", [scripted_in_four_bits, dense])
def test_other_checkpoints_stream_from_their_packs_as_they_compute_resident(
    tmp_path: Path, make: Make
) -> None:
    folder = make(tmp_path / "model")
    pack(folder)
    loaded = streamed(folder)
    assert is_packed(loaded)
    assert mx.array_equal(logits(loaded), resident_logits(folder)).item()
    shutil.rmtree(folder)


@pytest.mark.parametrize("make", [fused_checkpoints.transposed, fused_checkpoints.interleaved])
def test_a_layout_that_cannot_be_streamed_as_it_is_streams_from_a_pack(
    tmp_path: Path, make: Make
) -> None:
    """The makers' own: gate and up in one tensor, transposed or in turns, mxfp4 as bytes."""
    folder = make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"rearranged by mlx-lm.*headrace pack"):
        streamed(folder)
    report = pack(folder)
    assert report.layers == fused_checkpoints.LAYERS
    assert report.records == fused_checkpoints.LAYERS * fused_checkpoints.EXPERTS
    loaded = streamed(folder)
    assert is_packed(loaded)
    assert mx.array_equal(logits(loaded), resident_logits(folder)).item()


def test_a_record_holds_the_bytes_of_its_expert_in_the_files_own_types(packed: Path) -> None:
    """Scales stay bfloat16 although a CPU computes in float32; records begin at pages."""
    index = read_index(packed / INDEX_FILE)
    tensors: dict[str, mx.array] = {}
    for shard in packed.glob("*.safetensors"):
        loaded = mx.load(str(shard))
        assert isinstance(loaded, dict)
        tensors |= loaded
    for layer in (index.layers[0], index.layers[-1]):
        content = (packed / layer.file).read_bytes()
        assert layer.offset % PAGE_BYTES == layer.layout.stride % PAGE_BYTES == 0
        for part in layer.layout.tensors:
            whole = tensors[f"{layer.layout.path}.{part.projection}.{part.name}"]
            at = layer.offset + 5 * layer.layout.stride + part.offset
            wanted = np.array(whole[5].view(mx.uint8)).tobytes()
            assert content[at : at + part.size_bytes] == wanted
    assert {part.dtype for part in index.layers[0].layout.tensors} == {"U32", "BF16"}
    assert damaged(packed) == []


def test_packing_holds_about_one_layer_in_memory(demo: Path) -> None:
    report = pack(demo)
    for file in pack_files(demo):
        file.unlink()
    (demo / INDEX_FILE).unlink()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pack(demo)
    layer_bytes = report.size_bytes / report.layers
    assert mx.get_peak_memory() - before < 2.5 * layer_bytes
    assert mx.get_active_memory() - before < 0.5 * layer_bytes


def test_a_layer_that_was_taken_is_gone_from_its_model(packed: Path) -> None:
    """Whoever still holds the model does not hold the bytes."""
    model = load_lazily(read_checkpoint(packed))
    layer = expert_layers(model)[0]
    buffers = take(layer)
    assert [len(buffer) for buffer in buffers] == [one.array.nbytes for one in layer.tensors]
    left = [name for name, _array in _named_arrays(model)]
    assert not [name for name in left if name.startswith(layer.path)]
    assert [name for name in left if name.startswith("model.layers.1.mlp.switch_mlp")]


def test_packing_again_finds_everything_there(packed_copy: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in packed_copy.iterdir()}
    report = pack(packed_copy)
    assert report.kept == report.layers == LAYERS
    assert {file: file.stat().st_mtime_ns for file in packed_copy.iterdir()} == before


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.packing import pack_checkpoint

left = int(sys.argv[2])

@contextmanager
def bar(title, total):
    def advance(count):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    yield advance

folder = Path(sys.argv[1])
pack_checkpoint(read_checkpoint(folder), folder, workers=1, bar=bar)
"""


@pytest.mark.parametrize(("records", "whole_layers"), [(1, 0), (32 * 3 + 9, 3)])
def test_a_killed_run_goes_on_where_it_was(
    demo: Path, packed: Path, records: int, whole_layers: int
) -> None:
    """A real SIGKILL between two records; no engine takes what is unfinished."""
    command = [sys.executable, "-c", KILLED, str(demo), str(records)]
    killed = subprocess.run(command, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert not (demo / INDEX_FILE).exists()
    assert not is_packed(streamed(demo))
    assert len(read_index(demo / PARTIAL_FILE).layers) == whole_layers
    report = pack(demo)
    assert report.kept == whole_layers
    assert not (demo / PARTIAL_FILE).exists()
    assert damaged(demo) == []
    assert written(demo) == written(packed)


def written(folder: Path) -> list[tuple[object, object]]:
    """What an index says, without where the layers lie."""
    return [(layer.layout, layer.digests) for layer in read_index(folder / INDEX_FILE).layers]


class _Cut(Exception):  # noqa: N818 - it is no error
    """Stands for a kill; what is under way stops there."""


def cut_after(records: int) -> Callable[[str, int], AbstractContextManager[Callable[[int], None]]]:
    """A bar that stops the run when so many records have been written."""
    left = [records]

    @contextmanager
    def bar(title: str, _total: int) -> Iterator[Callable[[int], None]]:
        def advance(_count: int) -> None:
            left[0] -= title == "packing"
            if left[0] == 0:
                raise _Cut

        yield advance

    return bar


@pytest.mark.parametrize("cuts", [(31,), (32, 40), (33, 33, 33), (255,), (256, 1)])
def test_a_run_that_stops_at_any_record_goes_on_where_it_was(
    demo: Path, packed: Path, cuts: tuple[int, ...]
) -> None:
    """Several times, around the ends of layers and before the very last write."""
    finished = 0
    for records in cuts:
        with pytest.raises(_Cut):
            pack(demo, bar=cut_after(records))
        finished += (records - 1) // 32
        assert len(read_index(demo / PARTIAL_FILE).layers) == finished
    assert pack(demo, file_limit_bytes=7_000_000).kept == finished
    assert damaged(demo) == []
    assert written(demo) == written(packed)


def test_a_damaged_layer_of_an_unfinished_pack_is_written_again(demo: Path) -> None:
    """It and what follows it in its file; layers before it are kept."""
    pack(demo)
    (demo / INDEX_FILE).rename(demo / PARTIAL_FILE)
    third = read_index(demo / PARTIAL_FILE).layers[2]
    flip(demo / third.file, third.offset + 10)
    assert pack(demo).kept == 2
    assert damaged(demo) == []


def test_a_damaged_file_of_a_pack_in_use_is_replaced_and_the_others_stay(
    packed_copy: Path,
) -> None:
    """An engine that has the old file open goes on reading what it read before."""
    loaded = streamed(packed_copy)
    wanted = logits(loaded)
    old = pack_files(packed_copy)
    kept = {file: file.stat().st_mtime_ns for file in old[1:]}
    flip(old[0], 10)
    [(layer, experts)] = damaged(packed_copy)
    assert (layer, experts) == ("model.layers.0.mlp.switch_mlp", (0,))
    report = pack(packed_copy)
    assert report.kept == 6
    assert damaged(packed_copy) == []
    assert old[0] not in pack_files(packed_copy)
    assert {file: file.stat().st_mtime_ns for file in old[1:]} == kept
    assert mx.array_equal(logits(streamed(packed_copy)), wanted).item()
    assert mx.array_equal(logits(loaded), wanted).item()


def test_a_repair_that_stops_leaves_no_pack_that_engines_would_take(packed_copy: Path) -> None:
    """The index goes before the files that it names."""
    flip(pack_files(packed_copy)[0], 10)
    with pytest.raises(_Cut):
        pack(packed_copy, bar=cut_after(3))
    assert not (packed_copy / INDEX_FILE).exists()
    assert not is_packed(streamed(packed_copy))
    assert pack(packed_copy).kept == 6
    assert damaged(packed_copy) == []


def test_a_full_disk_is_refused_with_the_numbers_before_anything_is_written(demo: Path) -> None:
    before = sorted(demo.iterdir())
    with pytest.raises(SettingsError, match=r"needs 0\.09 GB more, and 0\.01 GB are free.*output"):
        pack(demo, free_bytes=lambda _folder: 10_000_000)
    assert sorted(demo.iterdir()) == before


def test_what_a_new_pack_replaces_counts_as_free(packed_copy: Path) -> None:
    """A checkpoint that was changed, on a disk with room for one pack only."""
    (packed_copy / "generation_config.json").unlink()
    config = json.loads((packed_copy / "config.json").read_text())
    (packed_copy / "config.json").write_text(json.dumps(config | {"note": "mine"}))
    room = 64 * 1024**2 + 1000
    pack(packed_copy, free_bytes=lambda _folder: room, replaces=True)
    assert damaged(packed_copy) == []
    assert is_packed(streamed(packed_copy))


def test_a_disk_that_fills_up_meanwhile_keeps_what_was_finished(demo: Path) -> None:
    """A limit on the length of files stands for the full disk: the write itself fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, hard))
    try:
        with pytest.raises(SettingsError, match=r"cannot be written: File too large.*are kept"):
            pack(demo)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (demo / INDEX_FILE).exists()
    assert pack(demo).kept == 3
    assert damaged(demo) == []


def test_only_one_run_writes_into_a_folder(demo: Path) -> None:
    with locked(demo), pytest.raises(SettingsError, match="another headrace pack"):
        pack(demo)


def test_the_pack_of_another_checkpoint_is_replaced_only_when_told(
    packed_copy: Path, tmp_path: Path
) -> None:
    other = dense(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"is the pack of another checkpoint.*--force"):
        pack(other, packed_copy)
    assert damaged(packed_copy) == []
    replaced('"version":1', '"version":2')(packed_copy)
    with pytest.raises(SettingsError, match="or of another headrace"):
        pack(other, packed_copy)
    pack(other, packed_copy, replaces=True)
    assert is_packed(streamed(other, packed_copy))
    assert not is_packed(streamed(packed_copy))


def rewritten(change: Callable[[PackIndex], PackIndex]) -> Callable[[Path], object]:
    """Edits the index of a pack."""

    def edit(folder: Path) -> None:
        index = change(read_index(folder / INDEX_FILE))
        (folder / INDEX_FILE).write_text(index.model_dump_json())

    return edit


def replaced(old: str, new: str) -> Callable[[Path], object]:
    """Replaces text in the index of a pack."""
    return lambda folder: (folder / INDEX_FILE).write_text(
        (folder / INDEX_FILE).read_text().replace(old, new)
    )


MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another checkpoint's": (
        rewritten(lambda index: index.model_copy(update={"fingerprint": "0" * 64})),
        "belongs to another checkpoint",
    ),
    "of another version": (replaced('"version":1', '"version":2'), "no pack that this headrace"),
    "not JSON": (lambda folder: (folder / INDEX_FILE).write_text("{"), "no pack that"),
    "with a cut file": (lambda folder: os.truncate(pack_files(folder)[1], 900), "missing or cut"),
    "with a missing file": (lambda folder: pack_files(folder)[3].unlink(), "missing or cut"),
    "without a layer": (
        rewritten(lambda index: index.model_copy(update={"layers": index.layers[:-1]})),
        "in another way now",
    ),
    "made of other tensors": (
        replaced(
            '"projection":"up_proj","name":"scales"', '"projection":"up_proj","name":"biases"'
        ),
        "in another way now",
    ),
    "that leaves the folder": (
        replaced("headrace.experts-00001.bin", "../x/headrace.experts-00001.bin"),
        "no pack that",
    ),
    "with numbers that do not fit": (replaced('"stride":98304', '"stride":98303'), "no pack that"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_pack_that_does_not_fit_is_ignored_with_a_warning(
    packed_copy: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, says = MISFITS[name]
    damage(packed_copy)
    with caplog.at_level(logging.WARNING):
        loaded = streamed(packed_copy)
    assert not is_packed(loaded)
    assert says in caplog.text
    assert "headrace pack" in caplog.text


def other_writer(folder: Path) -> None:
    rewritten(
        lambda index: index.model_copy(
            update={"writer": index.writer.model_copy(update={"mlx_lm": "0.1"})}
        )
    )(folder)


def test_bytes_that_another_mlx_lm_only_copied_are_used_and_kept(packed_copy: Path) -> None:
    """They are the checkpoint's own, whoever arranged them."""
    other_writer(packed_copy)
    assert is_packed(streamed(packed_copy))
    assert pack(packed_copy).kept == LAYERS


def test_bytes_that_another_mlx_lm_computed_are_neither_used_nor_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fused_checkpoints.transposed(tmp_path / "model")
    pack(folder)
    other_writer(folder)
    with pytest.raises(CheckpointError, match="rearranged"):
        streamed(folder)
    assert "mlx-lm 0.1 computed" in caplog.text
    assert pack(folder).kept == 0
    assert is_packed(streamed(folder))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    folder = dense(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"decoder_sparse_step": 5, "mlp_only_layers": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        pack(folder)


def headrace(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_pack_find_and_check_a_pack_elsewhere(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link below the state folder leads engines and `verify` to where --output put it."""
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(state))
    monkeypatch.setenv("COLUMNS", "250")
    result = headrace("pack", demo, "--output", elsewhere)
    assert result.exit_code == 0, result.stderr
    assert "256 experts of 8 layers" in result.output
    linked = state_folder(state, read_checkpoint(demo).fingerprint)
    assert is_packed(streamed(demo, linked))
    assert headrace("verify", demo).exit_code == 0
    layer = read_index(elsewhere / INDEX_FILE).layers[4]
    flip(elsewhere / layer.file, layer.offset + 7 * layer.layout.stride)
    refused = headrace("verify", demo)
    assert refused.exit_code == 1
    assert f"{layer.file} differs from what was written: experts 7 of" in refused.output
    assert "model.layers.4.mlp.switch_mlp" in refused.output
    os.truncate(elsewhere / layer.file, 100)
    assert "ends at byte" in headrace("verify", demo).output
    assert headrace("pack", demo, "--output", elsewhere).exit_code == 0
    assert headrace("verify", demo).exit_code == 0


def test_the_demo_models_pack_goes_below_the_state_folder(tmp_path: Path) -> None:
    """Never into the installed program."""
    assert headrace("pack", "demo", "--state-dir", tmp_path).exit_code == 0
    assert not (DEMO_FOLDER / INDEX_FILE).exists()
    folder = state_folder(tmp_path, read_checkpoint(DEMO_FOLDER).fingerprint)
    assert is_packed(streamed(DEMO_FOLDER, folder))
