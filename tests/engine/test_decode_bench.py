"""What benches measure with: counts and tokens that hold, on the demo model; never a speed."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.decode_bench import (
    Decode,
    Work,
    all_hits_s,
    decode,
    prefill,
    work_so_far,
)
from headrace_replicas.engine.experts.choice_trace import ChoiceTrace, tracing
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.least_reads import least_misses
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.read_rates import AT_ONCE, measure_reads
from headrace_replicas.engine.experts.schedule import SCHEDULES, Schedule, with_schedule
from headrace_replicas.engine.loading import LoadedModel, Streaming, load

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
CLOCK = SystemClock()
LAYERS, EXPERTS, TOP_K = 8, 32, 4  # of the demo model
TOKENS = 12


def streamed(checkpoint: Checkpoint, slots: int) -> LoadedModel:
    streaming = Streaming(slots=slots, workers=4, clock=CLOCK, on_progress=lambda: None)
    return load(checkpoint, device="cpu", dtype="auto", streaming=streaming)


def streams_of(loaded: LoadedModel) -> StreamedModel:
    assert loaded.streamed is not None
    return loaded.streamed


@pytest.fixture(scope="module")
def resident(checkpoint: Checkpoint) -> LoadedModel:
    return load(checkpoint, device="cpu", dtype="auto")


@pytest.fixture(scope="module")
def eight_slots(checkpoint: Checkpoint) -> Iterator[LoadedModel]:
    loaded = streamed(checkpoint, 8)
    yield loaded
    streams_of(loaded).reader.close()


def answer(
    loaded: LoadedModel, prompt: tuple[int, ...], schedule: Schedule = "layers", **options: Any
) -> tuple[Decode, ChoiceTrace]:
    """A greedy answer, and which experts it used."""
    model: Any = loaded.model
    if loaded.streamed is not None:
        model = with_schedule(loaded.model, loaded.streamed, schedule)
    cache = prefill(loaded, prompt, chunk_tokens=16)
    with tracing(loaded.model) as trace:
        found = decode(
            model,
            loaded,
            cache=cache,
            first=prompt[-1],
            count=TOKENS,
            clock=CLOCK,
            after_each=trace.end_token,
            **options,
        )
    return found, trace


def greedy(loaded: LoadedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The same answer without a cache: each token from the whole text before it."""
    model: Any = loaded.model
    ids = list(prompt)
    for _ in range(TOKENS):
        ids.append(int(np.array(mx.argmax(model(mx.array([ids]))[0, -1]))))
    return tuple(ids[len(prompt) :])


def test_a_resident_model_decodes_what_it_would_say_and_reads_nothing(
    resident: LoadedModel, chat: Chat
) -> None:
    prompt = chat("Tell me a story about a fox named Vera.")
    found, _trace = answer(resident, prompt)
    assert found.chosen == greedy(resident, prompt)
    assert found.work == Work()
    assert (found.hit_ratio, found.read_bytes, found.passes) == (1.0, 0.0, 0.0)
    assert found.spent_s > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_streamed_model_decodes_and_uses_the_same(
    resident: LoadedModel, eight_slots: LoadedModel, chat: Chat, schedule: Schedule
) -> None:
    """Tokens and experts; and what it counts agrees with what was used."""
    prompt = chat("Tell me a story about a fox named Vera.")
    wanted, used = answer(resident, prompt)
    found, traced = answer(eight_slots, prompt, schedule)
    assert found.chosen == wanted.chosen
    assert traced.uses == used.uses
    assert [len(uses) for uses in traced.uses] == [TOKENS] * LAYERS
    assert {len(use) for uses in traced.uses for use in uses} == {TOP_K}
    streams = streams_of(eight_slots).streams
    read = found.work.misses + found.work.wasted
    assert found.work.read_bytes == read * streams[0].expert_bytes
    assert 0 < sum(least_misses(uses, 8) for uses in traced.uses) <= read
    assert found.work.hits + found.work.misses == TOKENS * LAYERS * TOP_K
    if schedule != "speculate":
        assert found.work.gate_s > 0
    else:
        assert found.passes > 1


