"""The plan against MLX: what is loaded takes what was planned, and a replica follows its plan."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.budget import Budget, draw_up
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.footprint import HostMemory, ModelSizes
from headrace_replicas.engine.loading import DtypeChoice, LoadedModel, Streaming, load
from headrace_replicas.engine.model_sizes import measure
from headrace_replicas.replica import Replica
from tests.streaming.architectures import ARCHITECTURES, Architecture
from tests.streaming.model_configs import VOCABULARY
from tests.streaming.tiny_checkpoints import MODES, write
from tests.support.engines import request_for
from tests.support.replicas import make_replica

pytestmark = pytest.mark.engine

Chat = Callable[[str], tuple[int, ...]]
CHUNK_TOKENS = 64
HOST = HostMemory(limit_bytes=8 * 2**30, total_bytes=16 * 2**30, source="a host of the test's")


def budget_of(checkpoint: Checkpoint, **engine: Any) -> Budget:
    settings = EngineSettings(device="cpu", **engine)
    return draw_up(checkpoint, settings, context_tokens=None, on_gpu=False, host=HOST)


def load_planned(checkpoint: Checkpoint, budget: Budget, dtype: DtypeChoice) -> LoadedModel:
    streaming = Streaming(
        slots=budget.plan.slots_per_layer, workers=4, clock=SystemClock(), on_progress=lambda: None
    )
    return load(
        checkpoint,
        device="cpu",
        dtype=dtype,
        streaming=streaming if budget.plan.streams else None,
    )


def bytes_of(tree: Any) -> int:
    leaves: Any = tree_flatten(tree)
    return sum(array.nbytes for _, array in leaves if isinstance(array, mx.array))


def parameter_bytes(loaded: LoadedModel) -> int:
    tree: dict[str, Any] = loaded.model.parameters()  # type: ignore[no-untyped-call]  # MLX's own
    return bytes_of(tree)


def prefill(loaded: LoadedModel, tokens: int) -> tuple[int, int]:
    """Run a prompt, 64 tokens at a time.

    Returns:
        What mlx-lm's caches hold after it, and what the last chunk took beside them at its peak.
    """
    cache = make_prompt_cache(loaded.model)
    prompt = mx.array([[1 + number % 90 for number in range(tokens)]])
    before = 0
    for begin in range(0, tokens, CHUNK_TOKENS):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(loaded.model(prompt[:, begin : begin + CHUNK_TOKENS], cache=cache))
    return bytes_of([layer.state for layer in cache]), mx.get_peak_memory() - before


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("slots", ["all", "50%", "12.5%"])
def test_the_demo_model_takes_what_was_planned(
    checkpoint: Checkpoint, slots: str, dtype: DtypeChoice
) -> None:
    """Resident weights and slots together, to the byte."""
    budget = budget_of(checkpoint, slots=slots, dtype=dtype)
    loaded = load_planned(checkpoint, budget, dtype)
    assert (loaded.streamed is not None) == budget.plan.streams == (slots != "all")
    planned = budget.plan.resident_bytes + budget.plan.slot_bytes
    assert parameter_bytes(loaded) == planned


def test_the_demo_models_kv_cache_is_as_large_as_planned(checkpoint: Checkpoint) -> None:
    """256 tokens are a whole step of mlx-lm's cache."""
    budget = budget_of(checkpoint)
    loaded = load_planned(checkpoint, budget, "auto")
    planned = budget.sizes.cache.bytes_for(tokens=256, requests=1, context_tokens=256)
    assert prefill(loaded, 256)[0] == planned == 256 * 8192


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.module)
def test_every_architecture_takes_what_was_planned(
    architecture: Architecture, tmp_path: Path
) -> None:
    """Weights within a hundredth, the experts that streaming finds, and caches covered."""
    modes = [one for one in MODES if one.name in (architecture.modes or ("affine g64",))]
    write(tmp_path / "model", architecture, modes[0])
    checkpoint = read_checkpoint(tmp_path / "model")
    sizes = measure(checkpoint, dtype="auto", on_gpu=False)
    loaded = load(checkpoint, device="cpu", dtype="auto")
    layers = expert_layers(loaded.model)
    experts = sum(tensor.array.nbytes for layer in layers for tensor in layer.tensors)
    assert sizes.slot_bytes(sizes.experts) == pytest.approx(experts, rel=0.01)
    planned = sizes.resident_bytes + sizes.slot_bytes(sizes.experts)
    assert planned == pytest.approx(parameter_bytes(loaded), rel=0.01)
    assert [layer.experts for layer in sizes.layers] == [layer.experts for layer in layers]
    assert sizes.top_k == architecture.top_k
    if not architecture.metal_only:
        covered = sizes.cache.bytes_for(tokens=256, requests=1, context_tokens=256)
        counters = 64  # a few arrays hold no more than an offset
        cached, taken = prefill(loaded, 256)
        assert cached <= covered + counters
        assert taken <= computing(sizes)


