"""`headrace bench stream`: how this host streams a model's experts."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from headrace_deploy.bench_report import Report, as_lines, as_plain
from headrace_deploy.folders import using_state_folder
from headrace_deploy.node_plan import host_label
from headrace_deploy.run_progress import RunProgress
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.settings import Settings
from headrace_replicas.device_claim import claim_device
from headrace_replicas.engine.bench_record import Origin, record_of, write_record
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint, resolve
from headrace_replicas.engine.prompt_ids import prompt_ids
from headrace_replicas.engine.stream_row import ScheduleChoice, Trial
from headrace_replicas.engine.stream_sweep import sweep

_DIFFERENT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        settings: The model, its engine and the state folder.
        slots: Values of `engine.slots` to measure.
        schedule: How missing experts are fetched.
        prompt: The text to answer.
        tokens: Tokens of each answer that are measured.
        cold: Measure with an empty page cache too.
        as_json: Print JSON.
        on_gpu: Whether the GPU is to be held meanwhile.
    """

    settings: Settings
    slots: tuple[str, ...]
    schedule: ScheduleChoice
    prompt: str
    tokens: int
    cold: bool
    as_json: bool
    on_gpu: bool


def run(request: Request, console: Console, errors: Console, clock: Clock) -> int:
    """Measure, print, and keep the figures for `headrace plan`.

    Returns:
        0, or 1 when nothing was measured or tokens differ where they must not.

    Raises:
        CheckpointError: The checkpoint is broken, or has no experts to stream.
        ExpertReadError: An expert could not be read.
        HostBusyError: An engine holds the GPU.
        LaunchError: The state folder cannot be used.
        MemoryPlanError: Memory was not given back between two loads.
        SettingsError: Prompt and answer do not fit into the context.
    """
    settings = request.settings
    load_average = os.getloadavg()[0]
    with _device(request, clock), RunProgress(errors) as progress:
        progress("checking the checkpoint", 0, 0)
        checkpoint = read_checkpoint(resolve(settings.model.path, settings.model.revision))
        trial = Trial(
            prompt_ids=prompt_ids(checkpoint, request.prompt),
            tokens=request.tokens,
            schedule=request.schedule,
            cold=request.cold,
        )
        found = sweep(checkpoint, settings, request.slots, trial, clock, progress)
    report = Report(
        checkpoint=str(checkpoint.path),
        prompt_tokens=len(trial.prompt_ids),
        sweep=found,
        names_schedule=request.schedule == "all",
        load_average=load_average,
        cores=os.cpu_count() or 1,
    )
    kept = _keep(report, checkpoint, settings, clock)
    if request.as_json:
        console.print(json.dumps(as_plain(report) | {"kept": kept and str(kept)}, indent=2))
    else:
        for line in as_lines(report):
            console.print(line)
        if kept is not None:
            console.print(f"kept for headrace plan in {kept}")
    return 0 if report.is_sound else _DIFFERENT


@contextmanager
def _device(request: Request, clock: Clock) -> Iterator[None]:
    """Hold the GPU as an engine does: a second process on it can bring down both.

    Raises:
        HostBusyError: An engine of this machine holds it.
    """
    if not request.on_gpu:
        yield
        return
    host = host_label(socket.gethostname())
    with using_state_folder(request.settings.state_dir):
        claim = claim_device(request.settings.state_dir, host, 1, 0, clock)
    try:
        yield
    finally:
        os.close(claim.lock_fd)


def _keep(report: Report, checkpoint: Checkpoint, settings: Settings, clock: Clock) -> Path | None:
    """Write what `headrace plan` can use; nothing when nothing was measured."""
    limits = report.limits
    if limits is None:
        return None
    origin = Origin(
        fingerprint=checkpoint.fingerprint,
        host=host_label(socket.gethostname()),
        device=report.sweep.device,
        dtype=settings.engine.dtype,
    )
    record = record_of(origin, clock.now_s(), report.sweep.rows, limits)
    with using_state_folder(settings.state_dir):
        return write_record(settings.state_dir, record)
