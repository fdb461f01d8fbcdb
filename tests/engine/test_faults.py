"""Faults of the device: who fails, what lives on, and that a terminal one makes no further call."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import EngineFaultError
from headrace_replicas.contract.faults import FaultKind, FaultReport
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine import steps
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.fault_handling import EXIT_STATUS
from headrace_replicas.engine.sampling import logits_processors
from headrace_replicas.engine.steps import Engine
from headrace_replicas.faults import FaultAnswer, FaultWindow, decide
from headrace_replicas.injection.device_faults import words_of
from headrace_replicas.injection.plan import DeviceError, WrongOutput
from headrace_replicas.origin import Origin
from headrace_replicas.replica import Replica
from tests.support.device_faults import Notes, ProcessEnded, end_process, faulty_device
from tests.support.engines import Answer, ask, becomes_idle, load_on_cpu, request_for
from tests.support.replicas import make_replica
from tests.support.waiting import comes_true

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
STORY = "Tell me a story about a fox named Vera."
# The engine is at this many calls to MLX in the middle of the first tokens.
SOON = 12


@pytest.fixture
def now(tmp_path: Path) -> Path:
    """Touched, it lets a fault begin."""
    return tmp_path / "now"


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def engine(
    checkpoint: Checkpoint, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine that decides about faults as a replica's does; a terminal one ends its thread."""
    # An end of the thread that a test wants is no accident.
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    window = FaultWindow()

    def judge(report: FaultReport) -> FaultAnswer:
        nonlocal window
        window = window.with_fault(report.kind, report.at_s)
        return decide(report.kind, window, at_s=report.at_s, timeouts_replace=True)

    running = Engine(
        load=lambda: load_on_cpu(checkpoint),
        settings=EngineSettings(device="cpu", max_batch=8),
        clock=SystemClock(),
        judge=judge,
        recorder=notes,
        end_process=end_process,
    )
    running.start()
    yield running
    if notes.how is None:
        running.stop()


@pytest.fixture
def two_stories(checkpoint: Checkpoint, chat: Chat) -> list[GenerateRequest]:
    return [
        request_for(checkpoint, chat(STORY), request_id=name, max_tokens=60, seed=seed)
        for seed, name in enumerate("ab")
    ]


def fail_both(engine: Engine, requests: list[GenerateRequest], now: Path, match: str) -> None:
    """Both requests run when the fault strikes, and both fail by it."""
    answers: list[Answer] = [ask(engine, request) for request in requests]
    for answer in answers:
        answer.next()
    now.touch()
    for answer in answers:
        with pytest.raises(EngineFaultError, match=match):
            answer.wait()


@pytest.mark.parametrize("late", [False, True])
def test_a_timeout_fails_all_in_flight_and_the_engine_lives_on_with_nothing_of_its_caches(
    engine: Engine,
    notes: Notes,
    two_stories: list[GenerateRequest],
    now: Path,
    tmp_path: Path,
    late: bool,
) -> None:
    right = [ask(engine, one).wait().ids for one in two_stories]
    fault = DeviceError(times=1, once_exists=now, late=late)
    with faulty_device(tmp_path, fault):
        fail_both(engine, two_stories, now, match="degenerate|Caused GPU Timeout Error")
        assert [ask(engine, one).wait().ids for one in two_stories] == right
    faults = engine.status.faults
    assert engine.status.fault is None
    assert notes.reports[-1].kind is FaultKind.TIMEOUT
    assert notes.reports[-1].gpu_work_done_before
    assert (faults.count, faults.answer) == (len(notes.reports), FaultAnswer.REPLACE)
    assert faults.prefill_chunk_tokens == EngineSettings().prefill_chunk_tokens // 2


