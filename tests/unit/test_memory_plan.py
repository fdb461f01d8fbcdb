"""What goes into memory: laws of the decision, and what a refusal says."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import MemoryPlanError, SettingsError
from headrace_replicas.engine.footprint import (
    CacheSize,
    Demand,
    ExpertLayerSize,
    HostMemory,
    ModelSizes,
    WorkingSize,
)
from headrace_replicas.engine.memory_plan import Bandwidths, MemoryPlan, plan
from headrace_replicas.engine.memory_refusal import shown_bytes
from headrace_replicas.engine.slots_setting import percentage, slots_wanted

GIB = 2**30
MIB = 2**20


def layer(experts: int, memory_bytes: int, *, read_bytes: int | None = None) -> ExpertLayerSize:
    return ExpertLayerSize(
        path="model.layers.0.mlp",
        experts=experts,
        read_bytes=read_bytes or memory_bytes,
        memory_bytes=memory_bytes,
    )


def model(
    *layers: ExpertLayerSize, resident_bytes: int = GIB, token_bytes: int = 98_304, top_k: int = 8
) -> ModelSizes:
    return ModelSizes(
        file_bytes=resident_bytes,
        unused_bytes=0,
        resident_bytes=resident_bytes,
        lookup_bytes=0,
        layers=layers,
        top_k=top_k,
        cache=CacheSize(token_bytes=token_bytes),
        working=WorkingSize(process_bytes=512 * MIB),
    )


# Qwen3-30B-A3B in 4 bits: 48 layers of 128 experts, 8 for each token.
QWEN = model(*[layer(128, 2_654_208)] * 48, resident_bytes=900_000_000)
DENSE = model(resident_bytes=4 * GIB)


def host(limit_bytes: int) -> HostMemory:
    return HostMemory(
        limit_bytes=limit_bytes,
        total_bytes=2 * limit_bytes,
        source="what the test says",
        remedy="Or buy a bigger one.",
    )


def decide(
    sizes: ModelSizes = QWEN, limit_bytes: int = 64 * GIB, slots: str = "auto", **more: Any
) -> MemoryPlan:
    arguments = {"context_tokens": 32_768, "max_batch": 16} | more
    return plan(sizes, host(limit_bytes), slots, **arguments)


def attempt(*arguments: Any, **more: Any) -> MemoryPlan | MemoryPlanError:
    try:
        return decide(*arguments, **more)
    except MemoryPlanError as error:
        return error


def accepted(*arguments: Any, **more: Any) -> MemoryPlan | None:
    made = attempt(*arguments, **more)
    return made if isinstance(made, MemoryPlan) else None


layers = st.lists(
    st.builds(layer, st.integers(1, 300), st.integers(1, 8 * MIB)), min_size=1, max_size=4
)
workings = st.builds(
    WorkingSize,
    process_bytes=st.integers(0, GIB),
    load_bytes=st.integers(0, GIB),
    token_bytes=st.integers(0, 4 * MIB),
    context_bytes=st.integers(0, 65_536),
    pair_bytes=st.integers(0, 512),
    request_bytes=st.integers(0, 8 * MIB),
)
models = st.builds(
    lambda found, resident, token, top_k, window, state, working: replace(
        model(*found, resident_bytes=resident, token_bytes=token, top_k=top_k),
        cache=CacheSize(
            token_bytes=token,
            layer_token_bytes=token // 2,
            window_token_bytes=window,
            window_tokens=1536,
            request_bytes=state,
        ),
        working=working,
    ),
    layers,
    st.integers(1, 4 * GIB),
    st.integers(0, 200_000),
    st.integers(1, 12),
    st.integers(0, 50_000),
    st.integers(0, 10 * MIB),
    workings,
)
limits = st.integers(0, 32 * GIB)
settings = st.one_of(
    st.sampled_from(["auto", "all"]),
    st.integers(1, 120).map(lambda share: f"{share}%"),
    st.integers(1, 40_000).map(lambda size: f"{size}MiB"),
)
requests = st.fixed_dictionaries(
    {
        "context_tokens": st.integers(1, 100_000),
        "max_batch": st.integers(1, 32),
        "draft": st.none() | models,
    }
)


@given(models, limits, settings, requests)
def test_a_plan_never_exceeds_the_limit(
    sizes: ModelSizes, limit_bytes: int, slots: str, request: dict[str, Any]
) -> None:
    """Resident weights, slots, KV cache and headroom together."""
    made = accepted(sizes, limit_bytes, slots, **request)
    if made is not None:
        assert made.total_bytes <= made.limit_bytes == limit_bytes
        assert made.headroom_bytes >= made.working_bytes + made.allocator_cache_bytes
        assert made.slot_bytes == sizes.slot_bytes(made.slots_per_layer)
        assert made.kv_tokens >= request["context_tokens"]
        assert (made.draft_bytes > 0) == (request["draft"] is not None)


@given(models, limits, settings, requests)
def test_slots_lie_between_one_tokens_experts_and_all(
    sizes: ModelSizes, limit_bytes: int, slots: str, request: dict[str, Any]
) -> None:
    """A token never finds fewer slots than it needs, and there are no empty ones."""
    made = accepted(sizes, limit_bytes, slots, **request)
    if made is not None:
        assert min(sizes.top_k, sizes.experts) <= made.slots_per_layer <= sizes.experts
        assert made.streams == (made.slots_per_layer < sizes.experts)


@given(models, limits, st.integers(0, GIB), settings, requests)
def test_more_memory_never_gives_fewer_slots(
    sizes: ModelSizes, limit_bytes: int, more_bytes: int, slots: str, request: dict[str, Any]
) -> None:
    """And what fitted still fits."""
    small = accepted(sizes, limit_bytes, slots, **request)
    large = accepted(sizes, limit_bytes + more_bytes, slots, **request)
    if small is not None:
        assert large is not None
        assert large.slots_per_layer >= small.slots_per_layer


@given(models, limits, requests)
def test_auto_keeps_all_experts_exactly_when_all_fit(
    sizes: ModelSizes, limit_bytes: int, request: dict[str, Any]
) -> None:
    """`auto` streams only what `all` would have been refused for."""
    wanted_all = accepted(sizes, limit_bytes, "all", **request)
    automatic = accepted(sizes, limit_bytes, "auto", **request)
    assert (wanted_all is not None) == (automatic is not None and not automatic.streams)


@given(models, requests)
def test_auto_turns_to_all_at_the_byte(sizes: ModelSizes, request: dict[str, Any]) -> None:
    """At the smallest limit that holds all experts nothing streams; a byte below something does."""
    needed = Demand(
        sizes=sizes, host=host(0), allocator_cache_bytes=512 * MIB, **request
    ).least_limit_bytes(sizes.experts)
    enough, short = (accepted(sizes, limit, **request) for limit in (needed, needed - 1))
    assert enough is not None
    assert not enough.streams
    assert short is None or short.streams


@given(models, limits, settings, requests)
def test_auto_is_refused_only_when_every_setting_is(
    sizes: ModelSizes, limit_bytes: int, slots: str, request: dict[str, Any]
) -> None:
    """Whatever somebody chooses by hand, `auto` finds something too."""
    if accepted(sizes, limit_bytes, slots, **request) is not None:
        assert accepted(sizes, limit_bytes, "auto", **request) is not None


@given(models, st.integers(0, 8 * GIB), settings, requests)
def test_the_remedy_of_a_refusal_is_one(
    sizes: ModelSizes, limit_bytes: int, slots: str, request: dict[str, Any]
) -> None:
    """Following the advice gives a plan; without a setting to change, no setting helps."""
    refused = attempt(sizes, limit_bytes, slots, **request)
    if isinstance(refused, MemoryPlan):
        return
    if "one token uses" in refused.message:  # the host does not matter
        share = re.search(r"to at least ([\d.]+%)", refused.message)
        assert share is not None
        assert (slots_wanted(share[1], sizes) or 0) >= min(sizes.top_k, sizes.experts)
    elif refused.param is None:
        request = request | {"draft": None}
        needed = Demand(
            sizes=sizes, host=host(limit_bytes), allocator_cache_bytes=512 * MIB, **request
        ).least_limit_bytes(min(sizes.top_k, sizes.experts))
        assert accepted(sizes, needed, "auto", **request) is not None
        assert accepted(sizes, needed - 1, "auto", **request) is None
    else:
        assert accepted(sizes, limit_bytes, **followed(refused, slots, request)) is not None


def followed(refused: MemoryPlanError, slots: str, request: dict[str, Any]) -> dict[str, Any]:
    """The arguments after doing what a refusal says."""
    changed: dict[str, Any] = {"slots": slots} | request
    if share := re.search(r"engine.slots to auto, or to at most ([\d.]+%)", refused.message):
        changed["slots"] = share[1]
    if "engine.slots to auto and" in refused.message:
        changed["slots"] = "auto"
    if context := re.search(r"context_tokens to at most (\d+)", refused.message):
        changed["context_tokens"] = int(context[1])
    if "engine.max_batch to 1," in refused.message:
        changed["max_batch"] = 1
    if "engine.draft_model" in refused.message:
        changed["draft"] = None
    return changed


@given(st.integers(1, 1000).flatmap(lambda all_: st.tuples(st.integers(1, all_), st.just(all_))))
def test_a_percentage_is_read_back_as_the_same_slots(slots: tuple[int, int]) -> None:
    """So that a number in a refusal can be copied into the settings."""
    wanted, experts = slots
    assert slots_wanted(percentage(wanted, experts), model(layer(experts, 1))) == wanted


@pytest.mark.parametrize(
    ("setting", "slots"),
    [
        ("all", 128),
        ("25%", 32),
        ("12.5%", 16),
        ("150%", 128),
        ("8GB", 62),
        ("8GiB", 67),
        ("100GiB", 128),
        ("2000MiB", 16),
    ],
)
def test_what_a_setting_means(setting: str, slots: int) -> None:
    """A share of the experts of each layer, or a budget for all layers together."""
    assert decide(slots=setting).slots_per_layer == slots


def test_a_setting_that_cannot_be_read_is_refused() -> None:
    """With the forms that can."""
    with pytest.raises(SettingsError, match="auto, all, a share like 25%"):
        decide(slots="half")


def test_everything_fits_into_a_big_host() -> None:
    """Nothing streams, and every use of an expert finds it."""
    made = decide()
    assert (made.slots_per_layer, made.streams, made.expected_hit_ratio) == (128, False, 1.0)
    assert made.page_cache_bytes == 0
    assert made.reasons[0] == "all 128 experts of 48 layers stay in memory"
    assert "fewer" not in " ".join(made.reasons)


def test_a_small_host_streams_and_leaves_a_share_to_the_page_cache() -> None:
    """A fifth of the limit stays free: headroom and page cache."""
    made = decide(limit_bytes=16 * GIB)
    assert made.streams
    assert made.headroom_bytes == 16 * GIB // 10
    assert made.total_bytes + made.page_cache_bytes <= 16 * GIB
    assert made.headroom_bytes + made.page_cache_bytes == 16 * GIB // 5
    one_more = QWEN.slot_bytes(made.slots_per_layer + 1) - made.slot_bytes
    assert made.total_bytes + made.page_cache_bytes + one_more > 16 * GIB


@given(models, limits, requests)
def test_a_streaming_plan_names_the_context_that_would_keep_all_experts(
    sizes: ModelSizes, limit_bytes: int, request: dict[str, Any]
) -> None:
    """Where a shorter one does, it is the longest that does."""
    made = accepted(sizes, limit_bytes, **request)
    found = (
        re.search(r"model.context_tokens = (\d+) all would fit", made.reasons[0]) if made else None
    )
    if found is not None:
        longest = int(found[1])
        for context_tokens, streams in ((longest, False), (longest + 1, True)):
            shorter = accepted(sizes, limit_bytes, **request | {"context_tokens": context_tokens})
            assert shorter is not None
            assert shorter.streams == streams


def test_a_long_context_takes_memory_from_the_experts_and_the_plan_says_so() -> None:
    """48 GB, of which a GPU may wire 36, and a context of 262144 tokens."""
    made = decide(limit_bytes=36 * GIB, context_tokens=262_144)
    assert made.reasons[0] == (
        "33 of 128 experts of each layer stay in memory: all would need 7.63 GiB more; "
        "with model.context_tokens = 178688 all would fit"
    )
    assert made.reasons[1] == "fewer while other programs need the memory, but 8 at least"
    assert not decide(limit_bytes=36 * GIB, context_tokens=178_688).streams


def test_the_page_cache_gives_way_before_a_model_is_refused() -> None:
    """One token's experts count more."""
    least = Demand(
        sizes=QWEN,
        host=host(1),
        context_tokens=32_768,
        max_batch=16,
        allocator_cache_bytes=512 * MIB,
    ).least_limit_bytes(8)
    made = decide(limit_bytes=least)
    assert made.slots_per_layer == 8
    assert made.limit_bytes - made.total_bytes < 16


