"""Drafts below the engine: whoever joins or leaves at whatever moment, caches stand where they say.

On tiny random models, in one thread, so that every moment can be tried.
"""

import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, CacheList, KVCache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_replicas.engine.drafts.batch import DraftCounters, DraftedBatch, DraftLimits
from headrace_replicas.engine.drafts.policy import Pace
from headrace_replicas.engine.drafts.proposer import Proposer
from headrace_replicas.engine.drafts.rewind import (
    count_again,
    has_room,
    is_unchanged,
    mark,
    take_back,
)
from headrace_replicas.engine.drafts.setup import computes_the_same_bits
from headrace_replicas.engine.sampling import Sampler, logits_processors
from headrace_replicas.engine.steady_batch import SteadyBatchGenerator
from tests.streaming.architectures import by_module
from tests.streaming.model_configs import VOCABULARY, Architecture
from tests.streaming.tiny_checkpoints import build

pytestmark = pytest.mark.engine

FOREVER = Pace(phase="drafting", left_tokens=10**9)


@cache
def model_of(module: str, window: int = 0, noise: float = 0.0) -> Any:
    """A tiny random model; with noise it is another one that often agrees with it."""
    architecture = by_module(module)
    if window:
        architecture = _with_window(architecture, window)
    model: Any = build(architecture)

    def disturb(path: str, array: mx.array) -> mx.array:
        wrong = mx.random.normal(array.shape, key=mx.random.key(len(path)))
        return array * (1 + noise * wrong)

    if noise:
        model.update(tree_map_with_path(disturb, model.parameters()))
    mx.eval(model.parameters())
    return model


def _with_window(architecture: Architecture, window: int) -> Architecture:
    return replace(architecture, config=architecture.config | {"sliding_window": window})


class Bench:
    """A generator, with or without drafts, and what it has given out."""

    def __init__(self, target: Any, draft: Any = None, *, same_bits: bool = True) -> None:
        self.generator = SteadyBatchGenerator(
            target, max_batch=3, prefill_chunk_tokens=7, stream=mx.default_stream(mx.cpu)
        )
        self.counters = DraftCounters()
        self.given: dict[str, list[tuple[int, bytes]]] = {}
        self.names: dict[int, str] = {}
        if draft is not None:
            self.generator.decode_in(self._drafted(target, draft, same_bits=same_bits))

    def _drafted(self, target: Any, draft: Any, *, same_bits: bool) -> DraftedBatch:
        return DraftedBatch(
            target,
            fallback_sampler=lambda logits: mx.argmax(logits, axis=-1),
            proposer=Proposer(draft, vocabulary=VOCABULARY, target_vocabulary=VOCABULARY),
            limits=DraftLimits(
                tokens=2, context_tokens=500, prefill_tokens=16, same_bits=same_bits
            ),
            counters=self.counters,
            clock=SystemClock(),
            pace=FOREVER,
        )

    def insert(self, request: GenerateRequest) -> None:
        [uid] = self.generator.insert(
            [[*request.prompt_ids]],
            max_tokens=[request.max_tokens],
            samplers=[Sampler(request)],
            logits_processors=[logits_processors(request, VOCABULARY)],
        )
        self.names[uid] = request.request_id
        self.given[request.request_id] = []

    def remove(self, name: str) -> None:
        [uid] = [uid for uid, other in self.names.items() if other == name]
        self.generator.remove([uid])
        del self.names[uid]

    def step(self) -> None:
        _, responses = self.generator.next()
        for response in responses:
            row = bytes(memoryview(response.logprobs))
            self.given[self.names[response.uid]].append((response.token, row))
            if response.finish_reason is not None:
                del self.names[response.uid]
        self.check_rest()

    def check_rest(self) -> None:
        """Between two steps caches hold exactly the tokens that the generator believes in."""
        batch = self.generator._generation_batch
        for entry in batch.prompt_cache:
            assert entry.offset.tolist() == [len(tokens) for tokens in batch.tokens]

    def finish(self) -> None:
        while self.names:
            self.step()


