"""One replica without its Ray shell: an engine, its canary, and what it says of itself."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import psutil

from headrace_replicas.attempts import attempt
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import (
    HeadraceError,
)
from headrace_replicas.contract.faults import FaultReport
from headrace_replicas.contract.fleet import ProbeResult, ReplicaSnapshot, ReplicaState
from headrace_replicas.contract.requests import GenerateRequest, TokenChunk
from headrace_replicas.contract.settings import EngineSettings, Settings
from headrace_replicas.device_claim import DeviceClaim
from headrace_replicas.engine.budget import Budget, draw_up
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint, resolve
from headrace_replicas.engine.draft_checkpoint import read_draft
from headrace_replicas.engine.experts.pack_index import state_folder
from headrace_replicas.engine.experts.read_health import ReadReport
from headrace_replicas.engine.experts.resizing import SlotKeeper, SlotsReport, limits_of
from headrace_replicas.engine.experts.upkeep import Upkeep
from headrace_replicas.engine.experts.warm_up import WarmUpProgress
from headrace_replicas.engine.footprint import HostPressure
from headrace_replicas.engine.loading import LoadedModel, Streaming, choose_device, load
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.memory_pressure import read_pressure
from headrace_replicas.engine.steps import Engine
from headrace_replicas.faults import (
    FaultAnswer,
    careful_chunk_tokens,
    decide,
    timeouts_within,
)
from headrace_replicas.injection.arming import arm
from headrace_replicas.origin import Origin, WindowInMemory
from headrace_replicas.proof import Prover

log = logging.getLogger("ray.serve.headrace.replica")


class Replica:
    """An engine with a name, a canary and a way out.

    Args:
        replica_id: Ray Serve's unique id of this replica.
        host: The host's label.
        claim: The device that this process holds.
        settings: Model, engine and fleet settings are used.
        clock: Time source.
        pressure: Tells how the host fares with its memory.
        origin: What the host gave it.

    Raises:
        CheckpointError: The checkpoint is broken, or its canary gave other tokens than recorded.
        BackendMissingError: MLX has no backend for the device.
        MemoryPlanError: The model does not fit into the host's memory.
        ExpertReadError: An expert cannot be read that is to be preloaded or that the canary needs.
        SettingsError: The plan of injected faults is none.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        host: str,
        claim: DeviceClaim,
        settings: Settings,
        clock: Clock,
        pressure: Callable[[], HostPressure] = read_pressure,
        origin: Origin | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._host = host
        self._claim = claim
        self._settings = settings
        self._clock = clock
        self._process = psutil.Process()
        self._sequence = count(1)
        self._leaving = ""
        self._last_asked_s = clock.monotonic_s()
        self._armament = arm(
            settings,
            host=host,
            device=claim.device,
            generation=claim.generation,
            clock=clock,
        )
        if self._armament is not None and self._armament.device is not None:
            self._armament.device.stand_before()
        self._pressure = pressure
        self._origin = origin or Origin()
        self._windows = self._origin.windows or WindowInMemory(settings.faults.timeout_window_s)
        self._slot_keeper: SlotKeeper | None = None
        self._engine = Engine(
            load=self._load,
            settings=self._careful(settings.engine),
            clock=clock,
            keep_slots=self._keep_slots,
            judge=self._judge,
            recorder=self._origin.recorder,
            end_process=self._origin.end_process,
        )
        self._loaded = self._engine.start()
        self._prover = Prover(
            self._engine,
            self._loaded,
            replica_id=replica_id,
            generation=claim.generation,
            state_dir=Path(settings.state_dir),
            clock=clock,
        )
        self._upkeep = self._begin_upkeep()

    def _careful(self, settings: EngineSettings) -> EngineSettings:
        """Shorter prefill chunks where engines of this host had timeouts lately."""
        timeouts = timeouts_within(self._windows.read(), self._clock.now_s())
        chunk = careful_chunk_tokens(settings.prefill_chunk_tokens, timeouts=timeouts)
        return settings.model_copy(update={"prefill_chunk_tokens": chunk})

    def _judge(self, report: FaultReport) -> FaultAnswer:
        """On the engine thread, in the moment of a fault."""
        log.error("engine fault (%s) in %s: %s", report.kind, report.phase, report.raw_text)
        window = self._windows.add(report.kind, report.at_s)
        replaces = self._settings.faults.on_timeout == "replace"
        return decide(report.kind, window, at_s=report.at_s, timeouts_replace=replaces)

    def _load(self) -> LoadedModel:
        checkpoint = read_checkpoint(
            resolve(self._settings.model.path, self._settings.model.revision)
        )
        engine = self._settings.engine
        draft = read_draft(engine.draft_model, checkpoint) if engine.draft_model else None
        self._budget = self._planned(checkpoint, draft)
        streaming = self._streaming(checkpoint, self._budget.plan)
        load_here = partial(load, device=engine.device, dtype=engine.dtype)
        loaded = load_here(checkpoint, streaming=streaming, on_read=self._weights_came)
        if draft is None:
            return loaded
        return replace(loaded, draft=load_here(draft, on_read=lambda *_: self._engine.progressed()))

    def _weights_came(self, done_bytes: int, total_bytes: int) -> None:
        """On the engine thread, with each part of the weights that is in memory."""
        self._engine.progressed()
        self._origin.load_goes_on(done_bytes, total_bytes)

    def _planned(self, checkpoint: Checkpoint, draft: Checkpoint | None) -> Budget:
        """What goes into this host's memory, decided before any of it is taken."""
        settings = self._settings
        budget = draw_up(
            checkpoint,
            settings.engine,
            context_tokens=settings.model.context_tokens,
            on_gpu=choose_device(settings.engine.device) == "gpu",
            draft=draft,
        )
        for reason in budget.plan.reasons:
            log.info("memory plan: %s", reason)
        return budget

    def _streaming(self, checkpoint: Checkpoint, plan: MemoryPlan) -> Streaming | None:
        """How experts are streamed; None when all of them stay in memory."""
        armament = self._armament
        if not plan.streams:
            if armament is not None and armament.storage is not None:
                log.warning("all experts are in memory: no fault of storage will be injected")
            return None
        return Streaming(
            slots=plan.slots_per_layer,
            workers=self._settings.engine.read_workers,
            clock=self._clock,
            on_progress=self._engine.progressed,
            pack_folders=(state_folder(self._settings.state_dir, checkpoint.fingerprint),),
            storage=None if armament is None else armament.storage,
            read_failures=self._settings.fleet.read_failures,
        )

    def _keep_slots(self, loaded: LoadedModel) -> SlotKeeper | None:
        """What gives slots back when others need the memory; None when nothing streams."""
        if loaded.streamed is None:
            return None
        self._slot_keeper = SlotKeeper(
            streamed=loaded.streamed,
            limits=limits_of(self._budget.plan, loaded.streamed, top_k=self._budget.sizes.top_k),
            read=self._pressure,
            period_s=self._settings.engine.memory_check_s,
            clock=self._clock,
        )
        return self._slot_keeper

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the loaded model takes, and why."""
        return self._budget.plan

    @property
    def _slots(self) -> SlotsReport:
        """The slots now, as planned where nothing streams."""
        keeper = self._slot_keeper
        return (
            SlotsReport(slots=self.memory_plan.slots_per_layer) if keeper is None else keeper.report
        )

    def _begin_upkeep(self) -> Upkeep | None:
        """Preload hot experts and begin what goes on beside requests; None when nothing streams."""
        loaded, settings = self._loaded, self._settings
        if loaded.streamed is None:
            return None
        upkeep = Upkeep(
            loaded.streamed,
            plan=self._budget.plan,
            fingerprint=loaded.checkpoint.fingerprint,
            state_dir=settings.state_dir,
            warm_up_bytes_per_s=settings.engine.warm_up_bytes_per_s,
            is_busy=lambda: self._engine.is_busy,
            clock=self._clock,
        )
        self._engine.between_steps(upkeep.preload)
        upkeep.start()
        return upkeep

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Run one attempt; the first chunk comes at once and says that the replica has it.

        Raises:
            EngineFaultError: The engine failed; this attempt and all others on it are lost.
            WeightsMismatchError: The request was made for another checkpoint.
            InvalidRequestError: The request cannot run on any replica.
        """
        if not request.is_probe:
            await self._prover.regain_trust()
        async with aclosing(attempt(self._engine, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def probe(self, *, exact: bool = False) -> ProbeResult:
        """Prove that this engine generates: a canary when idle, real progress when busy.

        Two probes never run at once; the second waits for the first and then runs its own.

        Args:
            exact: A canary in any case: what flows proves life, not right answers.

        Raises:
            EngineFaultError: The engine has ended.
        """
        self._last_asked_s = self._clock.monotonic_s()
        return await self._prover.prove("canary", exact=exact)

    async def watch_itself(self) -> None:
        """Probe this engine whenever no controller has asked for three periods; runs for ever.

        A wrong or failing canary makes the replica leave, as a controller would have ordered.
        """
        period_s = self._settings.fleet.probe_period_s
        while True:
            await asyncio.sleep(period_s)
            if self._clock.monotonic_s() - self._last_asked_s < 3 * period_s:
                continue
            try:
                result = await self._prover.prove("self")
            except HeadraceError as error:
                self.leave(f"own canary got no answer: {error}")
                return
            if not result.passed:
                self.leave(f"own canary failed: {result.detail}")

    @property
    def _neighbours(self) -> str:
        injected = "" if self._armament is None else self._armament.neighbours()
        return injected or self._origin.neighbours()

    def leave(self, reason: str) -> None:
        """Ask to be replaced; `unhealthy_reason` tells Ray Serve from now on."""
        self._leaving = self._leaving or reason
        if self._upkeep is not None:
            self._upkeep.leave()

    def close(self) -> None:
        """Leave in order: what was learned is kept, and the engine ends; again does nothing.

        Requests that are still in flight go elsewhere.
        """
        if self._upkeep is not None:
            self._upkeep.close()
        if not self._engine.is_alive:
            return
        recorder = self._origin.recorder
        self._engine.stop()
        recorder.enter("teardown")
        if self._armament is not None:
            self._armament.tear_down(recorder.progressed)
        recorder.ended(self._leaving or "it was stopped in order", 0)

    @property
    def unhealthy_reason(self) -> str:
        """Why this replica must be replaced; empty while it need not."""
        fault = self._engine.status.fault
        if fault is None and not self.is_alive:
            fault = "its thread is gone"
        return self._leaving or (f"engine fault: {fault}" if fault is not None else "")

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine that could answer."""
        return self._engine.is_alive

    def snapshot(self) -> ReplicaSnapshot:
        """What this replica says of itself now."""
        status, streamed, slots = self._engine.status, self._loaded.streamed, self._slots
        faults, origin = status.faults, self._origin
        now_s = self._clock.monotonic_s()
        reads = ReadReport() if streamed is None else streamed.reader.health.report(now_s)
        warm_up = WarmUpProgress() if self._upkeep is None else self._upkeep.warm_up
        return ReplicaSnapshot(
            replica_id=self._replica_id,
            generation=self._claim.generation,
            state=ReplicaState.STOPPING if self.unhealthy_reason else ReplicaState.READY,
            sequence=next(self._sequence),
            running=status.running,
            waiting=status.waiting,
            outstanding_tokens=status.outstanding_tokens,
            kv_cache_usage_ratio=0.0,
            expert_hit_ratio=1.0 if streamed is None else streamed.counters.hit_ratio,
            expert_slots=slots.slots,
            expert_slots_planned=self.memory_plan.slots_per_layer,
            expert_slots_reason=slots.reason,
            expert_resizes=slots.resizes,
            step_rate=status.step_rate,
            engine_steps=status.engine_steps,
            last_progress_s=status.last_progress_s,
            pid=os.getpid(),
            host=self._host,
            device=self._claim.device,
            rss_bytes=self._process.memory_info().rss,
            at_s=self._clock.now_s(),
            storage_trouble=reads.trouble,
            storage_troubles=reads.troubles,
            storage_lost=reads.lost,
            injecting="" if self._armament is None else self._armament.summary,
            warm_up_done_bytes=warm_up.done_bytes,
            warm_up_planned_bytes=warm_up.planned_bytes,
            faults=faults.count,
            fault_kind="" if faults.report is None else faults.report.kind,
            fault_text="" if faults.report is None else faults.report.raw_text,
            fault_answer="" if faults.answer is None else faults.answer,
            doubts=faults.doubts,
            prefill_chunk_tokens=faults.prefill_chunk_tokens,
            admitted=faults.admitted,
            predecessor=origin.predecessor,
            predecessor_generation=origin.predecessor_generation,
            neighbours=self._neighbours,
        )