def test_a_refusal_names_every_number_and_the_setting() -> None:
    """Resident weights, slots, KV cache and headroom against the limit."""
    with pytest.raises(MemoryPlanError) as caught:
        decide(limit_bytes=16 * GIB, slots="all")
    message = caught.value.message
    for words in (
        "resident weights 858.3 MiB",
        "128 of 128 experts in each of 48 layers 15.19 GiB (engine.slots = all)",
        "KV cache 3.00 GiB (32768 tokens)",
        "headroom 1.60 GiB",
        "= 20.63 GiB, and the limit is 16.00 GiB (what the test says)",
        "Set engine.slots to auto, or to at most",
    ):
        assert words in message
    assert caught.value.param == "engine.slots"
    assert (caught.value.code, caught.value.http_status) == ("does_not_fit", 500)


def test_a_context_that_is_too_long_is_refused_with_one_that_fits() -> None:
    """KV cache cannot be read from an SSD."""
    with pytest.raises(MemoryPlanError, match=r"context_tokens to at most \d+\.") as caught:
        decide(limit_bytes=16 * GIB, context_tokens=262_144)
    assert caught.value.param == "model.context_tokens"


def test_a_model_that_fits_in_no_way_is_refused_with_what_it_takes() -> None:
    """No setting helps, but a bigger host does."""
    with pytest.raises(MemoryPlanError, match=r"a host that gives .* Or buy a bigger one\.") as one:
        decide(limit_bytes=GIB)
    assert one.value.param is None