def request_named(name: str, **changes: Any) -> GenerateRequest:
    request = GenerateRequest(
        request_id=name,
        attempt=1,
        prompt_ids=(3, 14, 15, 92, 65, 35),
        sampling=SamplingParams(temperature=0.7),
        seed=len(name),
        max_tokens=24,
        stop_ids=frozenset(),
        model="tiny",
        fingerprint="",
    )
    return replace(request, **changes)


REQUESTS = (
    request_named("short", prompt_ids=(5,), max_tokens=9),
    request_named("greedy", sampling=SamplingParams(temperature=0.0), max_tokens=40),
    request_named(
        "penalised", sampling=SamplingParams(temperature=0.9, presence_penalty=0.7), seed=5
    ),
    # Begins as another one does: the draft model's cache is used again.
    request_named("longer", prompt_ids=(*range(3, 33), 3, 14), max_tokens=30),
    request_named("long", prompt_ids=tuple(range(3, 33)), max_tokens=60),
)


@cache
def alone(request: GenerateRequest) -> list[tuple[int, bytes]]:
    """What a request gets without drafts and neighbours."""
    bench = Bench(model_of("qwen3_moe"))
    bench.insert(request)
    bench.finish()
    return bench.given[request.request_id]


moves = st.one_of(
    st.tuples(st.just("insert"), st.integers(0, len(REQUESTS) - 1)),
    st.tuples(st.just("remove"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(1, 9)),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(moves, min_size=2, max_size=14), st.sampled_from([0.0, 0.3]))
def test_whoever_joins_and_leaves_every_answer_is_that_of_a_request_alone(
    moved: list[tuple[str, int]], noise: float
) -> None:
    """Tokens and log probabilities, bit for bit, and caches at rest after each step."""
    bench = Bench(model_of("qwen3_moe"), model_of("qwen3_moe", noise=noise))
    for move, number in moved:
        if move == "step":
            for _ in range(number):
                bench.step()
        elif move == "insert" and REQUESTS[number].request_id not in bench.given:
            bench.insert(REQUESTS[number])
        elif move == "remove" and number < len(bench.names):
            bench.remove([*bench.names.values()][number])
            bench.check_rest()
    bench.finish()
    for request in REQUESTS:
        given = bench.given.get(request.request_id, [])
        assert given == alone(request)[: len(given)]


def test_a_joining_request_makes_kept_drafts_worthless_and_nothing_wrong() -> None:
    """At every place inside a pass of two drafts."""
    for before in range(10, 16):
        bench = Bench(model_of("qwen3_moe"), model_of("qwen3_moe"))
        bench.insert(REQUESTS[4])
        for _ in range(before):
            bench.step()
        bench.insert(REQUESTS[0])
        bench.finish()
        assert bench.counters.accepted > 0
        assert bench.given == {"long": alone(REQUESTS[4]), "short": alone(REQUESTS[0])}


def test_what_was_kept_for_one_request_is_not_used_for_the_next() -> None:
    """The second is what the first would be after a move: the very token that was guessed comes.

    It joins after a step of the first one, which leaves before the next step.
    """
    first = REQUESTS[4]
    said = tuple(token for token, _ in alone(first))
    for delivered in range(8, 14):
        second = replace(first, request_id="moved", attempt=2, output_ids=said[:delivered])
        second = replace(second, prompt_ids=first.prompt_ids + second.output_ids, max_tokens=20)
        bench = Bench(model_of("qwen3_moe"), model_of("qwen3_moe"))
        bench.insert(first)
        while len(bench.given["long"]) < 8:
            bench.step()
        bench.insert(second)
        while len(bench.generator._generation_batch) < 2:
            bench.step()
        bench.remove("long")
        bench.finish()
        assert bench.given["moved"] == alone(first)[delivered : delivered + 20]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 3))