def test_tracing_leaves_the_model_as_it_was(resident: LoadedModel) -> None:
    """Even when what is traced fails."""
    model: Any = resident.model

    def kinds() -> list[type[Any]]:
        return [type(layer.mlp.switch_mlp) for layer in model.layers]

    def fail() -> None:
        with tracing(model):
            assert all(kind.__name__.startswith("Traced") for kind in kinds())
            raise RuntimeError("stop")

    before = kinds()
    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert kinds() == before


def test_what_is_fed_may_be_given(resident: LoadedModel, chat: Chat) -> None:
    """Then the answers do not matter."""
    prompt = chat("Count from 1 to 20.")
    fed: list[int] = []

    def follow(step: int, best: int) -> int:
        fed.append(best)
        return 5 + step

    found, _trace = answer(resident, prompt, follow=follow)
    assert tuple(fed) == found.chosen
    assert found.chosen != answer(resident, prompt)[0].chosen


def test_tokens_that_end_an_answer_can_be_kept_out(
    resident: LoadedModel, checkpoint: Checkpoint, chat: Chat
) -> None:
    """And ids that are no tokens of the model do no harm."""
    prompt = chat("What is 9 + 9?")
    freely, _trace = answer(resident, prompt)
    assert checkpoint.eos_ids & set(freely.chosen)
    kept, _trace = answer(resident, prompt, never={*checkpoint.eos_ids, 10**6})
    assert not checkpoint.eos_ids & set(kept.chosen)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_token_can_be_run_again_with_nothing_to_read(
    eight_slots: LoadedModel, chat: Chat, schedule: Schedule
) -> None:
    """And the answer goes on as if nothing had been."""
    prompt = chat("Tell me a story about a fox named Vera.")
    wanted, _trace = answer(eight_slots, prompt)
    model = with_schedule(eight_slots.model, streams_of(eight_slots), schedule)
    cache = prefill(eight_slots, prompt, chunk_tokens=16)
    took_s = all_hits_s(model, eight_slots, cache=cache, token=prompt[-1], clock=CLOCK)
    assert took_s is not None
    assert took_s > 0
    found = decode(model, eight_slots, cache=cache, first=prompt[-1], count=TOKENS, clock=CLOCK)
    assert found.chosen == wanted.chosen


def test_too_few_slots_for_a_token_leave_nothing_without_reads(
    checkpoint: Checkpoint, chat: Chat
) -> None:
    loaded = streamed(checkpoint, TOP_K - 1)
    prompt = chat("What is 9 + 9?")
    with closing(streams_of(loaded).reader):
        cache = prefill(loaded, prompt, chunk_tokens=16)
        repeated = all_hits_s(loaded.model, loaded, cache=cache, token=prompt[-1], clock=CLOCK)
    assert repeated is None


def test_measuring_reads_leaves_the_slots_alone(eight_slots: LoadedModel, chat: Chat) -> None:
    """Every depth reads every expert of this small model once, as the engine would."""
    prompt = chat("Tell me a story about a fox named Vera.")
    wanted, _trace = answer(eight_slots, prompt)
    model = streams_of(eight_slots)
    before = work_so_far(eight_slots)
    with PageCache(model.reader.files) as pages:
        rates = measure_reads(model, workers=4, clock=CLOCK, pages=pages)
    assert work_so_far(eight_slots) == before
    assert tuple(rate.at_once for rate in rates.cold) == AT_ONCE
    all_bytes = LAYERS * EXPERTS * model.streams[0].expert_bytes
    assert {rate.read_bytes for rate in (*rates.cold, rates.warm)} == {all_bytes}
    assert rates.ssd in rates.cold
    # Shards keep an expert's nine tensors apart; nothing that lies apart is read as one.
    assert rates.cold[0].runs == 9 * LAYERS * EXPERTS
    assert all(rate.bytes_per_s > 0 for rate in (*rates.cold, rates.warm))
    assert answer(eight_slots, prompt)[0].chosen == wanted.chosen


def test_without_a_page_cache_there_are_no_cold_reads(eight_slots: LoadedModel) -> None:
    rates = measure_reads(streams_of(eight_slots), workers=4, clock=CLOCK, pages=None)
    assert (rates.cold, rates.ssd, rates.cached_ratio, rates.is_cold) == ((), None, None, False)