def test_less_than_one_tokens_experts_is_refused() -> None:
    """A layer could not even compute one token without bringing an expert twice."""
    with pytest.raises(MemoryPlanError, match=r"2% means 2 of 128 .* one token uses 8\.") as caught:
        decide(slots="2%")
    assert "Set engine.slots to at least 6.3% (972.0 MiB), or to auto." in caught.value.message


def test_a_dense_model_has_nothing_to_stream() -> None:
    """The setting does not matter, the limit does."""
    made = decide(DENSE, slots="25%")
    assert (made.slots_per_layer, made.slot_bytes, made.streams) == (0, 0, False)
    assert made.expected_hit_ratio is None
    with pytest.raises(MemoryPlanError, match=r"resident weights 4\.00 GiB \+ KV cache"):
        decide(DENSE, 4 * GIB)


def test_layers_of_different_size_take_what_they_have() -> None:
    """A layer with fewer experts than slots is resident."""
    sizes = model(layer(8, MIB), layer(64, MIB), top_k=2)
    made = decide(sizes, slots="50%")
    assert made.slots_per_layer == 32
    assert made.slot_bytes == (8 + 32) * MIB
    assert made.expected_hit_ratio == (1.0 + 0.5) / 2


def test_a_larger_allocator_cache_takes_more_headroom() -> None:
    """What MLX keeps is not free."""
    made = decide(allocator_cache_bytes=20 * GIB)
    assert made.headroom_bytes == 20 * GIB + made.working_bytes == 20 * GIB + 512 * MIB