def test_guesses_do_not_depend_on_earlier_ones(rights: list[int], count: int) -> None:
    """A draft model that took wrong guesses back guesses as one that never made them."""
    draft = model_of("qwen3_moe", noise=0.3)
    following = Proposer(draft, vocabulary=VOCABULARY, target_vocabulary=VOCABULARY)
    tokens, newest = [3, 14, 15], 92

    def greedy(logits: mx.array) -> mx.array:
        return mx.argmax(logits, axis=-1)

    def guess(proposer: Proposer) -> list[int]:
        proposer.follow(1, tokens)
        guessed = proposer.propose(tokens, mx.array([[newest]]), count, greedy)
        return [int(token) for token in np.array(guessed)[0]]

    for right in rights:
        guessed = guess(following)
        fresh = Proposer(draft, vocabulary=VOCABULARY, target_vocabulary=VOCABULARY)
        assert guessed == guess(fresh)
        accepted = guessed[:right]
        tokens += [newest, *accepted]
        newest = (guessed[right] + 1) % VOCABULARY if right < count else 7


def test_an_extracted_cache_holds_what_it_would_hold_without_drafts() -> None:
    drafted, plain = (
        Bench(model_of("qwen3_moe"), model_of("qwen3_moe")),
        Bench(model_of("qwen3_moe")),
    )
    for bench in (drafted, plain):
        bench.insert(REQUESTS[1])
    for _ in range(12):
        drafted.step()
        plain.step()
        (uid,) = drafted.names
        held, wanted = (bench.generator.extract_cache([uid]) for bench in (drafted, plain))
        for entry, other in zip(held.get(uid, [[]])[0], wanted.get(uid, [[]])[0], strict=True):
            assert entry.offset == other.offset
            assert entry.empty() or mx.array_equal(entry.keys, other.keys)
            assert entry.empty() or mx.array_equal(entry.values, other.values)
    assert drafted.counters.accepted > 0


@pytest.mark.parametrize(
    ("module", "same"),
    [("qwen3_moe", True), ("mixtral", True), ("deepseek_v3", False), ("qwen3_next", False)],
)
def test_whether_a_pass_has_the_bits_of_single_steps_is_found_out(module: str, same: bool) -> None:
    """Latent attention computes single tokens by another formula; recurrent states cannot try."""
    assert computes_the_same_bits(model_of(module), 2, vocabulary=VOCABULARY) is same


@pytest.mark.parametrize(("mode", "drafts"), [("exact", False), ("fast", True)])
def test_where_the_bits_differ_exact_requests_are_not_drafted_for(mode: str, drafts: bool) -> None:
    bench = Bench(model_of("deepseek_v3"), model_of("deepseek_v3"), same_bits=False)
    bench.insert(request_named("one", resume_mode=mode))
    bench.finish()
    assert (bench.counters.passes > 0) == drafts
    assert len(bench.given["one"]) == 24


