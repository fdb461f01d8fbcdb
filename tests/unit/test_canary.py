"""The recorded answer by which an engine is judged."""

from pathlib import Path

import pytest

from headrace_replicas.canary import (
    CANARY_TOKENS,
    QUESTION,
    Canary,
    canary_path,
    canary_request,
    difference,
    load_or_record,
)
from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.contract.requests import CheckpointIdentity
from headrace_replicas.engine.checkpoint import read_checkpoint, resolve

IDENTITY = CheckpointIdentity(fingerprint="f" * 64, compute_dtype="float32", engine="mlx 1 cpu")
ANSWER = tuple(range(CANARY_TOKENS))


class Recorder:
    """Counts how often the engine was asked."""

    def __init__(self, *answers: tuple[int, ...]) -> None:
        self.answers = list(answers)

    def __call__(self, _prompt: object) -> tuple[int, ...]:
        return self.answers.pop(0)


def record(state_dir: Path, *answers: tuple[int, ...]) -> Canary:
    return load_or_record(state_dir, IDENTITY, lambda: (1, 2, 3), Recorder(*answers))


def test_the_first_load_records_what_two_runs_agree_on(tmp_path: Path) -> None:
    recorded = record(tmp_path, ANSWER, ANSWER)
    assert recorded == Canary(prompt_ids=(1, 2, 3), expected_ids=ANSWER)
    assert record(tmp_path) == recorded


def test_two_runs_that_disagree_record_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not compute reliably"):
        record(tmp_path, ANSWER, (*ANSWER[:-1], 99))
    assert not canary_path(tmp_path, IDENTITY).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"prompt_ids": [1]}', '{"prompt_ids": 5}'])
def test_a_damaged_record_is_refused_by_name_and_never_replaced(tmp_path: Path, text: str) -> None:
    path = canary_path(tmp_path, IDENTITY)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(CheckpointError, match=path.name):
        record(tmp_path, ANSWER, ANSWER)
    assert path.read_text() == text


def test_another_compute_type_or_engine_has_a_record_of_its_own(tmp_path: Path) -> None:
    others = [
        CheckpointIdentity(fingerprint="f" * 64, compute_dtype="bfloat16", engine="mlx 1 cpu"),
        CheckpointIdentity(fingerprint="f" * 64, compute_dtype="float32", engine="mlx 2 cpu"),
        CheckpointIdentity(fingerprint="e" * 64, compute_dtype="float32", engine="mlx 1 cpu"),
    ]
    paths = {canary_path(tmp_path, identity) for identity in (IDENTITY, *others)}
    assert len(paths) == 4


def test_the_shipped_canary_belongs_to_the_shipped_weights(tmp_path: Path) -> None:
    """Its fingerprint must be renewed with every change of the demo model's files."""
    fingerprint = read_checkpoint(resolve("demo", None)).fingerprint
    identity = CheckpointIdentity(fingerprint=fingerprint, compute_dtype="float32", engine="any")
    shipped = load_or_record(tmp_path, identity, lambda: (), Recorder())
    assert len(shipped.expected_ids) == CANARY_TOKENS
    assert shipped.prompt_ids


def test_a_difference_names_the_first_token_that_differs() -> None:
    canary = Canary(prompt_ids=(1,), expected_ids=(5, 6, 7))
    assert difference(canary, (5, 6, 7)) == ""
    assert difference(canary, (5, 9, 7)) == "token 1: expected id 6, got 9"
    assert difference(canary, (5, 6)) == "expected 3 tokens, got 2"


def test_a_canary_runs_to_its_full_length_whatever_the_model_says() -> None:
    request = canary_request("c", (1, 2), IDENTITY)
    assert request.stop_ids == frozenset()
    assert request.max_tokens == CANARY_TOKENS
    assert request.sampling.temperature == 0
    assert QUESTION
