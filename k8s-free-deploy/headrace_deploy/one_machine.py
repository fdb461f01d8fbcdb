"""`headrace serve`: one machine serves a model until it is told to stop."""

import ipaddress
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.panel import Panel

from headrace_deploy.folders import prepare_state_folder
from headrace_deploy.local import LocalNode
from headrace_deploy.ports import with_real_ports
from headrace_deploy.progress import Report, Steps
from headrace_deploy.serve_config import render
from headrace_deploy.settings_sources import KEY_VARIABLE
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.memory_refusal import shown_bytes

if TYPE_CHECKING:  # for its imports, see `read_and_plan`
    from headrace_replicas.engine.budget import Budget
    from headrace_replicas.engine.checkpoint import Checkpoint

# 400 GB from a disk that gives 0.3 GB/s.
_READY_S: Final = 1_400.0


def serve(
    settings: Settings,
    console: Console,
    errors: Console,
    clock: Clock,
    environ: Mapping[str, str],
) -> None:
    """Check the checkpoint, start a node, deploy, and stay until interrupted.

    Args:
        settings: What to serve and how.
        console: Where to tell how it goes.
        errors: Where to warn.
        clock: Where the seconds come from.
        environ: The environment that the node starts from.

    Raises:
        SettingsError: The settings ask for several engines on one GPU.
        CheckpointError: The checkpoint is broken or not supported.
        MemoryPlanError: The model does not fit into memory.
        LaunchError: The state folder cannot be used, something did not come up, or the head ended
            by itself.
    """
    metal = engines_on_this_machine(settings, has_gpu=uses_gpu(settings.engine.device))
    warning = exposure_warning(settings)
    if warning:
        errors.print(Panel(warning, title="open to everybody", style="bold red"))
    prepare_state_folder(settings.state_dir)
    settings = with_real_ports(with_absolute_paths(settings))
    steps = Steps(console, clock)
    with steps.step("the checkpoint is whole and fits into memory") as report:
        _check_checkpoint(settings, report)
    kept = {name: value for name, value in environ.items() if name != KEY_VARIABLE}
    with LocalNode(settings, metal=metal, environ=kept, clock=clock) as node:
        with steps.step("Ray's head starts") as report:
            node.start(report)
        with steps.step("Ray Serve takes the config") as report:
            node.deploy(render(settings), report)
        with steps.step("the model loads and proves that it generates") as report:
            node.wait_ready(report, _READY_S)
        _tell_where(console, node)
        try:
            node.wait()
        except KeyboardInterrupt:
            console.print()
        with steps.step("everything is stopped"):
            node.stop()


def engines_on_this_machine(settings: Settings, *, has_gpu: bool) -> int:
    """How many engines the node may hold.

    Args:
        settings: What to serve.
        has_gpu: Whether engines compute on this machine's GPU.

    Raises:
        SettingsError: Several engines would share the GPU.
    """
    count = settings.replica.count
    if has_gpu and count > 1:
        raise SettingsError(
            f"replica.count = {count} on one machine: a GPU takes one engine, because a second "
            "process on it can bring down both. Use --replicas 1, or --device cpu to try several",
            "replica.count",
        )
    return count


def exposure_warning(settings: Settings) -> str:
    """What to say when strangers may use the fleet; empty when they may not."""
    host = settings.gateway.host
    if settings.gateway.api_keys or _is_loopback(host):
        return ""
    return (
        f"The gateway listens on {host}, beyond this machine, and takes requests without a key. "
        f"Whoever reaches it can use the model. Set {KEY_VARIABLE} "
        "(or gateway.api_keys), or stay on 127.0.0.1."
    )


def with_absolute_paths(settings: Settings) -> Settings:
    """Local folders by their full path: replicas have another working directory."""
    model, engine, ray = settings.model, settings.engine, settings.ray
    model = model.model_copy(update={"path": _absolute(model.path)})
    if engine.draft_model is not None:
        engine = engine.model_copy(update={"draft_model": _absolute(engine.draft_model)})
    if ray.temp_dir is not None:
        ray = ray.model_copy(update={"temp_dir": ray.temp_dir.expanduser().absolute()})
    return settings.model_copy(update={"model": model, "engine": engine, "ray": ray})


def _absolute(path: str) -> str:
    """A model's folder by its full path; other names of models as they are."""
    folder = Path(path).expanduser()
    return str(folder.absolute()) if path != "demo" and folder.is_dir() else path


def read_and_plan(settings: Settings) -> "tuple[Checkpoint, Budget]":
    """Check a checkpoint, and plan one engine for it on this machine, as it would plan itself.

    Raises:
        CheckpointError: The checkpoint is broken or not supported.
        MemoryPlanError: The model does not fit.
    """
    # The checks bring transformers, which takes seconds; other commands do without.
    from headrace_replicas.engine.budget import draw_up  # noqa: PLC0415 - see above
    from headrace_replicas.engine.checkpoint import (  # noqa: PLC0415 - see above
        read_checkpoint,
        resolve,
    )
    from headrace_replicas.engine.draft_checkpoint import read_draft  # noqa: PLC0415 - see above

    checkpoint = read_checkpoint(resolve(settings.model.path, settings.model.revision))
    draft_model = settings.engine.draft_model
    budget = draw_up(
        checkpoint,
        settings.engine,
        context_tokens=settings.model.context_tokens,
        on_gpu=uses_gpu(settings.engine.device),
        draft=read_draft(draft_model, checkpoint) if draft_model else None,
    )
    return checkpoint, budget


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def uses_gpu(device: str) -> bool:
    """Whether engines will compute on a GPU.

    Answered without MLX: on a Mac already asking it opens the GPU in this process.
    """
    if device != "auto":
        return device == "gpu"
    return sys.platform == "darwin" or _is_installed("mlx-cuda-13")


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _check_checkpoint(settings: Settings, report: Report) -> None:
    """Refuse a checkpoint that is broken or does not fit, before anything starts."""
    report(settings.model.path)
    checkpoint, budget = read_and_plan(settings)
    report(f"{checkpoint.model_type}, {checkpoint.tensor_bytes / 1e9:.2f} GB")
    for warning in checkpoint.warnings:
        report(f"warning: {warning}")
    report(in_one_line(budget.plan))


def in_one_line(plan: MemoryPlan) -> str:
    """Where the memory of an engine goes, for a person."""
    parts = [f"resident {shown_bytes(plan.resident_bytes)}"]
    if plan.experts_per_layer:
        share = f"{plan.slots_per_layer} of {plan.experts_per_layer} experts"
        parts.append(f"slots {shown_bytes(plan.slot_bytes)} ({share})")
    if plan.draft_bytes:
        parts.append(f"draft model {shown_bytes(plan.draft_bytes)}")
    parts += [f"KV cache {shown_bytes(plan.kv_bytes)}", f"limit {shown_bytes(plan.limit_bytes)}"]
    return ", ".join(parts)


def _tell_where(console: Console, node: LocalNode) -> None:
    lines = {
        "Endpoint": f"{node.endpoint}/v1",
        "API docs": f"{node.endpoint}/docs",
        "Ray dashboard": f"{node.dashboard_url} (asks for the text in {node.token_file})",
        "Incidents": "headrace incidents list",
        "Log": str(node.log_file),
    }
    console.print()
    for name, value in lines.items():
        console.print(f"{name:<14} {value}", soft_wrap=True)
    console.print("\nCtrl-C stops it.")
