"""Measures what a checkpoint takes in memory, from its config and its shards' headers alone.

No MLX and no tensor data: a plan can be made on a machine that has neither a GPU nor the memory.

What counts is how mlx-lm loads the tensors. Towers for images and sound and layers that predict
further tokens are dropped by its model classes before anything of them is read. Routed experts are
told by their names: a tensor of each expert under `experts.<number>.`, or one tensor of them all
whose first dimension counts them. Packed weights stay as they are in every compute type; all real
numbers, scales and biases of packed weights among them, follow the type.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from headrace_replicas.engine.architecture import EXPERT_COUNT_KEYS
from headrace_replicas.engine.cache_size import cache_size, layer_count
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.footprint import ExpertLayerSize, ModelSizes
from headrace_replicas.engine.json_files import JsonObject, nested_object, whole_number
from headrace_replicas.engine.safetensors_header import DTYPE_BYTES, TensorEntry, read_header
from headrace_replicas.engine.working_size import Widths, working_size

Tensors = Mapping[str, TensorEntry]

TOP_K_KEYS: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
"""How model families spell the number of experts that one token uses."""

_FLOATS: Final = frozenset({"F8_E4M3", "F16", "BF16", "F32"})
# mlx-lm turns 8-bit floats into bfloat16; where it keeps them packed this counts them double.
_AS_SHIPPED_BYTES: Final = {"F8_E4M3": 2}
_TOWERS: Final = frozenset(
    {
        "aligner",
        "audio_model",
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "mm_projector",
        "multi_modal_projector",
        "patch_merge_mlp",
        "vision",
        "vision_adapter",
        "vision_embed_tokens",
        "vision_embedder",
        "vision_model",
        "vision_projection",
        "vision_tower",
        "visual",
    }
)
# Their classes see, so that their vision tower is resident.
_SEEING: Final = frozenset({"muse_spark"})
# Their experts are modules of their own, not the layer that streaming replaces.
_NOT_STREAMED: Final = frozenset({"dbrx"})
_LAYER_NUMBER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SINGLE_EXPERT: Final = re.compile(r"^(?P<layer>.+)\.(?:experts|moe\.mlp)\.(?P<expert>\d+)\.")
_STACKED: Final = re.compile(r"^(?P<layer>.+?)\.(?:switch_mlp|switch_glu|experts)\.")
_FUSED: Final = re.compile(
    r"^(?P<layer>.+\.(?:block_sparse_moe|moe))\.(?:input_linear|output_linear|\w+_proj)\."
)
_EMBEDDINGS: Final = frozenset({"embed_tokens", "wte", "word_embeddings", "tok_embeddings"})
_HEADS: Final = frozenset({"lm_head", "output", "head"})

ComputeType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(slots=True)
class _Experts:
    """What was found of one layer's experts."""

    experts: int = 0
    file_bytes: int = 0
    memory_bytes: int = 0
    width: int = 0


def measure(checkpoint: Checkpoint, *, dtype: ComputeType, on_gpu: bool) -> ModelSizes:
    """What a checked checkpoint takes.

    Args:
        checkpoint: A checked one.
        dtype: `engine.dtype`.
        on_gpu: Whether the engine computes on a GPU; `auto` means float32 where it does not.

    Raises:
        CheckpointError: A shard has changed since it was checked.
    """
    tensors = {
        name: entry
        for shard in checkpoint.shards
        for name, entry in read_header(shard).tensors.items()
    }
    float_bytes = _float_bytes(dtype, on_gpu)
    return measure_tensors(checkpoint.config, tensors, float_bytes=float_bytes, on_gpu=on_gpu)


def measure_tensors(
    config: JsonObject, tensors: Tensors, *, float_bytes: int | None, on_gpu: bool = False
) -> ModelSizes:
    """What a model takes.

    Args:
        config: config.json.
        tensors: All tensors of all shards.
        float_bytes: Bytes of a real number in memory; None keeps each as shipped.
        on_gpu: Whether the engine computes on a GPU.
    """
    used = {name: entry for name, entry in tensors.items() if not _is_dropped(name, config)}
    layers, resident = _divided(used, config, float_bytes)
    memory = {name: _memory_bytes(entry, float_bytes) for name, entry in resident.items()}
    has_head = any(_HEADS & set(name.split(".")) for name in resident)
    looked_up = [name for name in resident if has_head and _EMBEDDINGS & set(name.split("."))]
    number_bytes = float_bytes or _usual_float_bytes(used)
    top_k = experts_per_token(config) or max((s.experts for s in layers.values()), default=0)
    expert_width = max((size.width for size in layers.values()), default=0)
    converted = [e.size_bytes for name, e in resident.items() if e.size_bytes != memory[name]]
    return ModelSizes(
        file_bytes=_total_bytes(tensors.values()),
        unused_bytes=_total_bytes(tensors.values()) - _total_bytes(used.values()),
        resident_bytes=sum(memory.values()),
        lookup_bytes=sum(memory[name] for name in looked_up),
        layers=tuple(_layer_size(path, size) for path, size in layers.items()),
        top_k=top_k,
        cache=cache_size(config, number_bytes=number_bytes),
        working=working_size(
            config,
            _widths(resident, expert_width),
            top_k=top_k,
            sinks=any("sink" in name for name in resident),
            load_bytes=max(converted, default=0),
            number_bytes=number_bytes,
            on_gpu=on_gpu,
        ),
    )