def over_or_gone(answer: Answer, engine: Engine) -> bool:
    return answer.is_over or not engine.is_alive


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Every call of MLX that evaluates, waits, allocates or gives back memory."""
    calls: list[str] = []
    kept: list[tuple[Any, str, Any]] = []
    names = [
        (mx, name)
        for name in (*_EVALUATING, *(n for n in dir(mx) if n.startswith(("set_", "clear_"))))
    ]
    for owner, name in (*names, (mx.array, "item"), (mx.array, "tolist")):
        original = getattr(owner, name)
        kept.append((owner, name, original))

        def counting(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            calls.append(_name)
            return _original(*args, **kw)

        setattr(owner, name, counting)
    try:
        yield calls
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


_EVALUATING = ("eval", "async_eval", "synchronize", "zeros", "ones", "concatenate", "stack")


@pytest.mark.parametrize(
    "error",
    ["submissions_ignored", "hang", "page_fault", "invalid_resource", "stack_overflow"],
)
def test_a_terminal_fault_ends_the_process_with_no_further_call_to_the_device(
    engine: Engine,
    notes: Notes,
    two_stories: list[GenerateRequest],
    now: Path,
    tmp_path: Path,
    error: Any,
) -> None:
    calls_then: list[int] = []
    with (
        counted_calls() as calls,
        faulty_device(tmp_path, DeviceError(error=error, once_exists=now)),
    ):
        taken = notes.faulted

        def faulted(report: FaultReport) -> None:
            taken(report)
            calls_then.append(len(calls))

        notes.faulted = faulted  # type: ignore[method-assign]
        ask(engine, two_stories[0]).next()
        now.touch()
        assert comes_true(lambda: not engine.is_alive)
        calls_after = len(calls)
    assert notes.how == (f"{error}: RuntimeError: {words_of(error)}", EXIT_STATUS)
    assert calls_then == [calls_after]
    assert len(notes.reports) == 1


def test_three_timeouts_and_then_a_driver_that_ignores_the_process(
    engine: Engine,
    notes: Notes,
    two_stories: list[GenerateRequest],
    now: Path,
    tmp_path: Path,
) -> None:
    fault = DeviceError(times=3, once_exists=now)
    with faulty_device(tmp_path, fault, forgiven_timeouts=3):
        ask(engine, two_stories[0]).next()
        now.touch()
        for _ in range(4):
            if not engine.is_alive:
                break
            answer = ask(engine, two_stories[0])
            assert comes_true(partial(over_or_gone, answer, engine))
        assert comes_true(lambda: not engine.is_alive)
    kinds = [report.kind for report in notes.reports]
    assert kinds == [FaultKind.TIMEOUT] * 3 + [FaultKind.SUBMISSIONS_IGNORED]


@pytest.mark.parametrize(
    ("form", "words"), [("nan", "non-finite logits"), ("zeros", "degenerate output")]
)
def test_nonsense_is_no_token(
    engine: Engine,
    two_stories: list[GenerateRequest],
    now: Path,
    tmp_path: Path,
    form: Any,
    words: str,
) -> None:
    right = ask(engine, two_stories[0]).wait().ids
    with faulty_device(tmp_path, WrongOutput(form=form, times=4, once_exists=now)):
        answer = ask(engine, two_stories[0])
        answer.next()
        now.touch()
        with pytest.raises(EngineFaultError, match=words):
            answer.wait()
    assert answer.ids == right[: len(answer.ids)]


def test_after_memory_ran_out_fewer_run_at_a_time(
    engine: Engine, two_stories: list[GenerateRequest], now: Path, tmp_path: Path
) -> None:
    with faulty_device(tmp_path, DeviceError(error="out_of_memory", times=1, once_exists=now)):
        fail_both(engine, two_stories, now, match="Insufficient Memory")
    faults = engine.status.faults
    assert (faults.admitted, faults.answer) == (1, FaultAnswer.CANARY)
    answers = [ask(engine, one) for one in two_stories]
    seen = 0
    while not all(one.is_over for one in answers):
        seen = max(seen, engine.status.running)
    assert seen == 1
    assert all(one.wait().last.finish_reason for one in answers)


def test_after_a_while_as_many_run_at_a_time_as_before(
    engine: Engine,
    two_stories: list[GenerateRequest],
    now: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_replicas.engine.fault_handling._GROWS_AFTER_S", 0.0)
    with faulty_device(tmp_path, DeviceError(error="out_of_memory", times=1, once_exists=now)):
        fail_both(engine, two_stories, now, match="Insufficient Memory")
    assert engine.status.faults.admitted == 1
    answers = [ask(engine, one) for one in two_stories]
    seen = 0
    while not all(one.is_over for one in answers):
        seen = max(seen, engine.status.running)
    assert seen == 2


def failing(monkeypatch: pytest.MonkeyPatch, error: str, *, times: int) -> None:
    """Have requests fail so often where the generator takes them, before any step."""
    left = [words_of(error)] * times  # type: ignore[arg-type]  # the test's own names

    def processors(request: GenerateRequest, vocabulary: int) -> Any:
        if left:
            raise RuntimeError(left.pop())
        return logits_processors(request, vocabulary)

    monkeypatch.setattr(steps, "logits_processors", processors)


def test_a_fault_while_a_request_is_taken_is_heard_and_judged(
    engine: Engine,
    notes: Notes,
    two_stories: list[GenerateRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ask(engine, two_stories[0]).wait().ids
    running = ask(engine, two_stories[1])
    running.next()
    failing(monkeypatch, "timeout", times=1)
    taken = ask(engine, two_stories[0])
    for answer in (taken, running):
        with pytest.raises(EngineFaultError, match="Caused GPU Timeout Error"):
            answer.wait()
    assert [report.kind for report in notes.reports] == [FaultKind.TIMEOUT]
    assert ask(engine, two_stories[0]).wait().ids == right


def test_a_terminal_fault_while_a_request_is_taken_ends_the_process(
    engine: Engine,
    notes: Notes,
    two_stories: list[GenerateRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, "submissions_ignored", times=1)
    ask(engine, two_stories[0])
    assert comes_true(lambda: not engine.is_alive)
    assert notes.how is not None
    assert notes.how[1] == EXIT_STATUS


@pytest.mark.parametrize("error", ["submissions_ignored", "timeout"])
def test_a_fault_on_the_way_back_from_a_fault_is_judged_too(
    engine: Engine,
    notes: Notes,
    two_stories: list[GenerateRequest],
    now: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
) -> None:
    def clearing_fails() -> None:
        raise RuntimeError(words_of(error))

    monkeypatch.setattr(steps, "give_back_freed_memory", clearing_fails)
    with faulty_device(tmp_path, DeviceError(error="out_of_memory", times=1, once_exists=now)):
        fail_both(engine, two_stories, now, match="Insufficient Memory")
        assert comes_true(lambda: not engine.is_alive)
    assert [report.kind for report in notes.reports] == [FaultKind.OUT_OF_MEMORY, FaultKind(error)]
    ends_its_process = error == "submissions_ignored"
    assert (notes.how is not None) == ends_its_process
    assert (engine.status.fault is None) == ends_its_process


def test_a_load_whose_fault_cannot_be_judged_still_ends(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever waits for the load waits for ever."""
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)

    def load() -> Any:
        raise RuntimeError(words_of("timeout"))

    def judge(_report: FaultReport) -> FaultAnswer:
        raise OSError("no space left on the device")

    loading = Engine(
        load=load,
        settings=EngineSettings(device="cpu"),
        clock=SystemClock(),
        judge=judge,
        recorder=notes,
        end_process=end_process,
    )
    with pytest.raises(RuntimeError, match="Caused GPU Timeout Error"):
        loading.start()


