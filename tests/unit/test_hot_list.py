"""The list of hot experts on disk: kept whole, added to, and ignored when it is of no use."""

import json
import logging
import os
from pathlib import Path

import pytest

from headrace_replicas.engine.durable_files import locked
from headrace_replicas.engine.experts.hot_list import HotList, hot_list_path, read_hot_list
from headrace_replicas.engine.experts.popularity import hottest
from headrace_replicas.engine.experts.use_counts import UseCounts

SHAPES = {"layers.0": 4, "layers.1": 3}
FINGERPRINT = "0123456789abcdef0123"


def open_list(path: Path) -> tuple[HotList, UseCounts]:
    uses = UseCounts(list(SHAPES.values()))
    return HotList(path, fingerprint=FINGERPRINT, shapes=SHAPES, uses=uses), uses


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return hot_list_path(tmp_path, FINGERPRINT)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_a_list_lies_below_the_state_folder_by_the_fingerprint(tmp_path: Path) -> None:
    expected = tmp_path / "hot_lists" / "0123456789abcdef.json"
    assert hot_list_path(tmp_path, FINGERPRINT) == expected


def test_what_was_counted_is_known_after_a_restart(path: Path) -> None:
    held, uses = open_list(path)
    for _ in range(3):
        uses.note(0, [2, 3])
    uses.note(1, [1])
    assert held.save()
    again, _ = open_list(path)
    assert again.popularity.layers == {"layers.0": (0, 0, 3, 3), "layers.1": (0, 1, 0)}
    assert again.popularity == held.popularity


def test_each_use_is_added_once(path: Path) -> None:
    held, uses = open_list(path)
    uses.note(0, [1])
    assert held.save()
    assert not held.save()
    uses.note(0, [1])
    assert held.save()
    assert read_hot_list(path, FINGERPRINT, SHAPES).layers["layers.0"][1] == pytest.approx(2, 1e-3)


def test_what_was_counted_before_the_list_was_opened_is_left_out(path: Path) -> None:
    """The canary and the choice of a schedule come first."""
    uses = UseCounts(list(SHAPES.values()))
    uses.note(0, [0])
    held = HotList(path, fingerprint=FINGERPRINT, shapes=SHAPES, uses=uses)
    assert not held.save()
    uses.note(0, [3])
    assert held.save()
    assert held.popularity.layers["layers.0"] == (0, 0, 0, 1)


def test_uses_that_do_not_count_are_not_kept(path: Path) -> None:
    held, uses = open_list(path)
    uses.is_counting = False
    uses.note(0, [0, 1])
    uses.is_counting = True
    assert not held.save()


def test_several_engines_of_a_host_add_up(path: Path) -> None:
    first, first_uses = open_list(path)
    second, second_uses = open_list(path)
    first_uses.note(0, [0])
    second_uses.note(0, [1])
    second_uses.note(0, [1])
    assert first.save()
    assert second.save()
    assert hottest(open_list(path)[0].popularity.layers["layers.0"], 4) == (1, 0)


def test_counts_wait_while_another_engine_writes(path: Path) -> None:
    held, uses = open_list(path)
    uses.note(0, [2])
    path.parent.mkdir()
    with locked(path.parent) as is_ours:
        assert is_ours
        assert not held.save()
    assert held.save()
    assert held.popularity.layers["layers.0"] == (0, 0, 1, 0)


def test_a_list_that_is_not_there_is_said_in_one_line(
    path: Path, log: pytest.LogCaptureFixture
) -> None:
    held, _ = open_list(path)
    assert held.popularity.layers == {"layers.0": (0,) * 4, "layers.1": (0,) * 3}
    assert log.messages == [f"there is no list of hot experts yet: {path}"]


