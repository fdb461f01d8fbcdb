"""Engines for tests: the demo model on MLX's CPU device, and sinks that collect an answer."""

import queue
from dataclasses import replace
from importlib import resources
from pathlib import Path

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import (
    GenerateRequest,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.loading import LoadedModel, load
from headrace_replicas.engine.steps import Engine
from tests.support.waiting import comes_true

DEMO_FOLDER = Path(str(resources.files("headrace_replicas") / "demo_model"))
# A test that waits longer than this for an engine has found a hang.
PATIENCE_S = 60


def demo_checkpoint() -> Checkpoint:
    """The packaged demo model."""
    return read_checkpoint(DEMO_FOLDER)


def load_on_cpu(checkpoint: Checkpoint) -> LoadedModel:
    """A checkpoint on MLX's CPU device, in the compute type that the product picks there."""
    return load(checkpoint, device="cpu", dtype="auto")


def start_engine(checkpoint: Checkpoint, settings: EngineSettings | None = None) -> Engine:
    """A running engine."""
    engine = Engine(
        load=lambda: load_on_cpu(checkpoint),
        settings=settings or EngineSettings(device="cpu"),
        clock=SystemClock(),
    )
    engine.start()
    return engine


class Answer:
    """A sink that collects one attempt's chunks.

    Args:
        patience_s: How long it waits for a chunk.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._arrived: queue.SimpleQueue[TokenChunk | HeadraceError] = queue.SimpleQueue()
        self.chunks: list[TokenChunk] = []
        self.is_over = False

    def __call__(self, item: TokenChunk | HeadraceError) -> None:
        if isinstance(item, HeadraceError) or item.finish_reason is not None:
            self.is_over = True
        self._arrived.put(item)

    def next(self) -> TokenChunk:
        """The next chunk; an error that came instead is raised."""
        item = self._arrived.get(timeout=self._patience_s)
        if isinstance(item, HeadraceError):
            raise item
        self.chunks.append(item)
        return item

    def wait(self) -> "Answer":
        """Collect until the attempt's last chunk."""
        while self.next().finish_reason is None:
            pass
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids so far."""
        return tuple(token for chunk in self.chunks for token in chunk.ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """All log probabilities so far."""
        return tuple(entry for chunk in self.chunks for entry in chunk.logprobs)

    @property
    def last(self) -> TokenChunk:
        """The newest chunk."""
        return self.chunks[-1]


def ask(engine: Engine, request: GenerateRequest) -> Answer:
    """Submit a request; the caller waits for its answer."""
    answer = Answer()
    engine.submit(request, answer)
    return answer


def becomes_idle(engine: Engine) -> bool:
    """Whether nothing runs in an engine soon; an answer's last chunk goes out before it says so."""
    return comes_true(lambda: not engine.is_busy, patience_s=PATIENCE_S)


def request_for(
    checkpoint: Checkpoint,
    prompt_ids: tuple[int, ...],
    *,
    request_id: str = "r",
    seed: int = 7,
    max_tokens: int = 80,
    temperature: float = 0.8,
    sampling: SamplingParams | None = None,
) -> GenerateRequest:
    """A request for a checkpoint, sampled unless said otherwise."""
    return GenerateRequest(
        request_id=request_id,
        attempt=1,
        prompt_ids=prompt_ids,
        sampling=sampling or SamplingParams(temperature=temperature),
        seed=seed,
        max_tokens=max_tokens,
        stop_ids=checkpoint.eos_ids,
        model="demo",
        fingerprint=checkpoint.fingerprint,
    )


def resumed(request: GenerateRequest, delivered: tuple[int, ...], mode: str) -> GenerateRequest:
    """The request as a second attempt sends it after `delivered` tokens."""
    return replace(
        request,
        attempt=request.attempt + 1,
        output_ids=delivered,
        resume_mode="exact" if mode == "exact" else "fast",
    )