@pytest.mark.parametrize("module", ["qwen3_next", "jamba"])
def test_recurrent_models_do_without_drafts(module: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, however many requests there are."""
    caplog.set_level("INFO", "ray.serve.headrace.drafts")
    drafted = Bench(model_of(module), model_of("qwen3_moe"))
    plain = Bench(model_of(module))
    for bench in (drafted, plain):
        for name in ("one", "two!"):
            bench.insert(request_named(name))
            while bench.names:
                _, responses = bench.generator.next()
                for response in responses:
                    bench.given[name].append((response.token, b""))
                    if response.finish_reason:
                        bench.names.clear()
    assert drafted.counters.passes == 0
    assert drafted.given == plain.given
    assert [line.message for line in caplog.records].count(caplog.records[0].message) == 1
    assert "cannot be taken back" in caplog.text


@pytest.mark.parametrize("draft", ["qwen3_moe", "gpt_oss"])
def test_drafts_end_when_a_window_is_full(draft: str) -> None:
    """The model's own, or that of the draft model, which always sees the same tokens."""
    target = "gpt_oss" if draft == "qwen3_moe" else "qwen3_moe"
    models = {
        name: model_of(name, window=32 if name == "gpt_oss" else 0) for name in (target, draft)
    }
    drafted, plain = Bench(models[target], models[draft]), Bench(models[target])
    for bench in (drafted, plain):
        bench.insert(request_named("one", max_tokens=60))
        bench.finish()
    assert drafted.given == plain.given
    # 6 of the prompt and 23 more: the pass after that would reach the window's 32nd token.
    assert 5 <= drafted.counters.passes <= 24


def _written(entry: Any, tokens: range) -> Any:
    """A cache after some tokens, whose keys and values are their numbers."""
    for part in entry.caches if isinstance(entry, CacheList) else [entry]:
        rows = mx.array([float(token) for token in tokens]).reshape(1, 1, -1, 1)
        part.update_and_fetch(mx.broadcast_to(rows, (1, 1, len(tokens), 4)), rows)
    return entry


CACHES = {
    "keys and values": lambda: BatchKVCache.merge([KVCache()]),
    "window": lambda: BatchRotatingKVCache(64, [0]),
    "both": lambda: CacheList(BatchKVCache([0]), BatchRotatingKVCache(64, [0])),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("again", [0, 1, 2, 3])
def test_what_is_counted_again_is_what_was_written(kind: str, again: int) -> None:
    """Three of five tokens are taken back, some of them counted again, and others written after."""
    entry = _written(_written(CACHES[kind](), range(10)), range(10, 15))
    take_back([entry], 3)
    for _ in range(again):
        count_again([entry], 1)
    rewritten = _written(entry, range(50, 51))
    straight = _written(_written(CACHES[kind](), range(12 + again)), range(50, 51))
    for part, other in zip(_parts(rewritten), _parts(straight), strict=True):
        assert part.offset.tolist() == other.offset.tolist() == [13 + again]
        for held, wanted in zip(part.keys_and_values(), other.keys_and_values(), strict=True):
            assert mx.array_equal(held, wanted)


def _parts(entry: Any) -> list[Any]:
    return list(entry.caches) if isinstance(entry, CacheList) else [entry]


@pytest.mark.parametrize("kind", CACHES)
def test_a_mark_tells_that_somebody_changed_a_cache(kind: str) -> None:
    entry = _written(CACHES[kind](), range(10))
    take_back([entry], 2)
    marked = mark([entry])
    assert is_unchanged([entry], marked)
    entry.filter(mx.array([0]))
    assert not is_unchanged([entry], marked)
    marked = mark([entry])
    entry.extend(_written(CACHES[kind](), range(3)))
    assert not is_unchanged([entry], marked)
    entry.filter(mx.array([0]))
    assert not is_unchanged([entry], marked)
    marked = mark([entry])
    _written(entry, range(1))
    assert not is_unchanged([entry], marked)
    assert not is_unchanged([], marked)


def test_a_window_has_room_until_its_last_token() -> None:
    """A token that fills it up drives the oldest out."""
    entry = _written(BatchRotatingKVCache(64, [0]), range(60))
    assert has_room([entry], 3)
    assert not has_room([entry], 4)


@pytest.mark.parametrize("target_vocabulary", [VOCABULARY // 2, 2 * VOCABULARY])
def test_embeddings_of_other_lengths_fit_each_other(target_vocabulary: int) -> None:
    """Models of one family pad theirs differently: guesses are tokens that the target knows."""
    proposer = Proposer(
        model_of("qwen3_moe"), vocabulary=VOCABULARY, target_vocabulary=target_vocabulary
    )
    tokens = [0, target_vocabulary - 1, 3]
    proposer.follow(1, tokens)
    guessed = proposer.propose(
        tokens,
        mx.array([[target_vocabulary - 1]]),
        3,
        Sampler(request_named("one", sampling=SamplingParams(temperature=50.0))),
    )
    assert guessed.shape == (1, 3)
    assert int(np.array(guessed).max()) < min(target_vocabulary, VOCABULARY)


def test_a_batch_that_is_let_go_frees_its_caches_at_once() -> None:
    """Without waiting for Python's collector: an engine that renews its batch needs the memory."""
    bench = Bench(model_of("qwen3_moe"), model_of("qwen3_moe"))
    bench.insert(REQUESTS[1])
    for _ in range(12):
        bench.step()
    held = weakref.ref(bench.generator._generation_batch.prompt_cache[0])
    gc.disable()
    try:
        del bench
        assert held() is None
    finally:
        gc.enable()
