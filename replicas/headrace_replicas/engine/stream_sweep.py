"""Measures how a model streams on this host with several numbers of slots, one load after another.

Each load's memory is given back before the next one, and every run's tokens must be the same.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import CheckpointError, MemoryPlanError, SettingsError
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.budget import draw_up
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.experts.read_rates import ReadRates
from headrace_replicas.engine.footprint import ModelSizes
from headrace_replicas.engine.loading import choose_device
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.model_sizes import measure
from headrace_replicas.engine.stream_figures import Row
from headrace_replicas.engine.stream_row import LoadFigures, OnStep, Planned, Trial, measure_load

# What may stay of a load: kernels' constants, and what rounding makes of the rest.
_KEPT_BYTES: Final = 4 * 1024 * 1024
_KEPT_RATIO: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A setting that was not measured.

    Attributes:
        setting: As it was asked for.
        reason: Why, for a person.
    """

    setting: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was measured.

    Attributes:
        device: Where it was computed.
        dtype: What it was computed in; empty when nothing was.
        rows: One for each setting and schedule, in the order asked for.
        refusals: Settings that do not fit, or mean the same as one before.
        reads: How fast experts come; None when no row streamed.
        differing: Runs whose tokens are not those of the first run.
        tokens: Tokens compared in each run.
    """

    device: Literal["cpu", "gpu"]
    dtype: str
    rows: tuple[Row, ...]
    refusals: tuple[Refusal, ...]
    reads: ReadRates | None
    differing: tuple[str, ...]
    tokens: int


def sweep(
    checkpoint: Checkpoint,
    settings: Settings,
    slots: tuple[str, ...],
    trial: Trial,
    clock: Clock,
    on_step: OnStep,
) -> Sweep:
    """Measure every setting that fits.

    Args:
        checkpoint: A checked one.
        settings: Whose engine is measured; `model.context_tokens` sizes the plans.
        slots: Values of `engine.slots`, in this order.
        trial: What every load does.
        clock: Time source.
        on_step: Told how far it is.

    Raises:
        BackendMissingError: MLX has no backend for the device.
        CheckpointError: The checkpoint has no experts to stream, or cannot be loaded.
        ExpertReadError: An expert could not be read.
        MemoryPlanError: A load's memory was not given back.
        SettingsError: Prompt and answer do not fit into the context.
    """
    device = choose_device(settings.engine.device)
    sizes = measure(checkpoint, dtype=settings.engine.dtype, on_gpu=device == "gpu")
    _require_experts(checkpoint, sizes)
    _require_context(checkpoint, settings, trial)
    mx.set_cache_limit(settings.engine.cache_limit_bytes)
    loads: list[LoadFigures] = []
    refusals: list[Refusal] = []
    measured: dict[int, str] = {}
    for setting in slots:
        plan = _plan(checkpoint, settings, setting, measured, on_gpu=device == "gpu")
        if isinstance(plan, Refusal):
            refusals.append(plan)
            continue
        measured[plan.slots_per_layer] = setting
        planned = Planned(
            checkpoint=checkpoint, settings=settings, sizes=sizes, setting=setting, plan=plan
        )
        with_reads = all(one.reads is None for one in loads)
        loads.append(_measure(planned, trial, clock, on_step, with_reads=with_reads))
    answers = [answer for one in loads for answer in one.answers]
    return Sweep(
        device=device,
        dtype=loads[0].dtype if loads else "",
        rows=tuple(row for one in loads for row in one.rows),
        refusals=tuple(refusals),
        reads=next((one.reads for one in loads if one.reads is not None), None),
        differing=tuple(run for run, answer in answers if answer != answers[0][1]),
        tokens=trial.settling_tokens + trial.tokens,
    )


def _require_experts(checkpoint: Checkpoint, sizes: ModelSizes) -> None:
    if not sizes.layers:
        raise CheckpointError(
            f"there is nothing to stream: {checkpoint.path} ({checkpoint.model_type}) has no "
            "experts that could stay on the SSD, so that all of it is resident. `headrace plan` "
            "shows what it takes."
        )


def _require_context(checkpoint: Checkpoint, settings: Settings, trial: Trial) -> None:
    own = checkpoint.context_tokens
    limit = min(own, settings.model.context_tokens or own)
    # One more is fed again and again at the end.
    answer = trial.settling_tokens + trial.tokens + 1
    if len(trial.prompt_ids) + answer > limit:
        raise SettingsError(
            f"the prompt has {len(trial.prompt_ids)} tokens and the answer takes {answer}, which "
            f"is more than the context of {limit}. Give fewer --tokens, a shorter prompt, or a "
            f"larger --context (the model has {own}).",
            "model.context_tokens",
        )


def _plan(
    checkpoint: Checkpoint,
    settings: Settings,
    setting: str,
    measured: Mapping[int, str],
    *,
    on_gpu: bool,
) -> MemoryPlan | Refusal:
    """The plan that an engine would make with a setting, or why it is not measured."""
    try:
        plan = draw_up(
            checkpoint,
            settings.engine.model_copy(update={"slots": setting}),
            context_tokens=settings.model.context_tokens,
            on_gpu=on_gpu,
        ).plan
    except MemoryPlanError as error:
        return Refusal(setting=setting, reason=str(error))
    same = measured.get(plan.slots_per_layer)
    if same is not None:
        reason = f"means {plan.slots_per_layer} slots, which were measured as {same}"
        return Refusal(setting=setting, reason=reason)
    return plan


def _measure(
    planned: Planned, trial: Trial, clock: Clock, on_step: OnStep, *, with_reads: bool
) -> LoadFigures:
    """Measure one load and see that its memory comes back.

    Raises:
        MemoryPlanError: It did not.
    """
    before_bytes = mx.get_active_memory()
    found = measure_load(planned, trial, clock, on_step, with_reads=with_reads)
    # Modules and what streams their experts refer to each other.
    gc.collect()
    mx.clear_cache()
    kept_bytes = mx.get_active_memory() - before_bytes
    if kept_bytes > _KEPT_BYTES + _KEPT_RATIO * found.rows[0].memory_bytes:
        raise MemoryPlanError(
            f"{kept_bytes} bytes of the model with slots {planned.setting} stayed in memory, so "
            "that the next setting would be measured with less. Measure one setting at a time.",
            "engine.slots",
        )
    return found
