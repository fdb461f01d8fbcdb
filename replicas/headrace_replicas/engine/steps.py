"""The engine: one thread that owns the model, its caches and the GPU for its whole life.

MLX's streams belong to threads, so the thread that loads the model also prefills, decodes and
answers probes. Everybody else talks to it through a queue of commands and gets chunks through a
sink. Between two steps it takes new requests, drops cancelled ones and looks whether the host still
has the memory for its expert slots; a step is one decode step of the batch and one prefill chunk.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

from mlx_lm.generate import StopSequences

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import (
    EngineFaultError,
    ExpertReadError,
    HeadraceError,
)
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.allocators import bound_freed_memory
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.drafts.batch import DraftCounters
from headrace_replicas.engine.drafts.setup import Drafting, drafted_batch, fit_draft, fitting_drafts
from headrace_replicas.engine.experts.resizing import SlotKeeper
from headrace_replicas.engine.experts.schedule import Decoding, decide_decoding, with_schedule
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.output_stream import OutputStream, Sink
from headrace_replicas.engine.request_check import check_request
from headrace_replicas.engine.sampling import Sampler, greedy, logits_processors
from headrace_replicas.engine.steady_batch import SteadyBatchGenerator, require_batching

StreamKey = tuple[str, int, int]

# Weight of the newest step in the smoothed token rate: about the last twenty steps count. Tokens
# and seconds are smoothed apart: a step that takes an accepted draft takes no time, and the mean of
# rates would be that step's.
_RATE_WEIGHT: Final = 0.1
# Progress inside a step is noted this often at most: every expert layer of a token reports it.
_MARK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engine is doing, as of its last step.

    Attributes:
        running: Requests in prefill or decode.
        waiting: Requests taken and not yet started.
        outstanding_tokens: Upper bound of tokens to prefill and to generate.
        step_rate: Output tokens a second, smoothed over busy steps.
        engine_steps: Marks of progress since the start: steps, and arrivals of experts inside one.
        last_progress_s: Wall-clock second of the last of them.
        fault: Raw text of the fault that ended the engine, or None.
    """

    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    step_rate: float = 0.0
    engine_steps: int = 0
    last_progress_s: float = 0.0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerateRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: StreamKey


@dataclass(frozen=True, slots=True)
class _Act:
    action: Callable[[], object]
    done: Future[None]


class _Stop:
    pass


def stream_key(request: GenerateRequest) -> StreamKey:
    """What tells the attempts inside one engine apart."""
    return (request.request_id, request.choice, request.attempt)


