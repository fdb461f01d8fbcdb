"""The engine loop: equality over batches and moves, cancellation, and what it must never call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from headrace_replicas.contract.errors import (
    EngineFaultError,
    InvalidRequestError,
    WeightsMismatchError,
)
from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.commands import stream_key
from headrace_replicas.engine.steps import Engine
from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.engines import ask, becomes_idle, request_for, resumed, start_engine

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
STORY = "Tell me a story about a fox named Vera."


def test_the_demo_model_answers_what_its_card_says(
    engine: Engine, checkpoint: Checkpoint, chat: Chat, tokenizer: TextTokenizer
) -> None:
    request = request_for(checkpoint, chat("What is 9 + 9?"), temperature=0.0)
    answer = ask(engine, request).wait()
    assert b"".join(map(tokenizer.token_bytes, answer.ids)) == b"9 + 9 = 18"
    assert answer.last.finish_reason == "stop"
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == len(answer.ids)
    assert answer.last.usage.prompt_tokens == len(request.prompt_ids)


def test_neighbours_in_the_batch_change_neither_tokens_nor_log_probabilities(
    engine: Engine, checkpoint: Checkpoint, chat: Chat
) -> None:
    sampling = SamplingParams(temperature=0.8, logprobs=2)
    texts = (STORY, "Count from 1 to 30.", "Repeat: hello", "What is 9 + 9?")
    requests = [
        request_for(checkpoint, chat(text), request_id=text, seed=i, sampling=sampling)
        for i, text in enumerate(texts)
    ]
    alone = [ask(engine, request).wait() for request in requests]
    together = [answer.wait() for answer in [ask(engine, request) for request in requests]]
    for one, batched in zip(alone, together, strict=True):
        assert one.ids == batched.ids
        assert one.logprobs == batched.logprobs


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, logprobs=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02),
        SamplingParams(
            temperature=0.9, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3
        ),
        SamplingParams(temperature=0.8, logit_bias=((5, 2.0), (900, -100.0))),
    ],
)
def test_a_resumed_answer_equals_the_undisturbed_one_at_every_cut(
    engine: Engine, checkpoint: Checkpoint, chat: Chat, sampling: SamplingParams, mode: str
) -> None:
    request = request_for(checkpoint, chat(STORY), sampling=sampling, max_tokens=64)
    whole = ask(engine, request).wait()
    for cut in (1, 5, 20, len(whole.ids) - 1, len(whole.ids)):
        rest = ask(engine, resumed(request, whole.ids[:cut], mode)).wait()
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert rest.last.finish_reason == whole.last.finish_reason
        assert rest.last.usage == whole.last.usage
        assert rest.logprobs == whole.logprobs[cut:]


def test_a_cut_after_a_stopped_answer_ends_as_the_first_attempt_would_have(
    engine: Engine, checkpoint: Checkpoint, chat: Chat
) -> None:
    request = request_for(checkpoint, chat("What is 9 + 9?"), temperature=0.0)
    whole = ask(engine, request).wait()
    rest = ask(engine, resumed(request, whole.ids, "fast")).wait()
    assert rest.ids == ()
    assert rest.last.finish_reason == "stop"


def test_seeds_decide_the_answer(engine: Engine, checkpoint: Checkpoint, chat: Chat) -> None:
    prompt = chat(STORY)
    answers = [
        ask(engine, request_for(checkpoint, prompt, seed=seed, temperature=1.0)).wait().ids
        for seed in (1, 1, 2, -3)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


def test_no_step_synchronises_the_stream_or_clears_the_allocator(
    checkpoint: Checkpoint, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 512 decode steps and several prefill chunks, where mlx-lm's own loop would."""
    calls: list[str] = []
    for name in ("synchronize", "clear_cache"):
        original = getattr(mx, name)

        def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            return _original(*args)

        monkeypatch.setattr(mx, name, counted)
    engine = start_engine(checkpoint, EngineSettings(device="cpu", prefill_chunk_tokens=16))
    request = request_for(checkpoint, chat(STORY * 4), max_tokens=600)
    answer = ask(engine, replace(request, stop_ids=frozenset())).wait()
    engine.stop()
    assert len(answer.ids) == 600
    assert calls == []


def test_cancelling_frees_the_engine_between_two_prefill_chunks(
    checkpoint: Checkpoint, chat: Chat
) -> None:
    engine = start_engine(checkpoint, EngineSettings(device="cpu", prefill_chunk_tokens=8))
    long = request_for(checkpoint, chat(STORY * 150), request_id="long")
    cancelled = ask(engine, long)
    assert cancelled.next().progress is not None
    engine.cancel(stream_key(long))
    steps_before = engine.status.engine_steps
    short = request_for(checkpoint, chat("What is 9 + 9?"), request_id="short", max_tokens=4)
    ask(engine, short).wait()
    # One step may be under way, a prompt of 20 tokens takes 3 chunks, 4 tokens take 4 steps.
    assert engine.status.engine_steps - steps_before <= 12
    assert becomes_idle(engine)
    assert engine.status.outstanding_tokens == 0
    engine.stop()


