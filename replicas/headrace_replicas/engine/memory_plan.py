"""Decides how many experts stay in memory, before anything is loaded.

Resident weights + slots for experts + KV cache + a draft model, if there is one, + headroom must
stay below what the host gives.
Whatever does not fit is refused here, with the numbers and the setting to change: later it would be
swap, or a GPU fault in the middle of a request.

Laws: a plan never exceeds the limit. More memory never gives fewer slots. Slots lie between one
token's experts and all experts. `auto` keeps all experts in memory exactly when `all` would be
accepted.
"""

from dataclasses import dataclass, replace

from headrace_replicas.engine.footprint import Demand, HostMemory, ModelSizes
from headrace_replicas.engine.memory_refusal import (
    does_not_fit,
    fitting_context,
    shown_bytes,
    too_few_slots,
)
from headrace_replicas.engine.slots_setting import AUTO, slots_wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """How fast bytes come, measured on the host.

    Attributes:
        ssd_bytes_per_s: From the SSD, cold, in reads of an expert's size and as many at a time as
            the engine has under way.
        memory_bytes_per_s: From memory to the device.
    """

    ssd_bytes_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What goes where.

    Attributes:
        slots_per_layer: Experts of a layer in memory at most; 0 in a model without experts. A
            running engine has fewer while other programs need the memory (`experts.governor`).
        experts_per_layer: Experts of the layer that has most.
        resident_bytes: Weights that are always there.
        draft_bytes: The draft model, its KV cache included; 0 without one.
        slot_bytes: All slots of all layers.
        kv_bytes: KV cache.
        kv_tokens: The tokens that it is for: requests that decode together times the longest of
            them, because a batch pads its rows to that.
        headroom_bytes: Kept free, or taken for a while by the two that follow and by whatever else
            grows on the host.
        working_bytes: What computing takes at most: Python, a chunk of a prompt on its way through
            the layers with its attention scores, logits, a layer's cache while it is copied.
        allocator_cache_bytes: Freed memory that MLX's allocator keeps.
        page_cache_bytes: Left to the page cache on top, while experts stream by `auto`.
        limit_bytes: What the host gives.
        expected_hit_ratio: Share of expert uses that find their expert in memory: as measured, or
            else what a gate gives that spreads evenly, which is the least (where half, a quarter
            and an eighth of the experts had slots, .94, .88 to .93 and .72 were measured). None in
            a model without experts.
        bound_tokens_per_s: What the bandwidths allow one stream, or None when they are not known.
        reasons: Why, in lines for a person.
    """

    slots_per_layer: int
    experts_per_layer: int
    resident_bytes: int
    draft_bytes: int
    slot_bytes: int
    kv_bytes: int
    kv_tokens: int
    headroom_bytes: int
    working_bytes: int
    allocator_cache_bytes: int
    page_cache_bytes: int
    limit_bytes: int
    expected_hit_ratio: float | None
    bound_tokens_per_s: float | None
    reasons: tuple[str, ...]

    @property
    def streams(self) -> bool:
        """Whether any layer's experts come from the SSD."""
        return self.slots_per_layer < self.experts_per_layer

    @property
    def total_bytes(self) -> int:
        """Everything that must fit below the limit."""
        weights_bytes = self.resident_bytes + self.draft_bytes + self.slot_bytes
        return weights_bytes + self.kv_bytes + self.headroom_bytes


def plan(
    sizes: ModelSizes,
    host: HostMemory,
    slots_setting: str,
    *,
    context_tokens: int,
    max_batch: int,
    allocator_cache_bytes: int = 512 * 1024 * 1024,
    prefill_chunk_tokens: int = 512,
    bandwidths: Bandwidths | None = None,
    hit_ratio: float | None = None,
    draft: ModelSizes | None = None,
) -> MemoryPlan:
    """Decide what stays in memory.

    Args:
        sizes: What the model takes.
        host: What there is.
        slots_setting: `engine.slots`: `auto`, `all`, a share (`25%`) or a budget (`8GiB`).
        context_tokens: Prompt and answer of one request, at most.
        max_batch: Requests that decode together.
        allocator_cache_bytes: Freed memory that MLX's allocator keeps.
        prefill_chunk_tokens: Of a prompt, computed at a time.
        bandwidths: For the bound on tokens a second, if known.
        hit_ratio: Measured with these slots, if it was.
        draft: What the draft model takes, if there is one.

    Raises:
        MemoryPlanError: It does not fit, or the setting leaves less than one token's experts.
        SettingsError: `slots_setting` cannot be read.
    """
    demand = Demand(
        sizes=sizes,
        host=host,
        context_tokens=context_tokens,
        max_batch=max_batch,
        allocator_cache_bytes=allocator_cache_bytes,
        prefill_chunk_tokens=prefill_chunk_tokens,
        draft=draft,
    )
    slots = _choose_slots(demand, slots_setting)
    leaves_page_cache = slots_setting == AUTO and slots < sizes.experts
    expected = _expected_hit_ratio(sizes, slots, hit_ratio)
    return MemoryPlan(
        slots_per_layer=slots,
        experts_per_layer=sizes.experts,
        resident_bytes=sizes.resident_bytes,
        draft_bytes=demand.draft_bytes,
        slot_bytes=sizes.slot_bytes(slots),
        kv_bytes=demand.kv_bytes,
        kv_tokens=demand.kv_tokens,
        headroom_bytes=demand.headroom_bytes,
        working_bytes=demand.working_bytes,
        allocator_cache_bytes=allocator_cache_bytes,
        page_cache_bytes=demand.page_cache_bytes if leaves_page_cache else 0,
        limit_bytes=host.limit_bytes,
        expected_hit_ratio=expected,
        bound_tokens_per_s=_bound(sizes, expected, bandwidths),
        reasons=_reasons(demand, slots, slots_setting),
    )