def test_what_is_done_between_steps_is_watched_as_a_load_is(engine: Engine, notes: Notes) -> None:
    seen: list[Any] = []
    engine.between_steps(lambda: seen.append(notes.phases[-1]))
    assert seen == ["load"]


def test_what_an_engine_does_is_noted(
    engine: Engine, notes: Notes, two_stories: list[GenerateRequest]
) -> None:
    ask(engine, two_stories[0]).wait()
    assert becomes_idle(engine)
    assert comes_true(lambda: notes.phases[-1] == "idle")
    assert notes.phases == ["load", "idle", "prefill", "decode", "idle"]


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    return make_replica(tmp_path, options={"origin": Origin(end_process=end_process)})


async def answer_of(replica: Replica, request: GenerateRequest) -> tuple[int, ...]:
    return tuple([token async for chunk in replica.generate(request) for token in chunk.ids])


def test_after_a_fault_a_replica_runs_nothing_before_its_canary(
    replica: Replica, two_stories: list[GenerateRequest], now: Path, tmp_path: Path
) -> None:
    """The first canary fails by a second timeout, so that the request does too."""
    story = two_stories[0]
    right = asyncio.run(answer_of(replica, story))
    with faulty_device(tmp_path, DeviceError(times=2, once_exists=now)):
        now.touch()
        for _ in range(2):
            with pytest.raises(EngineFaultError, match="Caused GPU Timeout Error"):
                asyncio.run(answer_of(replica, story))
        assert asyncio.run(answer_of(replica, replace(story, request_id="c"))) == right
    seen = replica.snapshot()
    assert (seen.faults, seen.fault_kind, seen.fault_answer) == (2, "timeout", "replace")
    assert "kIOGPUCommandBufferCallbackErrorTimeout" in seen.fault_text
    assert replica.unhealthy_reason == ""


def test_plausible_garbage_is_found_by_the_known_answer(
    replica: Replica, now: Path, tmp_path: Path
) -> None:
    assert asyncio.run(replica.probe()).passed
    with faulty_device(tmp_path, WrongOutput(form="garbage", once_exists=now)):
        now.touch()
        assert not asyncio.run(replica.probe()).passed
    assert replica.snapshot().faults == 0


def test_a_terminal_fault_in_a_probe_ends_an_idle_replica(
    replica: Replica, now: Path, tmp_path: Path
) -> None:
    async def probe() -> None:
        async with asyncio.timeout(1):
            await replica.probe()

    with faulty_device(tmp_path, DeviceError(error="submissions_ignored", once_exists=now)):
        now.touch()
        with pytest.raises((TimeoutError, ProcessEnded)):
            asyncio.run(probe())
    assert not replica.is_alive
