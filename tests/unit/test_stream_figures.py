"""What follows from a sweep: the bound, where a token's time goes, and the budget to take."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.engine.footprint import CacheSize, ExpertLayerSize, ModelSizes
from headrace_replicas.engine.slots_setting import slots_wanted
from headrace_replicas.engine.stream_figures import (
    GOOD_ENOUGH,
    Limits,
    Row,
    RowSchedule,
    Timing,
    bound,
    cold_share,
    compute_rate,
    held_by,
    parts,
    recommend,
    warm_share,
)

GIB = 2**30
EXPERTS = 128


def timing(
    tokens_per_s: float,
    *,
    read_bytes: float = 0.0,
    read_s: float = 0.0,
    gate_s: float = 0.0,
    passes: float = 0.0,
) -> Timing:
    return Timing(
        tokens_per_s=tokens_per_s,
        read_bytes=read_bytes,
        read_s=read_s,
        gate_s=gate_s,
        passes=passes,
    )


def row(
    slots: int,
    warm: Timing,
    *,
    cold: Timing | None = None,
    schedule: RowSchedule = "layers",
    setting: str | None = None,
    all_hits_s: float | None = None,
    uncut_s: float | None = None,
) -> Row:
    return Row(
        setting=setting or f"{100 * slots / EXPERTS:g}%",
        slots=slots,
        experts=EXPERTS,
        schedule=schedule,
        memory_bytes=slots * 2**26,
        page_cache_bytes=(EXPERTS - slots) * 2**26,
        hit_ratio=0.9,
        least_read_bytes=0.0,
        warm=warm,
        cold=cold,
        all_hits_s=all_hits_s,
        uncut_s=uncut_s,
    )


rates = st.floats(0.1, 1000)
seconds = st.floats(0, 10)
rows = st.lists(
    st.builds(
        lambda slots, rate, cold_rate: row(
            slots, timing(rate), cold=None if cold_rate is None else timing(cold_rate)
        ),
        st.integers(8, EXPERTS),
        rates,
        st.none() | rates,
    ),
    min_size=1,
    max_size=6,
)


def test_the_bound_is_the_slower_of_reading_and_computing() -> None:
    """tok/s <= min(bytes a second / bytes a token, computing)."""
    reading = timing(1.0, read_bytes=100e6)
    assert bound(reading, 1e9, compute_tokens_per_s=50.0) == 10.0
    assert bound(reading, 1e9, compute_tokens_per_s=4.0) == 4.0
    assert bound(reading, None, compute_tokens_per_s=50.0) == 50.0
    assert bound(timing(1.0), 1e9, compute_tokens_per_s=50.0) == 50.0


def test_warm_reads_come_from_memory_and_cold_ones_from_the_disk() -> None:
    limits = Limits(compute_tokens_per_s=50.0, ssd_bytes_per_s=1e9, page_cache_bytes_per_s=4e9)
    one = row(16, timing(20.0, read_bytes=100e6), cold=timing(5.0, read_bytes=100e6))
    assert warm_share(one, limits) == pytest.approx(20 / 40)
    assert cold_share(one, limits) == pytest.approx(5 / 10)
    assert cold_share(replace(one, cold=None), limits) is None


def test_computing_is_the_fastest_token_with_nothing_to_read() -> None:
    """From whichever row: a resident one, a token run again, or one that did not stop at gates."""
    slow = row(16, timing(5.0), cold=timing(4.0), all_hits_s=0.1, uncut_s=0.05)
    assert compute_rate([slow]) == 20.0
    assert compute_rate([replace(slow, uncut_s=None)]) == 10.0
    assert compute_rate([slow, row(EXPERTS, timing(30.0), schedule="resident")]) == 30.0
    assert compute_rate([replace(slow, uncut_s=None, all_hits_s=None)]) == 5.0


@given(rates, seconds, st.none() | st.floats(0.001, 10), rates)
def test_the_parts_of_a_token_add_up_to_it(
    rate: float, read_s: float, all_hits_s: float | None, compute: float
) -> None:
    """And none of them is negative, whatever was measured at different moments."""
    run = timing(rate, read_s=read_s)
    found = parts(row(16, run, all_hits_s=all_hits_s), run, compute)
    every = (found.compute_s, found.gates_s, found.reads_s, found.rest_s)
    assert min(every) >= 0
    assert sum(every) == pytest.approx(1 / rate)


def test_a_tokens_time_is_taken_apart() -> None:
    """100 ms: 20 to compute, 15 more to stop at gates, 40 of reads, and what is left."""
    run = timing(10.0, read_s=0.04)
    found = parts(row(16, run, all_hits_s=0.035), run, compute_tokens_per_s=50.0)
    assert found.compute_s == pytest.approx(0.02)
    assert found.gates_s == pytest.approx(0.015)
    assert found.reads_s == pytest.approx(0.04)
    assert found.rest_s == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("read_s", "all_hits_s", "schedule", "holds"),
    [
        (0.06, 0.02, "layers", "reads"),
        (0.01, 0.08, "layers", "gates"),
        (0.01, 0.02, "layers", "installs"),
        (0.01, 0.02, "speculate", "passes"),
        (0.0, None, "resident", "compute"),
    ],
)
def test_the_largest_part_holds_a_row(
    read_s: float, all_hits_s: float | None, schedule: RowSchedule, holds: str
) -> None:
    """Of a token of 100 ms that takes 20 to compute."""
    one = row(16, timing(10.0, read_s=read_s), schedule=schedule, all_hits_s=all_hits_s)
    assert held_by(one, 50.0) == holds


def test_what_holds_a_row_is_told_of_the_disk_where_it_was_measured() -> None:
    """With a full page cache everything is held by computing."""
    one = row(16, timing(48.0), cold=timing(10.0, read_s=0.07), all_hits_s=0.02)
    assert held_by(one, 50.0) == "reads"
    assert held_by(replace(one, cold=None), 50.0) == "compute"


@given(rows)
def test_the_recommended_row_is_the_smallest_that_is_good_enough(measured: list[Row]) -> None:
    best = max(one.warm.tokens_per_s for one in measured)
    chosen = recommend(measured)
    assert chosen is not None
    assert chosen.row in measured
    assert chosen.row.warm.tokens_per_s >= GOOD_ENOUGH * best
    fewer = [one for one in measured if one.slots < chosen.row.slots]
    assert all(one.warm.tokens_per_s < GOOD_ENOUGH * best for one in fewer)


def test_a_smaller_budget_that_is_nearly_as_fast_is_recommended() -> None:
    """With what it leaves to the page cache."""
    found = recommend([row(16, timing(9.0)), row(32, timing(19.2)), row(64, timing(20.0))])
    assert found is not None
    assert found.slots == "25%"
    assert found.reason == (
        "96% of the best rate measured (slots 50%); leaves 6.00 GiB to the page cache"
    )
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("a bigger cache can be slower")


def test_bigger_caches_that_were_slower_are_named() -> None:
    found = recommend([row(32, timing(20.0)), row(64, timing(15.0)), row(96, timing(19.9))])
    assert found is not None
    assert found.slots == "25%"
    assert found.reason.startswith("the best rate measured; leaves ")
    assert found.warnings[0] == "slots 50% took more memory and were slower"


def test_a_budget_that_needs_the_page_cache_is_warned_of() -> None:
    """A resident model needs none, so its rate is its cold one too."""
    found = recommend(
        [
            row(32, timing(20.0), cold=timing(5.0)),
            row(EXPERTS, timing(20.0), schedule="resident", setting="all"),
        ]
    )
    assert found is not None
    assert found.slots == "25%"
    assert "with an empty page cache it reaches 25% of the best" in found.warnings[0]


def test_of_two_schedules_with_the_same_slots_the_faster_is_recommended() -> None:
    found = recommend([row(32, timing(19.5)), row(32, timing(20.0), schedule="speculate")])
    assert found is not None
    assert found.row.schedule == "speculate"


def test_what_is_recommended_means_the_same_slots_on_another_day() -> None:
    """`auto` would not, so it becomes a share."""
    sizes = ModelSizes(
        file_bytes=GIB,
        unused_bytes=0,
        resident_bytes=GIB,
        lookup_bytes=0,
        layers=(ExpertLayerSize(path="0", experts=EXPERTS, read_bytes=1, memory_bytes=2**20),),
        top_k=8,
        cache=CacheSize(token_bytes=1),
    )
    for slots, setting, wanted in (
        (61, "auto", "47.7%"),
        (128, "auto", "all"),
        (64, "64MiB", "64MiB"),
    ):
        found = recommend([row(slots, timing(1.0), setting=setting)])
        assert found is not None
        assert found.slots == wanted
        assert slots_wanted(found.slots, sizes) == slots


def test_nothing_measured_is_nothing_recommended() -> None:
    assert recommend([]) is None
