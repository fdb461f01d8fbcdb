"""The engine: one thread that owns the model, its caches and the GPU for its whole life.

MLX's streams belong to threads, so the thread that loads the model also prefills, decodes and
answers probes. Everybody else talks to it through a queue of commands and gets chunks through a
sink. Between two steps it takes new requests, drops cancelled ones and looks whether the host still
has the memory for its expert slots; a step is one decode step of the batch and one prefill chunk.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, NoReturn

from mlx_lm.generate import StopSequences

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import (
    EngineFaultError,
    ExpertReadError,
    HeadraceError,
)
from headrace_replicas.contract.faults import NEVER_BEGUN, STOPPED, FaultKind
from headrace_replicas.contract.flight import FlightRecorder, NoRecorder, Phase
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.allocators import bound_freed_memory, give_back_freed_memory
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.commands import Act, Cancel, Stop, StreamKey, Submit, stream_key
from headrace_replicas.engine.drafts.batch import DraftCounters
from headrace_replicas.engine.drafts.setup import Drafting, drafted_batch, fit_draft, fitting_drafts
from headrace_replicas.engine.engine_load import EngineLoad, StepRate
from headrace_replicas.engine.experts.resizing import SlotKeeper
from headrace_replicas.engine.experts.schedule import Decoding, decide_decoding, with_schedule
from headrace_replicas.engine.fault_handling import FaultHandler, Judge, is_of_device
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.output_stream import OutputStream, Sink
from headrace_replicas.engine.request_check import check_request
from headrace_replicas.engine.sampling import Sampler, greedy, logits_processors
from headrace_replicas.engine.steady_batch import (
    Float32Logits,
    SteadyBatchGenerator,
    require_batching,
)
from headrace_replicas.faults import FaultAnswer

# Progress inside a step is noted this often at most: every expert layer of a token reports it.
_MARK_S: Final = 0.05


class Engine:
    """Continuous batching on one device.

    Args:
        load: Loads the model; runs on the engine thread.
        settings: Batch size, chunk size and how tokens travel together.
        clock: Time source.
        keep_slots: Makes what keeps the loaded model's expert slots within the host's memory; runs
            on the engine thread. None, or a result of None, leaves them as they are.

        judge: Decides about faults; None lets the first one end the engine, as tools want it.
        recorder: Takes notes that survive the process.
        end_process: Ends the process at once, after a fault that leaves no other way.

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
        judge: Judge | None = None,
        recorder: FlightRecorder | None = None,
        end_process: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._load = load
        self._keep_slots = keep_slots
        self._keeper: SlotKeeper | None = None
        self._settings = settings
        self._clock = clock
        self._commands: queue.SimpleQueue[Submit | Cancel | Act | Stop] = queue.SimpleQueue()
        self._loaded: Future[LoadedModel] = Future()
        self._streams: dict[StreamKey, int] = {}
        self._outputs: dict[int, OutputStream] = {}
        self._judges = judge is not None
        self._recorder: FlightRecorder = recorder or NoRecorder()
        self._faults = FaultHandler(
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            admitted=settings.max_batch,
            judge=judge or (lambda _report: FaultAnswer.REPLACE),
            recorder=self._recorder,
            clock=clock,
            end_process=end_process,
        )
        self._phase: Phase = "load"
        self._in_flight: tuple[str, ...] = ()
        self._status = EngineLoad(last_progress_s=clock.now_s(), faults=self._faults.standing)
        self._marked_s = clock.monotonic_s()
        self._rate = StepRate()
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
        self._commands.put(Submit(request, sink))
        if self._status.fault is not None:
            # The thread is gone or going; whoever wins, the sink hears of it once.
            self._refuse_queued()

    def cancel(self, key: StreamKey) -> None:
        """Drop an attempt before the next step; one that has ended is ignored."""
        self._commands.put(Cancel(key))

    def between_steps(self, action: Callable[[], object]) -> None:
        """Do something on the engine thread, before its next step, and wait until it is done.

        Raises:
            EngineFaultError: The engine has ended.
        """
        act = Act(action, Future())
        self._commands.put(act)
        if self._status.fault is not None:
            self._refuse_queued()
        act.done.result()

    def stop(self) -> None:
        """End the thread after its current step. Attempts in flight get an error."""
        self._commands.put(Stop())
        self._thread.join()

    @property
    def status(self) -> EngineLoad:
        """What the engine is doing; replaced as a whole after each step."""
        return self._status

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        """Whether it has requests, waiting or running."""
        return bool(self._status.running or self._status.waiting)

    def progressed(self) -> None:
        """Note that a step moves on, from inside it; on the engine thread only.

        A step that streams experts may take long on a cold page cache. It is slow then, not dead,
        and whoever waits for it hears so.
        """
        self._recorder.progressed()
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

    def _waits_for_storage(self, waiting: bool) -> None:
        # Every expert layer of a token may read; who is in flight changes only between steps.
        self._recorder.enter("read" if waiting else self._phase, in_flight=self._in_flight)

    def _run(self) -> None:
        try:
            self._enter("load")
            # Before the load: what it frees on its way would be kept too.
            bound_freed_memory(self._settings.cache_limit_bytes)
            loaded = self._load()
            if loaded.streamed is not None:
                loaded.streamed.reader.on_wait = self._waits_for_storage
            if self._keep_slots is not None:
                self._keeper = self._keep_slots(loaded)
            generator = self._new_generator(loaded)
        except Exception as error:  # noqa: BLE001  handed to the caller of `start`
            try:
                self._take_fault_of_device(error)
            finally:
                self._loaded.set_exception(error)
            return
        self._loaded.set_result(loaded)
        turn: SteadyBatchGenerator | None = generator
        try:
            while turn is not None:
                turn = self._turn(turn, loaded)
        except Exception as error:  # noqa: BLE001  any escape from a turn is an engine fault
            self._end(f"{type(error).__name__}: {error}")
        else:
            self._end(STOPPED)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._in_flight = tuple(one.request.request_id for one in self._outputs.values())
        self._recorder.enter(phase, in_flight=self._in_flight)

    def _take_fault_of_device(self, error: Exception) -> None:
        """Take a fault outside of a step; what is no fault of the device is its caller's alone."""
        if self._judges and is_of_device(error):
            self._take_fault(error)

    def _take_fault(self, error: Exception) -> FaultAnswer:
        answer = self._faults.take(error, phase=self._phase, in_flight=len(self._outputs))
        self._status = replace(self._status, faults=self._faults.standing)
        return answer

    def _new_generator(self, loaded: LoadedModel) -> SteadyBatchGenerator:
        require_batching(loaded.model, loaded.checkpoint.model_type)
        model = self._model_to_run(loaded)
        generator = SteadyBatchGenerator(
            model,
            max_batch=self._faults.standing.admitted,
            prefill_chunk_tokens=self._faults.standing.prefill_chunk_tokens,
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
        return model if loaded.dtype == "float32" else Float32Logits(model)

    def _take_commands(self, generator: SteadyBatchGenerator, loaded: LoadedModel) -> bool:
        """Carry out what is queued; False means stop.

        When idle, wait for something, but not beyond the next look at the host's memory.
        """
        block = not self._outputs
        if block:
            self._enter("idle")
        patience_s = None if self._keeper is None else self._keeper.due_in_s()
        while True:
            try:
                command = self._commands.get(block=block, timeout=patience_s)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, Stop):
                return False
            if isinstance(command, Cancel):
                self._drop(generator, command.key)
            elif isinstance(command, Act):
                self._carry_out(command)
            else:
                self._insert(generator, loaded, command)
            self._note(())

    def _insert(
        self, generator: SteadyBatchGenerator, loaded: LoadedModel, command: Submit
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
        try:
            uid = _inserted(generator, output, loaded.checkpoint.vocab_size)
        except Exception as error:
            output.fail(EngineFaultError(f"{type(error).__name__}: {error}"))
            raise
        self._streams[stream_key(request)] = uid
        self._outputs[uid] = output

    def _drop(self, generator: SteadyBatchGenerator, key: StreamKey) -> None:
        uid = self._streams.pop(key, None)
        if uid is not None:
            del self._outputs[uid]
            generator.remove([uid])

    def _turn(
        self, generator: SteadyBatchGenerator, loaded: LoadedModel
    ) -> SteadyBatchGenerator | None:
        """What is queued, one step, and what goes on beside it; None when the engine is to stop.

        After a fault everything in flight goes elsewhere.

        When an expert cannot be read the device is well, but the step that broke off has left the
        caches half written. After a fault of the device nobody knows what it left. Either way they
        are dropped with their generator.
        """
        try:
            if not self._take_commands(generator, loaded):
                return None
            if self._outputs:
                self._count_uses(loaded)
                self._step(generator)
            if self._keeper is not None:
                self._keeper.between_steps()
        except ExpertReadError as error:
            self._fail_all(error)
        except Exception as error:
            if not self._judges:
                raise
            self._take_fault(error)
            self._fail_all(EngineFaultError(f"{type(error).__name__}: {error}"))
        else:
            return generator
        return self._renewed(loaded)

    def _renewed(self, loaded: LoadedModel) -> SteadyBatchGenerator:
        """A generator after a fault; a fault on this way is judged too, and ends the engine."""
        try:
            self._give_memory_back()
            return self._new_generator(loaded)
        except Exception as error:
            if self._judges:
                self._take_fault(error)
            raise

    def _give_memory_back(self) -> None:
        """Where memory ran out; after other faults it would only be one more call to the device."""
        report = self._faults.standing.report
        if report is not None and report.kind is FaultKind.OUT_OF_MEMORY:
            give_back_freed_memory()

    def _count_uses(self, loaded: LoadedModel) -> None:
        """Experts count as used in the next step unless nothing but probes runs."""
        if loaded.streamed is not None:
            outputs = self._outputs.values()
            loaded.streamed.uses.is_counting = not all(one.request.is_probe for one in outputs)

    def _step(self, generator: SteadyBatchGenerator) -> None:
        began_s = self._clock.monotonic_s()
        self._enter(self._next_phase())
        prefilled, generated = generator.next()
        now_s = self._clock.monotonic_s()
        doubts = [self._outputs[r.uid].check(r.token, r.logprobs) for r in generated]
        self._faults.completed()
        generator.admit(self._faults.standing.admitted)
        if any(doubts):
            self._faults.doubt()
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

    def _next_phase(self) -> Phase:
        unfinished = (
            o.prefill_done_tokens < o.prefill_total_tokens for o in self._outputs.values()
        )
        return "prefill" if any(unfinished) else "decode"

    def _give_signs_of_life(self, now_s: float) -> None:
        for output in self._outputs.values():
            output.sign_of_life(self._status.engine_steps, now_s)

    def _note(self, generated: Any, step_s: float = 0.0) -> None:
        """Publish what the engine is doing; `step_s` > 0 says that a step has finished."""
        outputs = self._outputs.values()
        started = [output for output in outputs if output.prefill_done_tokens]
        status = replace(
            self._status,
            running=len(started),
            waiting=len(outputs) - len(started),
            serving=sum(not output.request.is_probe for output in started),
            outstanding_tokens=sum(output.outstanding_tokens for output in outputs),
            faults=self._faults.standing,
        )
        if step_s > 0:
            if generated:
                self._rate.note(len(generated), step_s)
            status = replace(
                status,
                step_rate=self._rate.per_s,
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
            gone = EngineFaultError(f"{NEVER_BEGUN}: {self._status.fault}")
            if isinstance(command, Submit):
                command.sink(gone)
            elif isinstance(command, Act):
                command.done.set_exception(gone)

    def _carry_out(self, act: Act) -> None:
        # It may use the device, which may hang: in the idle phase the watchdog would not see that.
        self._enter("load")
        try:
            act.action()
        except Exception as error:  # noqa: BLE001  handed to whoever waits
            self._take_fault_of_device(error)
            act.done.set_exception(error)
        else:
            act.done.set_result(None)


def _inserted(generator: SteadyBatchGenerator, output: OutputStream, vocabulary: int) -> int:
    """The generator's number of a request that it has taken."""
    request = output.request
    always_greedy = request.sampling.temperature == 0 and request.resume_mode == "fast"
    [uid] = generator.insert(
        [output.prompt_ids],
        max_tokens=[output.new_tokens_limit],
        samplers=[greedy if always_greedy else Sampler(request)],
        logits_processors=[logits_processors(request, vocabulary)],
        stop_sequences=[StopSequences([[token] for token in sorted(request.stop_ids)])],
    )
    return int(uid)
