"""The memory budget of one engine on this host: measures the model, reads the host, and plans."""

from dataclasses import dataclass

from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.footprint import HostMemory, ModelSizes
from headrace_replicas.engine.memory_host import read_host
from headrace_replicas.engine.memory_plan import Bandwidths, MemoryPlan, plan
from headrace_replicas.engine.model_sizes import measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A plan and what it was made from.

    Attributes:
        sizes: What the model takes.
        host: What there is.
        plan: What goes where.
    """

    sizes: ModelSizes
    host: HostMemory
    plan: MemoryPlan


def draw_up(
    checkpoint: Checkpoint,
    engine: EngineSettings,
    *,
    context_tokens: int | None,
    on_gpu: bool,
    draft: Checkpoint | None = None,
    host: HostMemory | None = None,
    bandwidths: Bandwidths | None = None,
) -> Budget:
    """Plan the memory of an engine that is to serve a checkpoint.

    Args:
        checkpoint: A checked one.
        engine: The engine's settings.
        context_tokens: `model.context_tokens`; None takes the checkpoint's own limit.
        on_gpu: Whether the engine computes on a GPU.
        draft: The draft model's, if there is one.
        host: What there is; None reads this host.
        bandwidths: For the bound on tokens a second, if known.

    Raises:
        MemoryPlanError: The model does not fit; the numbers and the remedy are in the message.
    """
    own = checkpoint.context_tokens
    sizes = measure(checkpoint, dtype=engine.dtype, on_gpu=on_gpu)
    memory = host or read_host(on_gpu=on_gpu)
    decided = plan(
        sizes,
        memory,
        engine.slots,
        context_tokens=min(own, context_tokens or own),
        max_batch=engine.max_batch,
        allocator_cache_bytes=engine.cache_limit_bytes,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        bandwidths=bandwidths,
        draft=None if draft is None else measure(draft, dtype=engine.dtype, on_gpu=on_gpu),
    )
    return Budget(sizes=sizes, host=memory, plan=decided)