def computing(sizes: ModelSizes) -> int:
    """What the last of a prompt's 256 tokens may take: a chunk, a layer's cache, the logits."""
    chunk = sizes.working.bytes_for(tokens=CHUNK_TOKENS, requests=1, context_tokens=256)
    logits = CHUNK_TOKENS * VOCABULARY * 4  # of all of a chunk's tokens, as the test asks for them
    return chunk - sizes.working.process_bytes + logits + 2 * 256 * sizes.cache.layer_token_bytes


@pytest.mark.parametrize(
    "architecture",
    [one for one in ARCHITECTURES if not one.metal_only],
    ids=lambda one: one.module,
)
def test_computing_with_streamed_experts_takes_what_was_planned(
    architecture: Architecture, tmp_path: Path
) -> None:
    """At MLX's own peak, with more experts needed than slots; the bound is no wild one."""
    modes = [one for one in MODES if one.name in (architecture.modes or ("affine g32",))]
    write(tmp_path / "model", architecture, modes[0])
    checkpoint = read_checkpoint(tmp_path / "model")
    sizes = measure(checkpoint, dtype="auto", on_gpu=False)
    streaming = Streaming(slots=4, workers=4, clock=SystemClock(), on_progress=lambda: None)
    loaded = load(checkpoint, device="cpu", dtype="auto", streaming=streaming)
    _, taken = prefill(loaded, 256)
    assert 0.2 * computing(sizes) < taken <= computing(sizes)


def answer(replica: Replica, checkpoint: Checkpoint, prompt: tuple[int, ...]) -> list[int]:
    async def collect() -> list[int]:
        request = request_for(checkpoint, prompt, max_tokens=24)
        return [token async for chunk in replica.generate(request) for token in chunk.ids]

    return asyncio.run(collect())


def test_a_replica_streams_when_its_plan_says_so(
    tmp_path: Path, checkpoint: Checkpoint, chat: Chat
) -> None:
    """And answers as one that keeps all experts; its snapshot tells how often it read."""
    streaming = make_replica(tmp_path, engine={"slots": "25%"})
    assert (streaming.memory_plan.slots_per_layer, streaming.memory_plan.streams) == (8, True)
    resident = make_replica(tmp_path, engine={"slots": "auto"})
    assert (resident.memory_plan.slots_per_layer, resident.memory_plan.streams) == (32, False)
    prompt = chat("What is 9 + 9?")
    assert answer(streaming, checkpoint, prompt) == answer(resident, checkpoint, prompt)
    assert 0 < streaming.snapshot().expert_hit_ratio < 1
    assert resident.snapshot().expert_hit_ratio == 1
    for replica, slots in ((streaming, 8), (resident, 32)):
        told = replica.snapshot()
        assert (told.expert_slots, told.expert_slots_planned) == (slots, slots)
        assert (told.expert_slots_reason, told.expert_resizes) == ("", 0)


def test_a_replica_refuses_what_cannot_fit(tmp_path: Path) -> None:
    """Before a byte of the weights is read."""
    with pytest.raises(MemoryPlanError, match=r"at least 12\.5%"):
        make_replica(tmp_path, engine={"slots": "5%"})
    with pytest.raises(MemoryPlanError, match="does not fit into memory"):
        make_replica(tmp_path, engine={"cache_limit_bytes": 2**50})
