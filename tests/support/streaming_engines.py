"""Engines that stream their experts, with a handle on what they loaded."""

from collections.abc import Callable
from pathlib import Path

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.reader import RangeReader
from headrace_replicas.engine.experts.storage import Storage, SystemStorage
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_replicas.engine.steps import Engine
from headrace_replicas.injection.plan import AnyStorageFault
from headrace_replicas.injection.storage_faults import FaultyStorage


class StreamingEngine:
    """A running engine on MLX's CPU device.

    Args:
        checkpoint: What it loads.
        slots: Experts of a layer in memory.
        schedule: `layers`, `speculate` or `auto`.
        storage: Where experts are read from; None takes the operating system's files.
        on_progress: Called with each mark of progress, before the engine's own.
        chunk_tokens: Prompt tokens of a prefill step.
        workers: Reads under way at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slots: int,
        schedule: str = "layers",
        *,
        storage: Storage | None = None,
        on_progress: Callable[[], None] = lambda: None,
        chunk_tokens: int = 64,
        workers: int = 4,
    ) -> None:
        self.loaded: LoadedModel | None = None
        self._checkpoint = checkpoint
        self._slots = slots
        self._storage = storage
        self._on_progress = on_progress
        self._workers = workers
        settings = EngineSettings.model_validate(
            {"device": "cpu", "prefill_chunk_tokens": chunk_tokens, "schedule": schedule}
        )
        self.engine = Engine(load=self._load, settings=settings, clock=SystemClock())
        self.engine.start()

    def _load(self) -> LoadedModel:
        streaming = Streaming(
            slots=self._slots,
            workers=self._workers,
            clock=SystemClock(),
            on_progress=self._progressed,
            storage=self._storage,
        )
        self.loaded = load(self._checkpoint, device="cpu", dtype="auto", streaming=streaming)
        return self.loaded

    def _progressed(self) -> None:
        self._on_progress()
        self.engine.progressed()

    @property
    def streamed(self) -> StreamedModel:
        """What streams the experts."""
        assert self.loaded is not None
        assert self.loaded.streamed is not None
        return self.loaded.streamed

    @property
    def reader(self) -> RangeReader:
        """What reads them."""
        return self.streamed.reader

    def stop(self) -> None:
        """End the engine and close its files."""
        self.engine.stop()
        self.reader.close()


def faulty_storage(*faults: AnyStorageFault, folder: Path | None = None) -> FaultyStorage:
    """The operating system's files with these faults; each waits for `folder/now` if given."""
    if folder is not None:
        faults = tuple(one.model_copy(update={"once_exists": folder / "now"}) for one in faults)
    return FaultyStorage(SystemStorage(), list(enumerate(faults)), seed=0, clock=SystemClock())