def experts_per_token(config: JsonObject) -> int | None:
    """Experts of a layer that one token uses, or None when the config does not say."""
    return _number(config, TOP_K_KEYS)


def _divided(
    used: Tensors, config: JsonObject, float_bytes: int | None
) -> tuple[dict[str, _Experts], Tensors]:
    """The routed experts of each layer, and all other tensors."""
    layers: dict[str, _Experts] = {}
    resident: dict[str, TensorEntry] = {}
    for name, entry in used.items():
        found = _expert_part(name, entry, config)
        if found is None:
            resident[name] = entry
            continue
        layer, experts = found
        size = layers.setdefault(layer, _Experts())
        size.experts = max(size.experts, experts)
        size.file_bytes += entry.size_bytes
        size.memory_bytes += _memory_bytes(entry, float_bytes)
        size.width += _expert_width(name, entry)
    return layers, resident


def _float_bytes(dtype: ComputeType, on_gpu: bool) -> int | None:
    if dtype == "auto":
        return None if on_gpu else 4
    return 4 if dtype == "float32" else 2


def _layer_size(path: str, size: _Experts) -> ExpertLayerSize:
    return ExpertLayerSize(
        path=path,
        experts=size.experts,
        read_bytes=size.file_bytes // size.experts,
        memory_bytes=-(-size.memory_bytes // size.experts),
    )


def _is_dropped(name: str, config: JsonObject) -> bool:
    """Whether mlx-lm's model classes have no place for a tensor, and never read it."""
    model_type = str(config.get("model_type", ""))
    parts = name.split(".")[:2]
    if _TOWERS & set(parts) and not (model_type in _SEEING and "audio_tower" not in parts):
        return True
    if parts[0].startswith("mtp") or ".mtp" in name:
        return True
    number = _LAYER_NUMBER.search(name)
    layers = layer_count(config)
    return number is not None and layers is not None and int(number[1]) >= layers


def _expert_part(name: str, entry: TensorEntry, config: JsonObject) -> tuple[str, int] | None:
    """The layer whose experts a tensor belongs to, and how many it shows there are."""
    if config.get("model_type") in _NOT_STREAMED:
        return None
    if single := _SINGLE_EXPERT.match(name):
        return single["layer"], int(single["expert"]) + 1
    rank = len(entry.shape)
    stacked = _STACKED.match(name) if rank >= 2 else None
    fused = _FUSED.match(name) if rank >= 3 else None
    match = stacked or fused
    if match is None or not _counts_experts(entry.shape, config):
        return None
    return match["layer"], entry.shape[0]


def _expert_width(name: str, entry: TensorEntry) -> int:
    """Numbers that a tensor of experts gives for a token, if it is a matrix; counted once."""
    if not _is_matrix(name, entry):
        return 0
    if single := _SINGLE_EXPERT.match(name):
        return entry.shape[0] if single["expert"] == "0" else 0
    return entry.shape[1] if len(entry.shape) >= 3 else 0


def _widths(resident: Tensors, expert: int) -> Widths:
    """What the matrices outside the experts give for a token, and one expert's."""
    in_layer: dict[str, int] = {}
    outside = 0
    for name, entry in resident.items():
        if not _is_matrix(name, entry):
            continue
        width = prod(entry.shape[:-1])
        if number := _LAYER_NUMBER.search(name):
            in_layer[number[1]] = in_layer.get(number[1], 0) + width
        else:
            outside = max(outside, width)
    return Widths(layer=max(in_layer.values(), default=0), expert=expert, vocabulary=outside)


def _is_matrix(name: str, entry: TensorEntry) -> bool:
    last = name.rpartition(".")[2]
    return len(entry.shape) >= 2 and "scale" not in last and "bias" not in last


def _counts_experts(shape: tuple[int, ...], config: JsonObject) -> bool:
    """Whether a tensor's first dimension is the number of experts.

    Where the config does not tell how many there are, three dimensions must do.
    """
    counts = _numbers(config, EXPERT_COUNT_KEYS)
    return shape[0] in counts if counts else len(shape) >= 3


def _memory_bytes(entry: TensorEntry, float_bytes: int | None) -> int:
    if entry.dtype not in _FLOATS:
        return entry.size_bytes
    in_file = DTYPE_BYTES[entry.dtype]
    width = float_bytes or _AS_SHIPPED_BYTES.get(entry.dtype, in_file)
    return entry.size_bytes // in_file * width


def _usual_float_bytes(tensors: Tensors) -> int:
    """Bytes of a real number in most tensors, as mlx-lm's caches take their type from them."""
    kinds = [entry.dtype for entry in tensors.values() if entry.dtype in _FLOATS]
    return 4 if 2 * kinds.count("F32") > len(kinds) else 2


def _total_bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _number(config: JsonObject, keys: Iterable[str]) -> int | None:
    """The largest of these numbers that the config states."""
    return max(_numbers(config, keys), default=None)


def _numbers(config: JsonObject, keys: Iterable[str]) -> set[int]:
    """What the text model's config states under any of these keys, lists taken apart."""
    owner = nested_object(config, "text_config") or config
    values = [owner.get(key) for key in keys]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return {number for item in flat if (number := whole_number(item)) is not None and number > 0}
