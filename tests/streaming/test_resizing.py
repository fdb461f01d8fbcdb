"""Slots that change between two steps: the same bits, and memory that is really given back."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.governor import Limits
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.pool import TensorPool
from headrace_replicas.engine.experts.resizing import SlotKeeper, nothing_cached
from headrace_replicas.engine.experts.schedule import SCHEDULES, Schedule, with_schedule
from headrace_replicas.engine.experts.store import TensorSource
from headrace_replicas.engine.footprint import HostPressure
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.steady_batch import SteadyBatchGenerator
from tests.streaming.architectures import by_module
from tests.streaming.comparison import loaded
from tests.streaming.model_configs import EXPERTS, VOCABULARY
from tests.streaming.subject import BATCH, CHUNK_TOKENS, PROMPT
from tests.streaming.tiny_checkpoints import Mode, mode_named, write

pytestmark = pytest.mark.engine

# Slots before each step: as few as one token needs and back, by one, and nothing new.
TOP_K: Final = 2
SLOTS: Final = (12, TOP_K, 12, 11, 12, 12, 5, TOP_K, TOP_K, 15, 3, 12)
BATCH_TOKENS: Final = 8


def nothing(_step: int) -> None:
    """Between the steps of a model that keeps all experts."""


def all_layers(streamed: StreamedModel) -> Callable[[int], None]:
    def between(step: int) -> None:
        for stream in streamed.streams:
            stream.resize(SLOTS[step % len(SLOTS)])

    return between


def layer_by_layer(streamed: StreamedModel) -> Callable[[int], None]:
    """So that a step runs with layers that differ in their slots."""

    def between(step: int) -> None:
        streamed.streams[step % len(streamed.streams)].resize(SLOTS[step % len(SLOTS)])

    return between


def one_sequence(model: Any, between: Callable[[int], None]) -> Iterator[mx.array]:
    """Logits of a prompt and of single steps after it."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([PROMPT]), cache=cache)
    yield logits
    for step in range(len(SLOTS)):
        between(step)
        likeliest = mx.argmax(logits[0, -1]) % VOCABULARY
        logits = model(likeliest[None, None], cache=cache)
        yield logits


def a_batch(model: Any, between: Callable[[int], None]) -> Iterator[mx.array]:
    """Log probabilities of sequences that decode together.

    After each step of the generator the next one has been begun: its last layer may still have to
    be computed.
    """
    generator = SteadyBatchGenerator(
        model,
        max_batch=len(BATCH),
        prefill_chunk_tokens=CHUNK_TOKENS,
        stream=mx.default_stream(mx.cpu),
    )
    running = set(generator.insert([*BATCH], max_tokens=[BATCH_TOKENS] * len(BATCH)))
    step = 0
    while running:
        for response in generator.next()[1]:
            yield response.logprobs
            running -= {response.uid} if response.finish_reason else set()
        between(step)
        step += 1


def results(
    model: Any, in_sequence: Callable[[int], None], in_batch: Callable[[int], None]
) -> list[mx.array]:
    found = [*one_sequence(model, in_sequence), *a_batch(model, in_batch)]
    mx.eval(found)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("module", "mode"),
    [
        ("mixtral", "float32"),
        ("mixtral", "bfloat16"),
        ("mixtral", "affine g32"),
        ("gpt_oss", "mixed"),
        ("nemotron_h", "mixed"),
    ],
)
def test_slots_that_change_between_steps_change_no_bit(
    tmp_path: Path, module: str, mode: str, schedule: Schedule
) -> None:
    """Dense, converted and packed experts, with biases, and beside recurrent layers."""
    architecture, saved = by_module(module), mode_named(mode)
    assert architecture.top_k == TOP_K
    write(tmp_path, architecture, saved)
    checkpoint = read_checkpoint(tmp_path)
    with loaded(checkpoint, saved, None) as resident:
        wanted = results(resident.model, nothing, nothing)
    with loaded(checkpoint, saved, SLOTS[0]) as streaming:
        assert streaming.streamed is not None
        model = with_schedule(streaming.model, streaming.streamed, schedule)
        streamed = streaming.streamed
        got = results(model, all_layers(streamed), layer_by_layer(streamed))
    assert len(got) == len(wanted) > len(SLOTS)
    assert [one.dtype for one in got] == [one.dtype for one in wanted]
    assert all(mx.array_equal(*pair).item() for pair in zip(got, wanted, strict=True))


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Checkpoint, Mode]:
    mode = mode_named("affine g32")
    write(tmp_path, by_module("mixtral"), mode)
    return read_checkpoint(tmp_path), mode


@pytest.fixture
def streaming(packed: tuple[Checkpoint, Mode]) -> Iterator[LoadedModel]:
    with loaded(*packed, 12) as model:
        yield model


def streamed_of(model: LoadedModel) -> StreamedModel:
    assert model.streamed is not None
    return model.streamed


