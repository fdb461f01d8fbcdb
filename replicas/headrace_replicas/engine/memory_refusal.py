"""Says why a model does not fit, and which setting to change.

Pure. Law: the number that a refusal names for a setting is one that would have been accepted.
"""

from bisect import bisect_right
from dataclasses import replace
from typing import Final

from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.engine.footprint import Demand
from headrace_replicas.engine.slots_setting import SETTING, percentage

DRAFT_SETTING: Final = "engine.draft_model"
# Below this a request is cut in the middle of an ordinary prompt.
_LEAST_CONTEXT_TOKENS: Final = 1024


def shown_bytes(count: int) -> str:
    """A number of bytes for a person: `1.25 GiB`, `37.5 MiB`, `81.0 KiB`."""
    if abs(count) >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    if abs(count) >= 2**20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB"


def too_few_slots(demand: Demand, setting: str, slots: int) -> MemoryPlanError:
    """The refusal of a setting that leaves less than one token's experts."""
    sizes, least = demand.sizes, demand.least_slots
    return MemoryPlanError(
        f"{SETTING} = {setting} means {slots} of {sizes.experts} experts in each of "
        f"{len(sizes.layers)} layers, and one token uses {least}. Set {SETTING} to at least "
        f"{percentage(least, sizes.experts)} ({shown_bytes(sizes.slot_bytes(least))}), or to auto.",
        SETTING,
    )


def does_not_fit(demand: Demand, setting: str, slots: int) -> MemoryPlanError:
    """The refusal of so many slots, with all numbers and what would fit."""
    sizes, host = demand.sizes, demand.host
    parts = [f"resident weights {shown_bytes(sizes.resident_bytes)}"]
    if sizes.experts:
        parts.append(
            f"{slots} of {sizes.experts} experts in each of {len(sizes.layers)} layers "
            f"{shown_bytes(sizes.slot_bytes(slots))} ({SETTING} = {setting})"
        )
    if demand.draft is not None:
        parts.append(f"draft model {shown_bytes(demand.draft_bytes)}")
    parts += [
        f"KV cache {shown_bytes(demand.kv_bytes)} ({demand.kv_tokens} tokens)",
        f"headroom {shown_bytes(demand.headroom_bytes)}",
    ]
    remedy, setting_name = _remedy(demand, slots)
    return MemoryPlanError(
        f"the model does not fit into memory: {' + '.join(parts)} = "
        f"{shown_bytes(demand.total_bytes(slots))}, and the limit is "
        f"{shown_bytes(host.limit_bytes)} ({host.source}). {remedy}",
        setting_name,
    )


def fitting_context(demand: Demand, slots: int) -> int:
    """The longest context that fits beside so many slots; 0 when it would be useless."""

    def lacking(context_tokens: int) -> int:
        shorter = replace(demand, context_tokens=context_tokens)
        return shorter.sizes.slot_bytes(slots) - shorter.room_bytes

    candidates = range(1, demand.context_tokens + 1)
    longest = bisect_right(candidates, 0, key=lacking)
    return longest if longest >= min(_LEAST_CONTEXT_TOKENS, demand.context_tokens) else 0


def _remedy(demand: Demand, slots: int) -> tuple[str, str | None]:
    """What to do, and the setting that it changes; None when no setting helps."""
    sizes = demand.sizes
    least = demand.least_slots
    fitting = sizes.slots_within(demand.room_bytes)
    if sizes.experts and least <= fitting < slots:
        share = percentage(fitting, sizes.experts)
        return f"Set {SETTING} to auto, or to at most {share} ({fitting} experts).", SETTING
    other = f"{SETTING} to auto and " if slots > least else ""
    if demand.draft is not None:
        return _without_draft(replace(demand, draft=None), slots, other)
    if context_tokens := fitting_context(demand, least):
        remedy = f"Set {other}model.context_tokens to at most {context_tokens}."
        return remedy, "model.context_tokens"
    if context_tokens := fitting_context(replace(demand, max_batch=1), least):
        remedy = f"Set {other}engine.max_batch to 1, model.context_tokens to at most"
        return f"{remedy} {context_tokens}.", "engine.max_batch"
    needed = shown_bytes(demand.least_limit_bytes(least))
    remedy = f"It takes a host that gives {needed}, or a checkpoint with fewer bits a weight."
    return f"{remedy} {demand.host.remedy}".strip(), None


def _without_draft(alone: Demand, slots: int, other: str) -> tuple[str, str | None]:
    """The draft model is what can be done without; if that is not enough, what else to do."""
    if alone.sizes.slot_bytes(alone.least_slots) <= alone.room_bytes:
        return f"Set {other}{DRAFT_SETTING} to null.", DRAFT_SETTING
    remedy, setting_name = _remedy(alone, slots)
    return f"Without a draft model ({DRAFT_SETTING} = null): {remedy}", setting_name