def with_measured(
    decided: MemoryPlan,
    sizes: ModelSizes,
    *,
    bandwidths: Bandwidths | None,
    hit_ratio: float | None,
) -> MemoryPlan:
    """The same plan with what was measured on its host.

    Args:
        decided: A plan.
        sizes: What the model takes.
        bandwidths: For the bound on tokens a second, if known.
        hit_ratio: Measured with the plan's slots, if it was.
    """
    expected = _expected_hit_ratio(sizes, decided.slots_per_layer, hit_ratio)
    bound = _bound(sizes, expected, bandwidths)
    return replace(decided, expected_hit_ratio=expected, bound_tokens_per_s=bound)


def _choose_slots(demand: Demand, setting: str) -> int:
    wanted = slots_wanted(setting, demand.sizes)
    if wanted is None:
        return _most_slots(demand)
    if wanted < demand.least_slots:
        raise too_few_slots(demand, setting, wanted)
    if demand.sizes.slot_bytes(wanted) > demand.room_bytes:
        raise does_not_fit(demand, setting, wanted)
    return wanted


def _most_slots(demand: Demand) -> int:
    """All experts if they fit; else what fits beside a page cache, but at least one token's."""
    sizes, room_bytes = demand.sizes, demand.room_bytes
    if sizes.slot_bytes(sizes.experts) <= room_bytes:
        return sizes.experts
    if sizes.slot_bytes(demand.least_slots) > room_bytes:
        raise does_not_fit(demand, AUTO, demand.least_slots)
    beside_page_cache = sizes.slots_within(room_bytes - demand.page_cache_bytes)
    return max(beside_page_cache, demand.least_slots)


def _expected_hit_ratio(sizes: ModelSizes, slots: int, measured: float | None) -> float | None:
    if not sizes.experts:
        return None
    if slots >= sizes.experts:
        return 1.0
    if measured is not None:
        return measured
    uses = sum(min(sizes.top_k, layer.experts) for layer in sizes.layers)
    hits = sum(
        min(sizes.top_k, layer.experts) * min(slots / layer.experts, 1.0) for layer in sizes.layers
    )
    return hits / uses


def _bound(
    sizes: ModelSizes, hit_ratio: float | None, bandwidths: Bandwidths | None
) -> float | None:
    """Tokens a second of one stream when reads and computing overlap perfectly."""
    if bandwidths is None:
        return None
    from_memory = bandwidths.memory_bytes_per_s / sizes.active_bytes
    missed_bytes = sizes.missed_bytes(1.0 if hit_ratio is None else hit_ratio)
    if missed_bytes == 0:
        return from_memory
    return min(from_memory, bandwidths.ssd_bytes_per_s / missed_bytes)


def _reasons(demand: Demand, slots: int, setting: str) -> tuple[str, ...]:
    kv_cache = (
        f"KV cache for {demand.kv_tokens} tokens: one request of {demand.context_tokens} "
        f"(model.context_tokens), or {demand.max_batch} of {demand.usual_tokens} (engine.max_batch)"
    )
    computing = (
        f"of the headroom computing takes {shown_bytes(demand.working_bytes)} at most, with "
        f"{demand.prefill_chunk_tokens} tokens of a prompt at a time (engine.prefill_chunk_tokens)"
    )
    limit = f"the limit is {shown_bytes(demand.host.limit_bytes)}: {demand.host.source}"
    return (
        _why_slots(demand, slots, setting),
        *_fewer(demand, slots),
        kv_cache,
        computing,
        limit,
    )


def _fewer(demand: Demand, slots: int) -> tuple[str, ...]:
    """What becomes of the slots later, where any experts stream."""
    if slots == demand.sizes.experts:
        return ()
    return (f"fewer while other programs need the memory, but {demand.least_slots} at least",)


def _why_slots(demand: Demand, slots: int, setting: str) -> str:
    sizes = demand.sizes
    if not sizes.experts:
        return "the model has no experts to stream: everything is resident"
    if slots == sizes.experts:
        return f"all {slots} experts of {len(sizes.layers)} layers stay in memory"
    chosen = f"{slots} of {sizes.experts} experts of each layer stay in memory"
    if setting != AUTO:
        return f"{chosen}: engine.slots = {setting}"
    lacking = shown_bytes(sizes.slot_bytes(sizes.experts) - demand.room_bytes)
    context_tokens = fitting_context(demand, sizes.experts)
    advice = f"; with model.context_tokens = {context_tokens} all would fit"
    return f"{chosen}: all would need {lacking} more{advice if context_tokens else ''}"
