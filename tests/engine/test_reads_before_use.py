"""No evaluation holds a read: whatever the storage does, bytes come first, and answers hold."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.experts.reader import RangeReader
from headrace_replicas.engine.experts.streaming import Computing
from headrace_replicas.engine.steps import Engine
from headrace_replicas.injection.plan import ShortRead, StalledRead
from tests.support.engines import ask, request_for
from tests.support.stream_watch import StreamWatch
from tests.support.streaming_engines import StreamingEngine, faulty_storage

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
STORY = "Tell me a story about a fox named Vera."
# Reads take their time now and then, so that whoever does not wait for them is found.
UNEVEN = (StalledRead(stall_s=0.004, ratio=0.05), ShortRead(ratio=0.1))


def watched_engine(
    checkpoint: Checkpoint, slots: int, schedule: str
) -> tuple[StreamingEngine, StreamWatch]:
    watch = StreamWatch(faulty_storage(*UNEVEN))
    running = StreamingEngine(checkpoint, slots, schedule, storage=watch)
    watch.follow(running)
    return running, watch


@pytest.mark.parametrize(
    ("slots", "schedule"), [(4, "layers"), (20, "layers"), (8, "overlap"), (20, "speculate")]
)
def test_every_slot_has_its_bytes_before_an_evaluation_uses_it(
    checkpoint: Checkpoint, chat: Chat, engine: Engine, slots: int, schedule: str
) -> None:
    requests = [
        request_for(checkpoint, chat(text), request_id=text, max_tokens=12)
        for text in (STORY, "Count from 1 to 30.")
    ]
    expected = [ask(engine, request).wait().ids for request in requests]
    running, watch = watched_engine(checkpoint, slots, schedule)
    with watch.over_evaluations(running):
        together = [answer.wait().ids for answer in [ask(running.engine, r) for r in requests]]
    running.stop()
    totals = watch.ledger.totals
    assert watch.ledger.violations == []
    assert together == expected
    assert totals.promised_bytes == totals.came_bytes > 0
    assert totals.submitted > 100
    assert totals.evaluations > 100
    if schedule == "overlap":
        assert totals.reads_beside > 0


def test_a_reader_that_does_not_wait_would_be_found(
    checkpoint: Checkpoint, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, watch = watched_engine(checkpoint, 20, "layers")

    def carry_out(self: RangeReader, runs: Sequence[Any]) -> None:
        for run in runs:
            self._threads.submit(self._one, run, lambda: None)

    monkeypatch.setattr(RangeReader, "_carry_out", carry_out)
    with watch.over_evaluations(running):
        _ends_somehow(running, checkpoint, chat)
    monkeypatch.undo()
    running.stop()
    assert any("bytes are to come" in text for text in watch.ledger.violations)


def test_a_layer_that_overwrites_what_is_in_use_would_be_found(
    checkpoint: Checkpoint, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few slots a prefill goes group by group, and a group must wait for those before it."""
    running, watch = watched_engine(checkpoint, 4, "layers")
    monkeypatch.setattr(Computing, "wait_for", lambda _self, _slots: None)
    with watch.over_evaluations(running):
        _ends_somehow(running, checkpoint, chat)
    monkeypatch.undo()
    running.stop()
    assert any("overwritten before its use is over" in text for text in watch.ledger.violations)


def _ends_somehow(running: StreamingEngine, checkpoint: Checkpoint, chat: Chat) -> None:
    """With wrong bytes the answer may be anything, an engine fault included."""
    try:
        ask(running.engine, request_for(checkpoint, chat(STORY), max_tokens=4)).wait()
    except HeadraceError:
        return