def test_the_kv_cache_holds_a_whole_context_or_a_batch_of_usual_requests() -> None:
    """Whichever is more; a short context bounds both."""
    assert decide(context_tokens=40_960).kv_tokens == 40_960
    assert decide(context_tokens=4096).kv_tokens == 16 * 2048
    assert decide(context_tokens=512).kv_tokens == 16 * 512


def test_the_kv_cache_grows_by_whole_steps() -> None:
    """mlx-lm's caches take 256 tokens more at a time, each request's for itself."""
    assert decide(context_tokens=1024, max_batch=1).kv_bytes == 1024 * 98_304
    assert decide(context_tokens=1000, max_batch=1).kv_bytes == 1024 * 98_304
    three = decide(context_tokens=1000, max_batch=3)
    assert (three.kv_tokens, three.kv_bytes) == (3 * 1024, 3 * 1024 * 98_304)


def test_what_computing_takes_is_part_of_the_headroom() -> None:
    """The process, a chunk of a prompt with its scores, the logits of a batch, a copied layer."""
    working = WorkingSize(
        process_bytes=100, token_bytes=1000, context_bytes=7, pair_bytes=3, request_bytes=50
    )
    sizes = replace(
        DENSE, working=working, cache=CacheSize(token_bytes=98_304, layer_token_bytes=2048)
    )
    made = decide(sizes, context_tokens=4096, max_batch=2, prefill_chunk_tokens=256)
    step = 100 + 256 * (1000 + 4096 * 3) + 4096 * 7 + 2 * 50
    assert made.working_bytes == step + 2 * 4096 * 2048
    assert made.headroom_bytes == 64 * GIB // 10
    small = decide(sizes, 6 * GIB, context_tokens=4096, max_batch=2, allocator_cache_bytes=GIB)
    assert small.headroom_bytes == small.working_bytes + GIB > 6 * GIB // 10


