"""`headrace plan`: what a model would take of this machine's memory, before anything is loaded."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace_deploy.command_line import (
    ContextOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    RevisionOption,
    SettingsFileOption,
    StateDirOption,
    endings,
)
from headrace_deploy.node_plan import host_label
from headrace_deploy.one_machine import read_and_plan, uses_gpu
from headrace_deploy.settings_sources import load
from headrace_replicas.contract.clock import Clock, SystemClock
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.bench_record import Origin, find_record
from headrace_replicas.engine.footprint import ModelSizes
from headrace_replicas.engine.memory_plan import MemoryPlan, with_measured
from headrace_replicas.engine.memory_refusal import shown_bytes


def plan(
    model: ModelArgument,
    *,
    revision: RevisionOption = None,
    slots: Annotated[
        str | None,
        typer.Option(help="Experts in memory: auto, all, a share (25%) or a budget (8GiB)."),
    ] = None,
    context: ContextOption = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests that decode together. (default: 16)")
    ] = None,
    device: DeviceOption = None,
    file: SettingsFileOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what stays in memory and what is read from the SSD, without loading anything.

    Ends with 1 when the model does not fit, and says what would.
    """
    with endings(Console(stderr=True)):
        settings = _settings(
            file,
            {
                "model.path": model,
                "model.revision": revision,
                "model.context_tokens": context,
                "engine.slots": slots,
                "engine.max_batch": max_batch,
                "engine.device": device,
                "state_dir": state_dir,
            },
        )
        here = plan_here(settings, SystemClock())
    sizes, decided, measured = here.sizes, here.plan, here.measured
    if as_json:
        typer.echo(json.dumps(as_plain(sizes, decided, measured), indent=2))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(as_table(sizes, decided, measured))
    for reason in (*decided.reasons, *here.notes):
        console.print(f"- {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `headrace bench stream` left for a plan.

    Attributes:
        host: Where it was measured.
        age_s: Seconds since then.
        hit_ratio: With the plan's slots, or None when they lie outside of what was measured.
        ssd_bytes_per_s: Experts from the disk; None when that was not measured.
        compute_tokens_per_s: The fastest that a token was computed with nothing to read.
    """

    host: str
    age_s: float
    hit_ratio: float | None
    ssd_bytes_per_s: float | None
    compute_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHere:
    """A plan for this machine.

    Attributes:
        sizes: What the model takes.
        plan: What goes where.
        measured: What it knows of this machine, if it was measured.
        notes: Where that comes from, or why it is not used, in lines for a person.
    """

    sizes: ModelSizes
    plan: MemoryPlan
    measured: Measured | None
    notes: tuple[str, ...]


def plan_here(settings: Settings, clock: Clock) -> PlanHere:
    """Plan one engine on this machine, as it would plan itself, with what was measured on it.

    Raises:
        CheckpointError: The checkpoint is broken or not supported.
        MemoryPlanError: The model does not fit.
    """
    checkpoint, budget = read_and_plan(settings)
    sizes, decided = budget.sizes, budget.plan
    origin = Origin(
        fingerprint=checkpoint.fingerprint,
        host=host_label(socket.gethostname()),
        device="gpu" if uses_gpu(settings.engine.device) else "cpu",
        dtype=settings.engine.dtype,
    )
    found = find_record(settings.state_dir, origin)
    if found.record is None:
        notes = (f"ignored: {found.ignored}",) if found.ignored else ()
        return PlanHere(sizes=sizes, plan=decided, measured=None, notes=notes)
    record = found.record
    measured = Measured(
        host=record.origin.host,
        age_s=max(0.0, clock.now_s() - record.measured_s),
        hit_ratio=record.hit_ratio(decided.slots_per_layer),
        ssd_bytes_per_s=record.ssd_bytes_per_s,
        compute_tokens_per_s=record.compute_tokens_per_s,
    )
    informed = with_measured(
        decided, sizes, bandwidths=record.bandwidths(sizes), hit_ratio=measured.hit_ratio
    )
    return PlanHere(sizes=sizes, plan=informed, measured=measured, notes=(_origin_line(measured),))


def _origin_line(measured: Measured) -> str:
    ssd = measured.ssd_bytes_per_s
    disk = "no cold reads" if ssd is None else f"experts from the SSD at {ssd / 1e9:.2f} GB/s"
    return (
        f"measured by headrace bench stream on {measured.host} {shown_age(measured.age_s)} ago: "
        f"{disk}, computing at most {measured.compute_tokens_per_s:.2f} tok/s"
    )


def shown_age(age_s: float) -> str:
    """A time that has passed, for a person: `3 days`, `5 hours`, `12 minutes`."""
    for unit, length_s in (("day", 86_400), ("hour", 3_600)):
        if age_s >= length_s:
            count = int(age_s // length_s)
            return f"{count} {unit}{'s' * (count > 1)}"
    count = int(age_s // 60)
    return f"{count} minute{'s' * (count != 1)}"


def as_plain(
    sizes: ModelSizes, decided: MemoryPlan, measured: Measured | None = None
) -> dict[str, object]:
    """The plan as JSON holds it: every number in bytes, tokens or slots."""
    return asdict(decided) | {
        "measured": None if measured is None else asdict(measured),
        "streams": decided.streams,
        "total_bytes": decided.total_bytes,
        "expert_layers": len(sizes.layers),
        "top_k": sizes.top_k,
        "bytes_per_expert": _largest_expert(sizes),
        "file_bytes": sizes.file_bytes,
        "unused_bytes": sizes.unused_bytes,
    }


def as_table(sizes: ModelSizes, decided: MemoryPlan, measured: Measured | None = None) -> Table:
    """The plan for a person."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (_rows(sizes, decided, measured) | _expected(decided, measured)).items():
        table.add_row(name, value)
    return table


def _expected(decided: MemoryPlan, measured: Measured | None) -> dict[str, str]:
    """What was measured on this machine, as far as the plan has use for it."""
    rows: dict[str, str] = {}
    if decided.streams and measured is not None and measured.hit_ratio is not None:
        rows["expected hit ratio"] = f"{measured.hit_ratio:.3f}, as measured"
    if decided.bound_tokens_per_s is not None:
        rows["one stream at most"] = f"{decided.bound_tokens_per_s:.2f} tok/s"
    return rows


def _rows(sizes: ModelSizes, decided: MemoryPlan, measured: Measured | None) -> dict[str, str]:
    rows = {"resident weights": shown_bytes(decided.resident_bytes)}
    if sizes.layers:
        rows["experts in slots"] = shown_bytes(decided.slot_bytes)
    if decided.draft_bytes:
        rows["draft model"] = shown_bytes(decided.draft_bytes)
    rows |= {
        "KV cache": f"{shown_bytes(decided.kv_bytes)} ({decided.kv_tokens} tokens)",
        "headroom": shown_bytes(decided.headroom_bytes),
        "together": shown_bytes(decided.total_bytes),
        "limit of this host": shown_bytes(decided.limit_bytes),
    }
    if decided.page_cache_bytes:
        rows["for the page cache"] = shown_bytes(decided.page_cache_bytes)
    if sizes.layers:
        rows["experts in memory"] = (
            f"{decided.slots_per_layer} of {decided.experts_per_layer} in each of "
            f"{len(sizes.layers)} layers; one token uses {sizes.top_k}"
        )
        rows["bytes per expert"] = shown_bytes(_largest_expert(sizes))
    if decided.streams and decided.expected_hit_ratio is not None:
        missed = shown_bytes(round(sizes.missed_bytes(decided.expected_hit_ratio)))
        is_guess = measured is None or measured.hit_ratio is None
        most = "at most on average" if is_guess else "on average"
        rows["read per token"] = f"{missed} {most}, if the page cache is cold"
    if sizes.unused_bytes:
        rows["never read"] = f"{shown_bytes(sizes.unused_bytes)} of {shown_bytes(sizes.file_bytes)}"
    return rows


def _largest_expert(sizes: ModelSizes) -> int:
    return max((layer.memory_bytes for layer in sizes.layers), default=0)


def _settings(file: Path | None, overrides: Mapping[str, object]) -> Settings:
    given = {name: value for name, value in overrides.items() if value is not None}
    return load(file, os.environ, given).settings
