"""A cold cache, slow storage and a stalled read; `make seed1` does it at full size."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.schedule import SCHEDULES, Schedule
from headrace_serve.text.tokenizer import TextTokenizer
from tests.bench.generated_model import make_model
from tests.streaming.seed1 import (
    SHORT,
    faults_of,
    requests_for,
    resident_answers,
    run_schedule,
)
from tests.support.engines import DEMO_FOLDER
from tests.support.item_prompts import LENGTHS_TOKENS, item_prompts

pytestmark = pytest.mark.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A generated model, what is asked, and what is right."""

    checkpoint: Checkpoint
    requests: list[GenerateRequest]
    expected: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder: Path = tmp_path_factory.mktemp("generated") / "model"
    make_model(folder, SHORT.shape, dense=True)
    checkpoint = read_checkpoint(folder)
    requests = requests_for(checkpoint, SHORT)
    expected = resident_answers(checkpoint, SHORT, requests)
    return Subject(checkpoint=checkpoint, requests=requests, expected=expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slow_and_stalled_storage_costs_time_and_nothing_else(
    subject: Subject, schedule: Schedule
) -> None:
    """Every request completes unchanged, no evaluation holds a read, and progress is seen."""
    run = run_schedule(subject.checkpoint, SHORT, schedule, subject.requests, subject.expected)
    assert faults_of(run, SHORT) == []
    assert [len(request.prompt_ids) for request in subject.requests] == [
        row.tokens for row in run.rows
    ]


def test_the_prompts_have_the_lengths_of_the_crash() -> None:
    prompts = item_prompts(TextTokenizer.from_folder(DEMO_FOLDER))
    for prompt, length in zip(prompts, LENGTHS_TOKENS, strict=True):
        assert abs(len(prompt.ids) - length) <= 3