def test_a_long_prefill_shows_that_it_progresses(checkpoint: Checkpoint, chat: Chat) -> None:
    engine = start_engine(checkpoint, EngineSettings(device="cpu", prefill_chunk_tokens=8))
    answer = ask(engine, request_for(checkpoint, chat(STORY * 60), max_tokens=1)).wait()
    engine.stop()
    done = [c.progress.prefill_done_tokens for c in answer.chunks if c.progress is not None]
    assert len(done) >= 2
    assert done == sorted(set(done))


def test_log_probabilities_are_sorted_and_hold_the_greedy_token_first(
    engine: Engine, checkpoint: Checkpoint, chat: Chat
) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=5)
    answer = ask(engine, request_for(checkpoint, chat("Count from 1 to 5."), sampling=sampling))
    for entry in answer.wait().logprobs:
        values = [value for _token, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 5
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert entry.logprob <= 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"fingerprint": "another"}, WeightsMismatchError),
        ({"prompt_ids": (6144,)}, InvalidRequestError),
        ({"prompt_ids": (-1,)}, InvalidRequestError),
        ({"prompt_ids": ()}, InvalidRequestError),
        ({"max_tokens": 0}, InvalidRequestError),
        ({"sampling": SamplingParams(logit_bias=((6144, 1.0),))}, InvalidRequestError),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_its_neighbour_goes_on(
    engine: Engine,
    checkpoint: Checkpoint,
    chat: Chat,
    change: dict[str, Any],
    error: type[Exception],
) -> None:
    good = request_for(checkpoint, chat("Count from 1 to 9."), temperature=0.0)
    neighbour = ask(engine, good)
    with pytest.raises(error):
        ask(engine, replace(good, request_id="bad", **change)).wait()
    assert neighbour.wait().last.finish_reason == "stop"


def _fail_at_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    steps = iter(range(1_000_000))
    original: Any = mx.async_eval

    def failing(*args: Any) -> None:
        if next(steps) == step:
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")
        original(*args)

    monkeypatch.setattr(mx, "async_eval", failing)


def test_a_fault_in_a_step_ends_every_attempt_and_the_engine_takes_no_more(
    checkpoint: Checkpoint, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(checkpoint)
    requests = [
        request_for(checkpoint, chat(STORY), request_id=name, max_tokens=400) for name in "ab"
    ]
    answers = [ask(engine, request) for request in requests]
    for answer in answers:
        answer.next()
    _fail_at_step(engine, monkeypatch, step=3)
    for answer in answers:
        with pytest.raises(EngineFaultError, match="Caused GPU Timeout Error"):
            answer.wait()
    with pytest.raises(EngineFaultError, match="Caused GPU Timeout Error"):
        ask(engine, requests[0]).wait()
    assert engine.status.fault is not None
    assert becomes_idle(engine)


class _NanAfter:
    """A model whose logits turn into NaN at some call."""

    def __init__(self, model: Any, calls: int) -> None:
        self._model = model
        self._calls_left = calls

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        self._calls_left -= 1
        logits: mx.array = self._model(*args, **kwargs)
        return logits * float("nan") if self._calls_left < 0 else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_logits_that_are_not_finite_are_a_fault_and_not_a_token(
    checkpoint: Checkpoint, chat: Chat
) -> None:
    from headrace_replicas.contract.clock import SystemClock
    from tests.support.engines import load_on_cpu

    def load() -> Any:
        loaded = load_on_cpu(checkpoint)
        failing: Any = _NanAfter(loaded.model, calls=6)
        return replace(loaded, model=failing)

    engine = Engine(load=load, settings=EngineSettings(device="cpu"), clock=SystemClock())
    engine.start()
    answer = ask(engine, request_for(checkpoint, chat(STORY)))
    with pytest.raises(EngineFaultError, match="non-finite"):
        answer.wait()


def test_a_stopped_engine_tells_who_waits(checkpoint: Checkpoint, chat: Chat) -> None:
    engine = start_engine(checkpoint)
    request: GenerateRequest = request_for(checkpoint, chat(STORY), max_tokens=2000)
    answer = ask(engine, request)
    answer.next()
    engine.stop()
    with pytest.raises(EngineFaultError, match="stopped"):
        answer.wait()