def written(path: Path, **changes: object) -> None:
    held = {
        "format": "headrace-hot-list",
        "version": 1,
        "fingerprint": FINGERPRINT,
        "layers": [{"path": "layers.0", "uses": [1, 2, 3, 4]}],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(held | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "of another one"}, "it belongs to another checkpoint"),
        ({"version": 2}, "it is damaged or of another version (version:"),
        ({"format": "else"}, "it is damaged or of another version (format:"),
        ({"more": 1}, "it is damaged or of another version (more:"),
        (
            {"layers": [{"path": "layers.0", "uses": [1, 2]}]},
            "it has 2 experts in layers.0, and the model has 4",
        ),
        ({"layers": [{"path": "layers.0", "uses": [-1, 0, 0, 0]}]}, "(layers.0.uses.0:"),
        ({"layers": [{"path": "layers.0", "uses": []}]}, "(layers.0.uses:"),
        ({"layers": [{"path": "layers.0", "uses": [float("nan")]}]}, "(layers.0.uses.0:"),
        ({"layers": "none"}, "(layers:"),
    ],
)
def test_a_list_of_another_model_or_shape_is_ignored_with_one_line(
    path: Path, log: pytest.LogCaptureFixture, changes: dict[str, object], reason: str
) -> None:
    written(path, **changes)
    held, uses = open_list(path)
    assert hottest(held.popularity.layers["layers.0"], 4) == ()
    [message] = log.messages
    assert message.startswith(f"the list of hot experts is ignored: {path}: ")
    assert reason in message
    uses.note(0, [1])
    assert held.save()
    assert open_list(path)[0].popularity.layers["layers.0"] == (0, 1, 0, 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b"[" * 100_000, b'{"format": "headrace-hot-list"'],
)
def test_a_damaged_list_is_ignored_with_one_line(
    path: Path, log: pytest.LogCaptureFixture, content: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    open_list(path)
    [message] = log.messages
    assert "it is damaged or of another version" in message


def test_what_is_no_file_is_ignored_and_never_waited_for(
    path: Path, log: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    open_list(path)
    [message] = log.messages
    assert message.endswith("it is not a regular file")


def test_layers_that_are_resident_now_keep_their_counts(path: Path) -> None:
    layers = [{"path": "layers.0", "uses": [1, 2, 3, 4]}, {"path": "layers.9", "uses": [5]}]
    written(path, layers=layers)
    held, uses = open_list(path)
    uses.note(1, [2])
    assert held.save()
    again = read_hot_list(path, FINGERPRINT, SHAPES).layers
    assert again["layers.9"] == (5,)
    assert again["layers.0"] == (1, 2, 3, 4)
    assert again["layers.1"] == (0, 0, 1)


def test_a_list_that_went_meanwhile_is_written_anew(path: Path) -> None:
    written(path)
    held, uses = open_list(path)
    path.unlink()
    uses.note(0, [0])
    assert held.save()
    assert hottest(open_list(path)[0].popularity.layers["layers.0"], 4) == (3, 2, 0, 1)


def test_a_folder_that_cannot_be_written_is_said_once_and_tried_again(
    path: Path, log: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file where the folder should be")
    held, uses = open_list(path)
    log.clear()
    uses.note(0, [1])
    assert not held.save()
    assert not held.save()
    [message] = log.messages
    assert message.startswith(f"the list of hot experts is not kept: {path}: ")
    path.parent.unlink()
    assert held.save()
    assert held.popularity.layers["layers.0"] == (0, 1, 0, 0)


def test_a_list_of_a_large_model_is_small(tmp_path: Path) -> None:
    """60 layers of 256 experts, with counts as long as they get."""
    shapes = {f"model.layers.{layer}.mlp.switch_mlp": 256 for layer in range(60)}
    uses = UseCounts(list(shapes.values()))
    held = HotList(tmp_path / "list", fingerprint=FINGERPRINT, shapes=shapes, uses=uses)
    for repeat in range(3):
        for layer in range(60):
            uses.note(layer, range(repeat, 256))
        assert held.save()
    assert (tmp_path / "list").stat().st_size < 256 * 1024
