"""Drafts change nothing but the number of runs: tokens, log probabilities, ends and usage stay."""

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from headrace_replicas.contract.errors import ExpertReadError
from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.commands import stream_key
from headrace_replicas.engine.steps import Engine
from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import (
    DRAFT_RUN_S,
    NEVER_SAID,
    RUN_S,
    DraftingEngine,
    always_wrong,
    itself,
    perturbed,
)
from tests.support.engines import Answer, ask, request_for, resumed

pytestmark = pytest.mark.engine

PROMPT = tuple(range(10, 22))
# The tiny model is very sure of itself: only a high temperature makes it choose.
HOT = 12.0
SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=HOT, logprobs=3),
    SamplingParams(temperature=HOT, top_k=40, top_p=0.9, min_p=0.02, logprobs=0),
    SamplingParams(temperature=HOT, repetition_penalty=1.1, presence_penalty=9.0, logprobs=1),
    SamplingParams(temperature=HOT, logit_bias=((30, 50.0), (90, -100.0)), logprobs=1),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Noise whose next token depends on all tokens before it."""
    return read_checkpoint(make_checkpoint(tmp_path_factory.mktemp("tiny"), random_seed=7))


@pytest.fixture(scope="module")
def plain(tiny: Checkpoint) -> Iterator[DraftingEngine]:
    """What drafts are compared with."""
    running = DraftingEngine(tiny, None)
    yield running
    running.engine.stop()


@pytest.fixture(scope="module", params=[itself, perturbed])
def drafting(request: pytest.FixtureRequest, tiny: Checkpoint) -> Iterator[DraftingEngine]:
    running = DraftingEngine(tiny, request.param)
    yield running
    running.engine.stop()


@pytest.fixture(scope="module")
def knowing(tiny: Checkpoint) -> Iterator[DraftingEngine]:
    """Its draft model is always right, so that every pass is used to the end."""
    running = DraftingEngine(tiny)
    yield running
    running.engine.stop()


def request_of(tiny: Checkpoint, name: str = "r", **changes: Any) -> GenerateRequest:
    """A sampled request that nothing but its limit ends, unless said otherwise."""
    request = request_for(tiny, PROMPT, request_id=name, temperature=HOT, max_tokens=48)
    return replace(request, **{"stop_ids": frozenset()} | changes)


def assert_equal(one: Answer, other: Answer) -> None:
    assert one.ids == other.ids
    assert one.logprobs == other.logprobs
    assert one.last.finish_reason == other.last.finish_reason
    assert one.last.usage == other.last.usage


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_an_answer_is_the_same_with_drafts(
    drafting: DraftingEngine, plain: DraftingEngine, tiny: Checkpoint, sampling: SamplingParams
) -> None:
    request = request_of(tiny, sampling=sampling)
    assert_equal(ask(drafting.engine, request).wait(), ask(plain.engine, request).wait())


@pytest.mark.parametrize(
    ("make_draft", "accepted_ratio"),
    [(itself, (0.95, 1.0)), (perturbed, (0.1, 0.9)), (always_wrong, (0.0, 0.0))],
)
def test_each_accepted_draft_saves_a_run(
    plain: DraftingEngine, tiny: Checkpoint, make_draft: Any, accepted_ratio: tuple[float, float]
) -> None:
    """And sampled answers are guessed as well as greedy ones, by drawing with the same numbers."""
    request = request_of(tiny, max_tokens=100)
    before = plain.target.runs
    answer = ask(plain.engine, request).wait()
    needed = plain.target.runs - before
    drafted = DraftingEngine(tiny, make_draft)
    before = drafted.target.runs
    assert ask(drafted.engine, request).wait().ids == answer.ids
    drafted.engine.stop()
    counters = drafted.counters
    assert counters.passes > 10
    assert drafted.target.runs - before == needed - counters.accepted
    least, most = accepted_ratio
    assert least <= counters.acceptance_ratio <= most


def test_a_stop_id_inside_accepted_drafts_ends_the_answer_there(
    knowing: DraftingEngine, plain: DraftingEngine, tiny: Checkpoint
) -> None:
    whole = ask(plain.engine, request_of(tiny)).wait().ids
    for place in range(20, 24):
        stopping = request_of(tiny, stop_ids=frozenset({whole[place]}))
        with_drafts = ask(knowing.engine, stopping).wait()
        assert_equal(with_drafts, ask(plain.engine, stopping).wait())
        assert with_drafts.last.finish_reason == "stop"
        assert with_drafts.ids == whole[: whole.index(whole[place])]


def test_a_limit_inside_accepted_drafts_ends_the_answer_there(
    knowing: DraftingEngine, plain: DraftingEngine, tiny: Checkpoint
) -> None:
    whole = ask(plain.engine, request_of(tiny)).wait().ids
    for limit in (1, 2, 3, *range(20, 24)):
        short = ask(knowing.engine, request_of(tiny, max_tokens=limit)).wait()
        assert short.ids == whole[:limit]
        assert short.last.finish_reason == "length"
        assert short.last.usage is not None
        assert short.last.usage.completion_tokens == limit


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_resumed_answer_goes_on_as_it_would_have_without_drafts(
    drafting: DraftingEngine, plain: DraftingEngine, tiny: Checkpoint, mode: str
) -> None:
    sampling = SamplingParams(temperature=HOT, frequency_penalty=2.0, logprobs=1)
    request = request_of(tiny, sampling=sampling)
    whole = ask(plain.engine, request).wait()
    for cut in (1, 21, 48):
        rest = ask(drafting.engine, resumed(request, whole.ids[:cut], mode)).wait()
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert rest.logprobs == whole.logprobs[cut:]
        assert rest.last.usage == whole.last.usage


def _until(answer: Answer, tokens: int) -> None:
    while len(answer.ids) < tokens:
        answer.next()


def test_requests_that_join_and_leave_in_mid_answer_change_nothing(
    drafting: DraftingEngine, plain: DraftingEngine, tiny: Checkpoint
) -> None:
    """One joins while drafts of the first are kept, one leaves by cancelling, one by ending."""
    first = request_of(tiny, "first", max_tokens=120)
    second = request_of(tiny, "second", prompt_ids=PROMPT[:5], seed=2)
    third = request_of(tiny, "third", prompt_ids=PROMPT * 3, seed=3)
    alone = {one: ask(plain.engine, one).wait() for one in (first, second, third)}
    running = ask(drafting.engine, first)
    _until(running, 12)
    joined = ask(drafting.engine, second)
    _until(joined, 3)
    dropped = ask(drafting.engine, third)
    _until(dropped, 1)
    drafting.engine.cancel(stream_key(third))
    assert_equal(joined.wait(), alone[second])
    assert_equal(running.wait(), alone[first])
    assert_equal(ask(drafting.engine, third).wait(), alone[third])


def test_a_request_cancelled_while_drafts_are_kept_leaves_nothing_behind(
    knowing: DraftingEngine, plain: DraftingEngine, tiny: Checkpoint
) -> None:
    request = request_of(tiny, "left", max_tokens=80)
    whole = ask(plain.engine, request).wait()
    for tokens in (15, 16, 17):
        running = ask(knowing.engine, request)
        _until(running, tokens)
        knowing.engine.cancel(stream_key(request))
        # The same prompt follows, so that what was kept would fit.
        assert_equal(ask(knowing.engine, replace(request, request_id="next")).wait(), whole)
    assert knowing.engine.status.running == 0
    assert knowing.engine.status.outstanding_tokens == 0


@pytest.mark.parametrize(("slots", "drafts"), [(6, 2), (4, 1), (2, 0)])
@pytest.mark.parametrize("schedule", ["layers", "overlap", "speculate"])
def test_streamed_experts_are_drafted_for_as_far_as_their_slots_allow(
    plain: DraftingEngine, tiny: Checkpoint, slots: int, drafts: int, schedule: str
) -> None:
    """A token uses 2 of 8 experts in each layer, a pass with two drafts 6 at most."""
    running = DraftingEngine(tiny, slots=slots, schedule=schedule)
    request = request_of(tiny, sampling=SamplingParams(temperature=HOT, logprobs=2))
    assert_equal(ask(running.engine, request).wait(), ask(plain.engine, request).wait())
    running.engine.stop()
    counters = running.counters
    assert (counters.passes > 10) == (drafts > 0)
    assert drafts * counters.passes - 2 <= counters.drafted <= drafts * counters.passes
    assert running.loaded.streamed is not None
    speculated = running.loaded.streamed.counters.speculated
    assert speculated >= 48 - counters.accepted if schedule == "speculate" else speculated == 0


def test_an_expert_that_cannot_be_read_for_a_pass_fails_the_request_and_drafts_go_on(
    plain: DraftingEngine, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = DraftingEngine(tiny, slots=4)
    request = request_of(tiny)
    wanted = ask(plain.engine, request).wait()
    assert_equal(ask(running.engine, request).wait(), wanted)
    passes = running.counters.passes

    def broken(*_arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        with pytest.raises(ExpertReadError, match="the disk or its connection fails"):
            ask(running.engine, request_of(tiny, prompt_ids=PROMPT[::-1])).wait()
    assert_equal(ask(running.engine, request).wait(), wanted)
    assert running.engine.status.fault is None
    assert running.counters.passes > passes
    running.engine.stop()


@pytest.mark.parametrize("schedule", ["layers", "speculate"])
def test_the_demo_model_says_the_same_with_half_of_its_experts_and_drafts(
    engine: Engine, checkpoint: Checkpoint, tokenizer: TextTokenizer, schedule: str
) -> None:
    prompt = tokenizer.render_chat([{"role": "user", "content": "Tell me a story of a fox."}])
    sampling = SamplingParams(temperature=0.8, logprobs=2)
    request = request_for(checkpoint, prompt, sampling=sampling, max_tokens=24)
    running = DraftingEngine(checkpoint, perturbed, slots=16, schedule=schedule)
    assert_equal(ask(running.engine, request).wait(), ask(engine, request).wait())
    running.engine.stop()
    assert running.counters.passes > 0


def test_drafts_that_are_always_wrong_rest_and_are_tried_again(
    plain: DraftingEngine, tiny: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve.headrace.drafts")
    running = DraftingEngine(tiny, always_wrong)
    request = request_of(tiny, max_tokens=150)
    answer = ask(running.engine, request).wait()
    running.engine.stop()
    assert answer.ids == ask(plain.engine, request).wait().ids
    assert NEVER_SAID not in answer.ids
    # 8 tokens without, 32 with, a rest of 64, and 32 again. Each of the 32 is charged a part of the
    # draft model's prefill, which took 0.1 s.
    assert running.counters.stops == 2
    assert running.counters.passes == 64
    assert any("do not pay: 1200.78 ms a token" in line.message for line in caplog.records)


def test_the_rate_of_tokens_is_that_of_their_time_and_not_of_their_steps(
    knowing: DraftingEngine, tiny: Checkpoint
) -> None:
    """A step that takes an accepted draft takes no time: the mean of rates would know no bound."""
    ask(knowing.engine, request_of(tiny, max_tokens=100)).wait()
    fastest = 3 / (RUN_S + 2 * DRAFT_RUN_S)
    assert 1 / RUN_S < knowing.engine.status.step_rate < 1.3 * fastest


def test_a_long_prompt_reaches_the_draft_model_in_chunks(
    plain: DraftingEngine, tiny: Checkpoint
) -> None:
    """The answer goes on meanwhile, and the next turn of the conversation is fed what is new."""
    running = DraftingEngine(tiny, prefill_chunk_tokens=16)
    request = request_of(tiny, prompt_ids=PROMPT * 12)
    first = ask(running.engine, request).wait()
    assert_equal(first, ask(plain.engine, request).wait())
    # Each chunk waits for a step, in which a token comes.
    assert 144 <= running.counters.prefilled <= 144 + 8 + 10
    assert running.counters.accepted > 0
    before = running.counters.prefilled
    ask(running.engine, replace(request, prompt_ids=request.prompt_ids + first.ids)).wait()
    assert running.counters.prefilled - before <= 16
    running.engine.stop()


def test_drafting_neither_synchronises_the_stream_nor_clears_the_allocator(
    knowing: DraftingEngine, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("synchronize", "clear_cache"):
        original: Any = getattr(mx, name)

        def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            return _original(*args)

        monkeypatch.setattr(mx, name, counted)
    before = knowing.counters.accepted
    ask(knowing.engine, request_of(tiny, prompt_ids=PROMPT[::-1])).wait()
    assert knowing.counters.accepted > before
    assert calls == []