class _Float32Logits:
    """A model whose logits are float32, so that sampling does not lose bits to bfloat16."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = self._model(*args, **kwargs)
        return logits.astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Engine:
    """Continuous batching on one device.

    Args:
        load: Loads the model; runs on the engine thread.
        settings: Batch size, chunk size and how tokens travel together.
        clock: Time source.
        keep_slots: Makes what keeps the loaded model's expert slots within the host's memory; runs
            on the engine thread. None, or a result of None, leaves them as they are.

    Attributes:
        drafts: What drafts have done; others than the engine thread only read.
    """

    def __init__(
        self,
        *,
        load: Callable[[], LoadedModel],
        settings: EngineSettings,
        clock: Clock,
        keep_slots: Callable[[LoadedModel], SlotKeeper | None] | None = None,
    ) -> None:
        self._load = load
        self._keep_slots = keep_slots
        self._keeper: SlotKeeper | None = None
        self._settings = settings
        self._clock = clock
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Act | _Stop] = queue.SimpleQueue()
        self._loaded: Future[LoadedModel] = Future()
        self._streams: dict[StreamKey, int] = {}
        self._outputs: dict[int, OutputStream] = {}
        self._status = EngineLoad(last_progress_s=clock.now_s())
        self._marked_s = clock.monotonic_s()
        self._busy_tokens = self._busy_s = 0.0
        self._decoding: Decoding | None = None
        self._drafting: Drafting | None = None
        self.drafts = DraftCounters()
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    def start(self) -> LoadedModel:
        """Start the thread and wait until the model is in memory.

        Raises:
            CheckpointError: The checkpoint cannot be loaded.
            BackendMissingError: MLX has no backend for the device.
        """
        self._thread.start()
        return self._loaded.result()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request; `sink` is called on the engine thread.

        The sink gets chunks, the last of which has a finish reason, or an error as the last call.
        """
        self._commands.put(_Submit(request, sink))
        if self._status.fault is not None:
            # The thread is gone or going; whoever wins, the sink hears of it once.
            self._refuse_queued()

    def cancel(self, key: StreamKey) -> None:
        """Drop an attempt before the next step; one that has ended is ignored."""
        self._commands.put(_Cancel(key))

    def between_steps(self, action: Callable[[], object]) -> None:
        """Do something on the engine thread, before its next step, and wait until it is done.

        Raises:
            EngineFaultError: The engine has ended.
        """
        act = _Act(action, Future())
        self._commands.put(act)
        if self._status.fault is not None:
            self._refuse_queued()
        act.done.result()

    def stop(self) -> None:
        """End the thread after its current step. Attempts in flight get an error."""
        self._commands.put(_Stop())
        self._thread.join()

    @property
    def status(self) -> EngineLoad:
        """What the engine is doing; replaced as a whole after each step."""
        return self._status

    @property
    def is_busy(self) -> bool:
        """Whether it has requests, waiting or running."""
        return bool(self._status.running or self._status.waiting)

    def progressed(self) -> None:
        """Note that a step moves on, from inside it; on the engine thread only.

        A step that streams experts may take long on a cold page cache. It is slow then, not dead,
        and whoever waits for it hears so.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._marked_s < _MARK_S:
            return
        self._marked_s = now_s
        self._status = replace(
            self._status,
            engine_steps=self._status.engine_steps + 1,
            last_progress_s=self._clock.now_s(),
        )
        self._give_signs_of_life(now_s)

    def _run(self) -> None:
        try:
            # Before the load: what it frees on its way would be kept too.
            bound_freed_memory(self._settings.cache_limit_bytes)
            loaded = self._load()
            if self._keep_slots is not None:
                self._keeper = self._keep_slots(loaded)
            generator = self._new_generator(loaded)
        except Exception as error:  # noqa: BLE001  handed to the caller of `start`
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(loaded)
        try:
            while self._take_commands(generator, loaded):
                if self._outputs:
                    self._count_uses(loaded)
                    generator = self._step_or_renew(generator, loaded)
                if self._keeper is not None:
                    self._keeper.between_steps()
        except Exception as error:  # noqa: BLE001  any escape from a step is an engine fault
            self._end(f"{type(error).__name__}: {error}")
        else:
            self._end("the engine was stopped")

    def _new_generator(self, loaded: LoadedModel) -> SteadyBatchGenerator:
        require_batching(loaded.model, loaded.checkpoint.model_type)
        model = self._model_to_run(loaded)
        generator = SteadyBatchGenerator(
            model,
            max_batch=self._settings.max_batch,
            prefill_chunk_tokens=self._settings.prefill_chunk_tokens,
            stream=mx.default_stream(mx.gpu if loaded.device == "gpu" else mx.cpu),
        )
        # As the schedule: after a failed read nothing is tried out again.
        self._drafting = self._drafting or fit_draft(model, loaded, self._settings)
        if self._drafting is not None:
            batch = drafted_batch(model, loaded, self._drafting, self.drafts, self._clock)
            generator.decode_in(batch)
        return generator

    def _model_to_run(self, loaded: LoadedModel) -> Any:
        model: Any = loaded.model
        if loaded.streamed is not None:
            # Kept for the engine's life: after a failed read nothing is measured again.
            self._decoding = self._decoding or decide_decoding(
                model,
                loaded.streamed,
                self._settings.schedule,
                most_tokens=1 + fitting_drafts(loaded, self._settings.draft_tokens),
                clock=self._clock,
            )
            chosen = self._decoding
            model = with_schedule(model, loaded.streamed, chosen.schedule, chosen.step_tokens)
        return model if loaded.dtype == "float32" else _Float32Logits(model)

    def _take_commands(self, generator: SteadyBatchGenerator, loaded: LoadedModel) -> bool:
        """Carry out what is queued; False means stop.

        When idle, wait for something, but not beyond the next look at the host's memory.
        """
        block = not self._outputs
        patience_s = None if self._keeper is None else self._keeper.due_in_s()
        while True:
            try:
                command = self._commands.get(block=block, timeout=patience_s)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Cancel):
                self._drop(generator, command.key)
            elif isinstance(command, _Act):
                _carry_out(command)
            else:
                self._insert(generator, loaded, command)
            self._note(())

    def _insert(
        self, generator: SteadyBatchGenerator, loaded: LoadedModel, command: _Submit
    ) -> None:
        request = command.request
        output = OutputStream(request, command.sink, self._settings)
        try:
            check_request(request, loaded)
        except HeadraceError as error:
            output.fail(error)
            return
        if output.new_tokens_limit == 0:
            output.finish_delivered(self._clock.monotonic_s())
            return
        vocabulary = loaded.checkpoint.vocab_size
        always_greedy = request.sampling.temperature == 0 and request.resume_mode == "fast"
        [uid] = generator.insert(
            [output.prompt_ids],
            max_tokens=[output.new_tokens_limit],
            samplers=[greedy if always_greedy else Sampler(request)],
            logits_processors=[logits_processors(request, vocabulary)],
            stop_sequences=[StopSequences([[token] for token in sorted(request.stop_ids)])],
        )
        self._streams[stream_key(request)] = uid
        self._outputs[uid] = output

    def _drop(self, generator: SteadyBatchGenerator, key: StreamKey) -> None:
        uid = self._streams.pop(key, None)
        if uid is not None:
            del self._outputs[uid]
            generator.remove([uid])

    def _step_or_renew(
        self, generator: SteadyBatchGenerator, loaded: LoadedModel
    ) -> SteadyBatchGenerator:
        """One step; when an expert cannot be read, everything in flight goes elsewhere.

        The device is well then, but the step that broke off has left the caches half written, so
        they are dropped with their generator.
        """
        try:
            self._step(generator)
        except ExpertReadError as error:
            self._fail_all(error)
            return self._new_generator(loaded)
        return generator

    def _count_uses(self, loaded: LoadedModel) -> None:
        """Experts count as used in the next step unless nothing but probes runs."""
        if loaded.streamed is not None:
            outputs = self._outputs.values()
            loaded.streamed.uses.is_counting = not all(one.request.is_probe for one in outputs)

    def _step(self, generator: SteadyBatchGenerator) -> None:
        began_s = self._clock.monotonic_s()
        prefilled, generated = generator.next()
        now_s = self._clock.monotonic_s()
        for response in prefilled:
            self._outputs[response.uid].prefill_done_tokens = response.progress[0]
        for response in generated:
            output = self._outputs[response.uid]
            output.take(response.token, response.logprobs, response.finish_reason, now_s)
            if response.finish_reason is not None:
                del self._outputs[response.uid]
                del self._streams[stream_key(output.request)]
        self._note(generated, now_s - began_s)
        self._give_signs_of_life(now_s)

    def _give_signs_of_life(self, now_s: float) -> None:
        for output in self._outputs.values():
            output.sign_of_life(self._status.engine_steps, now_s)

    def _note(self, generated: Any, step_s: float = 0.0) -> None:
        """Publish what the engine is doing; `step_s` > 0 says that a step has finished."""
        outputs = self._outputs.values()
        waiting = sum(1 for o in outputs if not o.prefill_done_tokens)
        status = replace(
            self._status,
            running=len(outputs) - waiting,
            waiting=waiting,
            outstanding_tokens=sum(output.outstanding_tokens for output in outputs),
        )
        if step_s > 0:
            if generated:
                self._busy_tokens += _RATE_WEIGHT * (len(generated) - self._busy_tokens)
                self._busy_s += _RATE_WEIGHT * (step_s - self._busy_s)
            status = replace(
                status,
                step_rate=self._busy_tokens / self._busy_s if self._busy_s else 0.0,
                engine_steps=status.engine_steps + 1,
                last_progress_s=self._clock.now_s(),
            )
        self._status = status

    def _end(self, raw_text: str) -> None:
        """Tell every attempt, running or still queued, that the engine is gone."""
        self._status = replace(self._status, fault=raw_text)
        self._fail_all(EngineFaultError(raw_text))
        self._refuse_queued()

    def _fail_all(self, error: HeadraceError) -> None:
        outputs = list(self._outputs.values())
        self._outputs.clear()
        self._streams.clear()
        for output in outputs:
            output.fail(error)
        self._note(())

    def _refuse_queued(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            gone = EngineFaultError(self._status.fault or "the engine has ended")
            if isinstance(command, _Submit):
                command.sink(gone)
            elif isinstance(command, _Act):
                command.done.set_exception(gone)


def _carry_out(act: _Act) -> None:
    try:
        act.action()
    except Exception as error:  # noqa: BLE001  handed to whoever waits
        act.done.set_exception(error)
    else:
        act.done.set_result(None)
