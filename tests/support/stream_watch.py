"""Watches a streaming engine from outside: what it reads, when bytes come, what it computes.

A storage that fills every target with 0xFF before it reads, so that whoever computes with bytes
that are not there yet gets another answer, and tells a `SlotLedger` of all of it.
"""

import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from headrace_replicas.engine.experts.reader import ReadJob
from headrace_replicas.engine.experts.storage import Storage
from headrace_replicas.engine.experts.streaming import ExpertStream
from tests.support.slot_ledger import Slot, SlotLedger
from tests.support.streaming_engines import StreamingEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """A call of `mx.eval` or `mx.async_eval`.

    Attributes:
        arrays: What it was called with.
        submitted_before: Those that an earlier one had submitted.
        owed: From the ledger, at its begin.
    """

    arrays: tuple[mx.array, ...]
    submitted_before: tuple[mx.array, ...]
    owed: Mapping[Slot, int]


class StreamWatch:
    """A storage for one engine, and the watch over that engine.

    Args:
        inner: Where the bytes come from.

    Attributes:
        ledger: What it has seen.
    """

    def __init__(self, inner: Storage) -> None:
        self.ledger = SlotLedger()
        self._inner = inner
        self._lock = threading.Lock()
        # First address of a target -> (address behind it, its slot).
        self._targets: dict[int, tuple[int, Slot]] = {}
        self._results: dict[int, mx.array] = {}
        # By identity: an array, and the newest graph that was submitted when it was.
        self._submitted: dict[int, tuple[mx.array, int]] = {}

    def open(self, file: Path) -> int:
        return self._inner.open(file)

    def read_cached(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:  # noqa: ARG002  the seam's signature
        return 0  # so that every byte comes by `read`

    def stat(self, fd: int) -> os.stat_result:
        return self._inner.stat(fd)

    def close(self, fd: int) -> None:
        self._inner.close(fd)

    def read(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        slots = [self._slot_of(target) for target in targets]
        self.ledger.read_begins(slots)
        came: list[tuple[Slot, int]] = []
        try:
            for target in targets:
                np.frombuffer(target, dtype=np.uint8)[:] = 0xFF
            left = count = self._inner.read(fd, targets, offset)
            for target, slot in zip(targets, slots, strict=True):
                came.append((slot, min(left, len(target))))
                left -= came[-1][1]
        finally:
            self.ledger.read_ends(came)
        return count

    def _slot_of(self, target: memoryview) -> Slot:
        address = _address(target)
        with self._lock:
            return next(
                slot for begin, (end, slot) in self._targets.items() if begin <= address < end
            )

    def follow(self, running: StreamingEngine) -> None:
        """Watch this engine's layers from now on; it must be idle."""
        for number, stream in enumerate(running.streamed.streams):
            for pool in stream._pools:
                _wrap(pool, "job", self._promising(number))
            _wrap(stream, "run", self._noting_graphs(number, stream))

    def _promising(self, layer: int) -> Callable[..., Any]:
        """Around `TensorPool.job`."""

        def job(original: Callable[[int, int], ReadJob], expert: int, slot: int) -> ReadJob:
            made = original(expert, slot)
            begin, end = _address(made.target), _address(made.target) + len(made.target)
            with self._lock:
                for old, (old_end, _) in list(self._targets.items()):
                    if old < end and begin < old_end:
                        del self._targets[old]
                self._targets[begin] = (end, (layer, slot))
            self.ledger.promised((layer, slot), len(made.target))
            return made

        return job

    def _noting_graphs(self, layer: int, stream: ExpertStream) -> Callable[..., Any]:
        """Around `ExpertStream.run`: what its forward computations use."""

        def run(original: Callable[..., mx.array], forward: Any, *arguments: mx.array) -> mx.array:
            def noted(x: mx.array, slots: mx.array) -> mx.array:
                # While it speculates the device alone knows which ones are used; any may be.
                of = stream._slot_of if stream.speculating else np.array(slots)
                used = np.unique(of).tolist()
                result: mx.array = forward(x, slots)
                self._results[self.ledger.built((layer, slot) for slot in used)] = result
                return result

            return original(noted, *arguments)

        return run

    @contextmanager
    def over_evaluations(self, running: StreamingEngine) -> Iterator[None]:
        """While this lasts, evaluations of the engine's thread are noted."""
        thread = running.engine._thread
        originals = {name: getattr(mx, name) for name in ("eval", "async_eval")}

        def watched(name: str) -> Callable[..., Any]:
            def evaluate(*arguments: Any) -> Any:
                if threading.current_thread() is not thread:
                    return originals[name](*arguments)
                begun = self._begin(arguments)
                result = originals[name](*arguments)
                self._end(begun, waited=name == "eval")
                return result

            return evaluate

        try:
            for name in originals:
                setattr(mx, name, watched(name))
            yield
        finally:
            for name, original in originals.items():
                setattr(mx, name, original)

    def _begin(self, arguments: object) -> _Evaluation:
        arrays = tuple(_arrays(arguments))
        return _Evaluation(
            arrays=arrays,
            submitted_before=tuple(one for one in arrays if _is_submitted(one)),
            owed=self.ledger.evaluation_begins(),
        )

    def _end(self, begun: _Evaluation, *, waited: bool) -> None:
        newest = self.ledger.evaluation_took(self._just_submitted(), begun.owed)
        if not waited:
            self._submitted |= {id(one): (one, newest) for one in begun.arrays}
            return
        done = newest
        if len(begun.submitted_before) == len(begun.arrays):
            # Nothing new: what was waited for was submitted by an evaluation before this one.
            known = [self._submitted.get(id(one)) for one in begun.arrays]
            done = max((entry[1] for entry in known if entry is not None), default=0)
        self.ledger.evaluation_ends(done)
        left = {key: entry for key, entry in self._submitted.items() if entry[1] > done}
        self._submitted = left

    def _just_submitted(self) -> list[int]:
        """Graphs that an evaluation has taken along since this was asked last."""
        found = [one for one in self.ledger.not_submitted if _is_submitted(self._results[one])]
        for number in found:
            del self._results[number]
        return found


def _arrays(tree: object) -> Iterator[mx.array]:
    """All arrays in nested sequences and mappings."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _arrays(part)
    elif isinstance(tree, dict):
        yield from _arrays(list(tree.values()))


def _is_submitted(result: mx.array) -> bool:
    """Whether MLX has taken an array out of its graph, which it does on evaluation."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, result)
    return "shape=rectangle" not in drawn.getvalue()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put a function around a method of one object."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: around(original, *arguments))


def _address(target: memoryview) -> int:
    address: int = np.frombuffer(target, dtype=np.uint8).__array_interface__["data"][0]
    return address