def test_a_load_counts_where_it_takes_more_than_a_step() -> None:
    """A converted tensor is there twice, for a moment."""
    step = replace(DENSE, working=WorkingSize(process_bytes=100, load_bytes=MIB, token_bytes=2))
    assert decide(step, context_tokens=1024).working_bytes == 100 + MIB
    larger = replace(step, working=replace(step.working, token_bytes=MIB))
    assert decide(larger, context_tokens=1024).working_bytes == 100 + 512 * MIB


def test_a_decode_step_is_the_larger_one_where_chunks_are_small() -> None:
    """One token for each request; and no chunk is longer than the context."""
    sizes = replace(DENSE, working=WorkingSize(token_bytes=MIB))
    assert decide(sizes, prefill_chunk_tokens=4, max_batch=16).working_bytes == 16 * MIB
    assert decide(sizes, context_tokens=100, max_batch=1).working_bytes == 100 * MIB


def test_windows_and_states_count_for_each_request() -> None:
    """A window does not grow with the context, a state not at all."""
    cache = CacheSize(
        token_bytes=10, window_token_bytes=100, window_tokens=1536, request_bytes=1_000_000
    )
    long = cache.bytes_for(tokens=50_000, requests=4, context_tokens=50_000)
    assert long == 50_000 * 10 + 4 * 1536 * 100 + 4 * 1_000_000
    short = cache.bytes_for(tokens=400, requests=4, context_tokens=100)
    assert short == 400 * 10 + 4 * (100 + 256) * 100 + 4 * 1_000_000


def test_the_bound_is_the_slower_of_ssd_and_memory() -> None:
    """tok/s <= min(B_ssd / missed bytes, B_mem / active bytes)."""
    sizes = model(layer(100, 2000, read_bytes=1000), resident_bytes=4000, top_k=10)
    slow_ssd = Bandwidths(ssd_bytes_per_s=1e6, memory_bytes_per_s=1e9)
    streamed = decide(sizes, slots="75%", bandwidths=slow_ssd)
    assert streamed.expected_hit_ratio == 0.75
    assert streamed.bound_tokens_per_s == pytest.approx(1e6 / 2500)
    measured = decide(sizes, slots="75%", bandwidths=slow_ssd, hit_ratio=0.95)
    assert measured.bound_tokens_per_s == pytest.approx(1e6 / 500)
    assert decide(sizes, bandwidths=slow_ssd).bound_tokens_per_s == pytest.approx(1e9 / 24_000)
    fast_ssd = replace(slow_ssd, ssd_bytes_per_s=1e12)
    assert decide(sizes, slots="75%", bandwidths=fast_ssd).bound_tokens_per_s == pytest.approx(
        1e9 / 24_000
    )
    assert decide(sizes).bound_tokens_per_s is None


@pytest.mark.parametrize(
    ("count", "shown"), [(3 * GIB // 2, "1.50 GiB"), (MIB, "1.0 MiB"), (92_160, "90.0 KiB")]
)
def test_bytes_are_shown_in_a_fitting_unit(count: int, shown: str) -> None:
    """Binary units, because memory is sold in them."""
    assert shown_bytes(count) == shown


def test_a_draft_model_is_planned_for_with_the_cache_of_one_request() -> None:
    """All its experts stay in memory, whatever the setting of the model's own."""
    draft = model(layer(16, MIB), resident_bytes=GIB, token_bytes=1000)
    with_draft, without = decide(slots="25%", draft=draft), decide(slots="25%")
    assert with_draft.draft_bytes == GIB + 16 * MIB + 32_768 * 1000
    assert with_draft.total_bytes - without.total_bytes == with_draft.draft_bytes


def test_a_model_that_fits_without_its_draft_model_is_refused_with_that_advice() -> None:
    """The draft model is what can be done without."""
    needed = decide(DENSE).total_bytes
    with pytest.raises(MemoryPlanError, match=r"draft model 7.*engine.draft_model to null"):
        decide(DENSE, needed + GIB, draft=DENSE)
