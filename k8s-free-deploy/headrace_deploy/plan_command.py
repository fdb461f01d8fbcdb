"""`headrace plan`: what a model would take of this machine's memory, before anything is loaded."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace_deploy.command_line import JsonOption, endings
from headrace_deploy.one_machine import read_and_plan
from headrace_deploy.settings_sources import load
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.footprint import ModelSizes
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.memory_refusal import shown_bytes


def plan(
    model: Annotated[
        str, typer.Argument(help="`demo`, a folder with a checkpoint, or a Hugging Face id.")
    ],
    *,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(help="Experts in memory: auto, all, a share (25%) or a budget (8GiB)."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Prompt and answer of one request together, in tokens.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests that decode together. (default: 16)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or gpu. (default: auto)")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A YAML file of settings.")
    ] = None,
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
            },
        )
        sizes, decided = plan_here(settings)
    if as_json:
        typer.echo(json.dumps(as_plain(sizes, decided), indent=2))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(as_table(sizes, decided))
    for reason in decided.reasons:
        console.print(f"- {reason}")


def plan_here(settings: Settings) -> tuple[ModelSizes, MemoryPlan]:
    """Plan one engine on this machine, as it would plan itself.

    Raises:
        CheckpointError: The checkpoint is broken or not supported.
        MemoryPlanError: The model does not fit.
    """
    _, budget = read_and_plan(settings)
    return budget.sizes, budget.plan


def as_plain(sizes: ModelSizes, decided: MemoryPlan) -> dict[str, object]:
    """The plan as JSON holds it: every number in bytes, tokens or slots."""
    return asdict(decided) | {
        "streams": decided.streams,
        "total_bytes": decided.total_bytes,
        "expert_layers": len(sizes.layers),
        "top_k": sizes.top_k,
        "bytes_per_expert": _largest_expert(sizes),
        "file_bytes": sizes.file_bytes,
        "unused_bytes": sizes.unused_bytes,
    }


def as_table(sizes: ModelSizes, decided: MemoryPlan) -> Table:
    """The plan for a person."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(sizes, decided).items():
        table.add_row(name, value)
    return table


def _rows(sizes: ModelSizes, decided: MemoryPlan) -> Mapping[str, str]:
    rows = {"resident weights": shown_bytes(decided.resident_bytes)}
    if sizes.layers:
        rows["experts in slots"] = shown_bytes(decided.slot_bytes)
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
        rows["read per token"] = f"{missed} at most on average, if the page cache is cold"
    if sizes.unused_bytes:
        rows["never read"] = f"{shown_bytes(sizes.unused_bytes)} of {shown_bytes(sizes.file_bytes)}"
    return rows


def _largest_expert(sizes: ModelSizes) -> int:
    return max((layer.memory_bytes for layer in sizes.layers), default=0)


def _settings(file: Path | None, overrides: Mapping[str, object]) -> Settings:
    given = {name: value for name, value in overrides.items() if value is not None}
    return load(file, os.environ, given).settings