def resize_all(streamed: StreamedModel, slots: int) -> None:
    with nothing_cached():
        for stream in streamed.streams:
            stream.resize(slots)


def test_a_resize_takes_and_gives_back_exactly_the_slots(streaming: LoadedModel) -> None:
    """And never holds more than one new pool beside what was there or what will be."""
    streamed = streamed_of(streaming)
    slot_bytes = sum(stream.slot_bytes for stream in streamed.streams)
    largest_bytes = max(pool.slot_bytes for one in streamed.streams for pool in one._pools)
    results(streaming.model, all_layers(streamed), nothing)
    gc.collect()  # mlx-lm's generators hold themselves,
    mx.synchronize()  # and have begun a step that nobody asks for
    was = 12
    resize_all(streamed, was)  # the cache lends buffers that are larger than what is asked for
    for slots in (TOP_K, EXPERTS - 1, 5, 12):
        before_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        resize_all(streamed, slots)
        after_bytes = mx.get_active_memory()
        assert after_bytes - before_bytes == (slots - was) * slot_bytes
        beside_bytes = mx.get_peak_memory() - max(before_bytes, after_bytes)
        assert beside_bytes <= min(slots, was) * largest_bytes + 4096  # and a zero to fill it with
        was = slots


def test_a_result_that_nobody_asked_for_does_not_keep_the_old_pools(
    streaming: LoadedModel,
) -> None:
    """As that of the last layer of a prompt's chunk, of which only the KV cache is asked for."""
    model: Any = streaming.model
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    mx.eval([layer.state for layer in cache])
    resize_all(streamed_of(streaming), TOP_K)
    resized_bytes = mx.get_active_memory()
    streamed_of(streaming).streams[0]._unfinished.wait()
    assert mx.get_active_memory() == resized_bytes


def test_a_layer_keeps_its_most_recent_experts_and_reads_only_the_others(
    streaming: LoadedModel,
) -> None:
    [first, *_] = streamed_of(streaming).streams
    reader, counters = streamed_of(streaming).reader, streamed_of(streaming).counters
    first._bring(list(range(12)))
    first.resize(5)
    read_bytes, misses = reader.totals.read_bytes, counters.misses
    first._bring([11, 10, 9, 8, 7])
    assert (reader.totals.read_bytes, counters.misses) == (read_bytes, misses)
    first.resize(12)
    first._bring([7, 8, 9, 10, 11, 6])
    assert counters.misses == misses + 1
    assert reader.totals.read_bytes == read_bytes + first.expert_bytes


def test_after_a_shrink_no_expert_leads_beyond_the_pool(streaming: LoadedModel) -> None:
    """While it speculates, a layer looks up absent experts too."""
    [first, *_] = streamed_of(streaming).streams
    first._bring(list(range(12)))
    first.resize(TOP_K)
    assert int(first._slot_of.max()) < TOP_K


def test_what_a_failed_read_left_behind_does_not_come_back_after_a_resize() -> None:
    """Bytes that are converted wait beside the pool, for a slot that is another's after it."""
    source = TensorSource(dtype="BF16", expert_bytes=8, places=tuple((0, 8 * n) for n in range(4)))
    pool = TensorPool(source, (4,), mx.float32, 4)
    one = bytes.fromhex("803f")  # 1.0 in bfloat16, little-endian
    for slot in (2, 3):
        pool.job(slot, slot).target[:] = one * 4
    pool.finish()
    pool.job(0, 0).target[:] = bytes.fromhex("0040") * 4  # 2.0, whose neighbour could not be read
    pool.resize(2, [2, 3])
    pool.finish()
    assert pool.array.tolist() == [[1.0] * 4] * 2


class TickingClock(SystemClock):
    """A second passes with every look at it, as if every layer took one."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        self._now_s += 1.0
        return self._now_s


def test_a_long_resize_lets_a_step_run_after_each_layer(streaming: LoadedModel) -> None:
    """And the host is not asked before it is done, nor the new number told."""
    streamed = streamed_of(streaming)
    readings: list[int] = []

    def read() -> HostPressure:
        readings.append(1)
        return HostPressure(available_bytes=-(2**40), source="a host of the test's")

    limits = Limits(
        least_slots=TOP_K,
        planned_slots=12,
        slot_bytes=1,
        planned_bytes=12,
        headroom_bytes=1000,
    )
    keeper = SlotKeeper(
        streamed=streamed, limits=limits, read=read, period_s=0.5, clock=TickingClock()
    )
    assert len(streamed.streams) == 2
    keeper.between_steps()
    assert [stream.capacity for stream in streamed.streams] == [TOP_K, 12]
    assert (keeper.due_in_s(), keeper.report.slots, keeper.report.resizes) == (0.0, 12, 0)
    keeper.between_steps()
    assert [stream.capacity for stream in streamed.streams] == [TOP_K, TOP_K]
    assert (keeper.report.slots, keeper.report.resizes) == (TOP_K, 1)
    assert len(readings) == 1
