"""Measures one load of a model: an answer by each schedule, warm and cold, and what bounds it.

An answer is decoded greedily three times: once so that kernels are built and the page cache holds
what it can of it, once warm, and once with the page cache emptied before each token.
"""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.decode_bench import Decode, all_hits_s, decode, prefill
from headrace_replicas.engine.experts.choice_trace import ChoiceTrace, tracing
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.least_reads import least_misses
from headrace_replicas.engine.experts.pack_index import state_folder
from headrace_replicas.engine.experts.page_cache import PageCache
from headrace_replicas.engine.experts.read_rates import ReadRates, measure_reads
from headrace_replicas.engine.experts.schedule import (
    SCHEDULES,
    Schedule,
    measured,
    with_schedule,
)
from headrace_replicas.engine.footprint import ModelSizes
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.memory_plan import MemoryPlan
from headrace_replicas.engine.stream_figures import Row, RowSchedule, Timing

# Part of the measured tokens that is decoded before them, uncounted: after a prompt the slots hold
# what its last tokens used.
_SETTLING_PARTS: Final = 4

ScheduleChoice = Literal["auto", "layers", "overlap", "speculate", "all"]

OnStep = Callable[[str, int, int], None]
"""Told what is under way, how many of its steps are done, and of how many (0: it has none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What every load does.

    Attributes:
        prompt_ids: What is answered; at least one token.
        tokens: Tokens of the answer that are measured, at least 1.
        schedule: How missing experts are fetched; `all` measures one after the other.
        cold: Whether to measure with an empty page cache too.
    """

    prompt_ids: tuple[int, ...]
    tokens: int
    schedule: ScheduleChoice
    cold: bool

    @property
    def settling_tokens(self) -> int:
        """Tokens of the answer that are decoded before those that are measured."""
        return max(1, self.tokens // _SETTLING_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A model as it is to be loaded.

    Attributes:
        checkpoint: A checked one.
        settings: Engine and state folder are used.
        sizes: What the model takes.
        setting: The value of `engine.slots`, as it was asked for.
        plan: What it means on this host.
    """

    checkpoint: Checkpoint
    settings: Settings
    sizes: ModelSizes
    setting: str
    plan: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """What was measured with one load.

    Attributes:
        rows: One for each schedule.
        answers: All tokens of each run, and which run it was.
        reads: How fast experts come, if that was wanted and experts stream.
        dtype: What was computed in.
    """

    rows: tuple[Row, ...]
    answers: tuple[tuple[str, tuple[int, ...]], ...]
    reads: ReadRates | None
    dtype: str


def measure_load(
    planned: Planned, trial: Trial, clock: Clock, on_step: OnStep, *, with_reads: bool
) -> LoadFigures:
    """Load a model, measure it, and let it go.

    Raises:
        CheckpointError: It cannot be loaded or streamed.
        ExpertReadError: An expert could not be read.
    """
    before_bytes = mx.get_active_memory()
    on_step(f"slots {planned.setting}: loading", 0, 0)
    loaded = _load(planned, clock)
    bench = _Bench(planned, trial, loaded, clock, on_step, before_bytes)
    streamed = loaded.streamed
    reads: ReadRates | None = None
    if streamed is None:
        rows: tuple[Row, ...] = (bench.resident(),)
    else:
        files = streamed.reader.files
        with closing(streamed.reader), PageCache(files) if trial.cold else nullcontext() as pages:
            reads = bench.reads(streamed, pages) if with_reads else None
            schedules = _schedules(loaded, streamed, trial, clock)
            rows = tuple(bench.streamed(streamed, schedule, pages) for schedule in schedules)
    return LoadFigures(rows=rows, answers=tuple(bench.answers), reads=reads, dtype=loaded.dtype)


def _load(planned: Planned, clock: Clock) -> LoadedModel:
    engine = planned.settings.engine
    streaming = Streaming(
        slots=planned.plan.slots_per_layer,
        workers=engine.read_workers,
        clock=clock,
        on_progress=lambda: None,
        pack_folders=(state_folder(planned.settings.state_dir, planned.checkpoint.fingerprint),),
    )
    return load(
        planned.checkpoint,
        device=engine.device,
        dtype=engine.dtype,
        streaming=streaming if planned.plan.streams else None,
    )


def _schedules(
    loaded: LoadedModel, streamed: StreamedModel, trial: Trial, clock: Clock
) -> tuple[Schedule, ...]:
    """Those to measure; `auto` chooses as an engine does when it starts."""
    if trial.schedule == "all":
        return SCHEDULES
    if trial.schedule == "auto":
        return (measured(loaded.model, streamed, clock),)
    return (trial.schedule,)


class _Bench:
    """Measures a loaded model.

    Args:
        planned: What was loaded.
        trial: What to do with it.
        loaded: The model.
        clock: Time source.
        on_step: Told how far it is.
        before_bytes: MLX's active memory before the load.

    Attributes:
        answers: All tokens of each run, and which run it was.
    """

    def __init__(
        self,
        planned: Planned,
        trial: Trial,
        loaded: LoadedModel,
        clock: Clock,
        on_step: OnStep,
        before_bytes: int,
    ) -> None:
        self._planned = planned
        self._trial = trial
        self._loaded = loaded
        self._clock = clock
        self._on_step = on_step
        self._before_bytes = before_bytes
        self.answers: list[tuple[str, tuple[int, ...]]] = []

    def reads(self, streamed: StreamedModel, pages: PageCache | None) -> ReadRates:
        """How fast experts come; from the disk too, if pages can be dropped."""
        self._on_step("reading experts", 0, 0)
        workers = self._planned.settings.engine.read_workers
        return measure_reads(streamed, workers=workers, clock=self._clock, pages=pages)

    def resident(self) -> Row:
        """The model with all experts in memory."""
        self._answer(self._loaded.model, "resident", "first")
        warm, _cache, memory_bytes = self._answer(self._loaded.model, "resident", "warm")
        return self._row("resident", memory_bytes, warm)

    def streamed(self, streamed: StreamedModel, schedule: Schedule, pages: PageCache | None) -> Row:
        """The model with experts that stream; cold too, if pages can be dropped."""
        model = with_schedule(self._loaded.model, streamed, schedule)
        with tracing(self._loaded.model) as trace:
            self._answer(model, schedule, "first", after_each=trace.end_token)
        warm, cache, memory_bytes = self._answer(model, schedule, "warm")
        cold = None
        if pages is not None:
            cold, *_ = self._answer(model, schedule, "cold", before_each=pages.drop)
        all_hits_s = self._all_hits_s(model, cache, warm.chosen[-1])
        # From here on the experts' layers follow another schedule.
        uncut = with_schedule(self._loaded.model, streamed, "speculate")
        return self._row(
            schedule,
            memory_bytes,
            warm,
            cold,
            least_read_bytes=self._least_read_bytes(trace),
            all_hits_s=all_hits_s,
            uncut_s=self._all_hits_s(uncut, cache, warm.chosen[-1]),
        )

    def _answer(
        self,
        model: Any,
        schedule: RowSchedule,
        run: str,
        *,
        before_each: Callable[[], None] = lambda: None,
        after_each: Callable[[], None] = lambda: None,
    ) -> tuple[Decode, Any, int]:
        """(measured part of an answer, its prompt cache, MLX's memory with all of it)."""
        trial = self._trial
        title = f"slots {self._planned.setting}, {schedule}, {run}"
        self._on_step(f"{title}: prompt", 0, 0)
        chunk_tokens = self._planned.settings.engine.prefill_chunk_tokens
        cache = prefill(self._loaded, trial.prompt_ids, chunk_tokens=chunk_tokens)
        settled = self._decode(model, cache, trial.prompt_ids[-1], trial.settling_tokens)
        done = 0

        def step_ended() -> None:
            nonlocal done
            done += 1
            self._on_step(title, done, trial.tokens)
            after_each()

        found = self._decode(
            model,
            cache,
            settled.chosen[-1],
            trial.tokens,
            before_each=before_each,
            after_each=step_ended,
        )
        self.answers.append((title, settled.chosen + found.chosen))
        return found, cache, mx.get_active_memory() - self._before_bytes

    def _decode(self, model: Any, cache: Any, first: int, count: int, **hooks: Any) -> Decode:
        return decode(
            model,
            self._loaded,
            cache=cache,
            first=first,
            count=count,
            clock=self._clock,
            # An answer that ended would be followed by tokens that no one ever asks for.
            never=self._loaded.checkpoint.eos_ids,
            **hooks,
        )

    def _all_hits_s(self, model: Any, cache: Any, token: int) -> float | None:
        self._on_step(f"slots {self._planned.setting}: a token with nothing to read", 0, 0)
        return all_hits_s(model, self._loaded, cache=cache, token=token, clock=self._clock)

    def _least_read_bytes(self, trace: ChoiceTrace) -> float:
        """Bytes a token that slots which knew the future would have read for this answer."""
        slots = self._planned.plan.slots_per_layer
        total = sum(
            least_misses(uses, slots) * size.read_bytes
            for uses, size in zip(trace.uses, self._planned.sizes.layers, strict=True)
        )
        return total / self._trial.tokens

    def _row(
        self,
        schedule: RowSchedule,
        memory_bytes: int,
        warm: Decode,
        cold: Decode | None = None,
        *,
        least_read_bytes: float = 0.0,
        all_hits_s: float | None = None,
        uncut_s: float | None = None,
    ) -> Row:
        plan = self._planned.plan
        return Row(
            setting=self._planned.setting,
            slots=plan.slots_per_layer,
            experts=plan.experts_per_layer,
            schedule=schedule,
            memory_bytes=memory_bytes,
            page_cache_bytes=plan.limit_bytes - plan.total_bytes,
            hit_ratio=max(0.0, 1 - warm.read_bytes / self._planned.sizes.missed_bytes(0.0)),
            least_read_bytes=least_read_bytes,
            warm=_timing(warm),
            cold=None if cold is None else _timing(cold),
            all_hits_s=all_hits_s,
            uncut_s=uncut_s,
        )


def _timing(run: Decode) -> Timing:
    return Timing(
        tokens_per_s=run.tokens_per_s,
        read_bytes=run.read_bytes,
        read_s=run.read_s,
        gate_s=run.gate_s,
        passes=run.passes,
    )
