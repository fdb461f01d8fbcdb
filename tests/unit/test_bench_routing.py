"""The replay of routing traces that the bench compares the engine with."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.routing import locality, misses
from tests.bench.topics import Topics

TOPICS = Topics(count=8, common=16, common_ratio=0.2, run_tokens=20, exponent=0.8, strength=3.0)


@given(st.integers(0, 2**32), st.sampled_from([4, 6, 12]), st.integers(0, 30))
def test_no_policy_misses_less_than_the_best_and_more_slots_never_miss_more(
    seed: int, slots: int, settling: int
) -> None:
    drawn = np.random.default_rng(seed)
    trace = np.array([[drawn.choice(12, 3, replace=False) for _ in range(2)] for _ in range(40)])
    counted = misses(trace, slots=slots, settling=settling)
    assert counted.needed == (40 - settling) * 2 * 3
    assert counted.least <= counted.engine <= counted.needed
    assert misses(trace, slots=12, settling=settling).engine == 0


def test_a_trace_that_never_changes_is_kept_whole_and_uses_few_experts() -> None:
    still = locality(np.tile(np.array([[[0, 1]]]), (20, 1, 1)), experts=8)
    assert (still.kept, still.recent) == (1.0, 1.0)
    assert still.entropy == pytest.approx(np.log(2) / np.log(8))


def test_equal_usage_has_the_whole_entropy_and_turns_keep_nothing() -> None:
    turns = locality(np.arange(64).reshape(64, 1, 1) % 16, experts=16)
    assert turns.entropy == pytest.approx(1.0)
    assert (turns.kept, turns.recent) == (0.0, 0.0)
    assert turns.by_chance == pytest.approx(1 / 16)


def test_a_text_stays_with_its_topic_and_is_the_same_for_the_same_seed() -> None:
    text = TOPICS.text(400, 4000, seed=1)
    assert text == TOPICS.text(400, 4000, seed=1)
    assert text != TOPICS.text(400, 4000, seed=2)
    assert 0 not in text
    assert max(text) < 400
    topics = [topic for topic in TOPICS.topic_of(400)[text].tolist() if topic >= 0]
    assert 0.15 < 1 - len(topics) / len(text) < 0.25
    assert set(topics) == set(range(TOPICS.count))
    changes = sum(a != b for a, b in pairwise(topics))
    assert changes < 0.1 * len(topics)


def test_both_policies_begin_with_what_the_settling_tokens_left() -> None:
    """Slots for two: 0 and 1 at first, then 2 and 3, which the counted tokens find there."""
    trace = np.array([[[2, 3]], [[2, 3]], [[0, 3]]])
    counted = misses(trace, slots=2, settling=1)
    assert (counted.needed, counted.engine, counted.least) == (4, 1, 1)
