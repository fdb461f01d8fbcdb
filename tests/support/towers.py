"""Gives a tiny checkpoint what its text does not need.

That is towers for images and sound, and layers that predict further tokens. Names are those of
published checkpoints and of their conversions for MLX; what is under them is noise, and larger than
the tiny model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import mlx.core as mx

Placement = Literal["shards of its own", "the text's shards"]

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "qwen3_5_moe": (
        "model.visual.patch_embed.proj.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "vision_tower.merger.linear_fc1.weight",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0.mlp.switch_mlp.down_proj.weight",
    ),
    "qwen3_vl_moe": ("model.visual.blocks.0.attn.qkv.weight", "visual.merger.linear_fc1.weight"),
    "kimi_vl": (
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "multi_modal_projector.linear_1.weight",
    ),
    "kimi_k25": ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"),
    "gemma4": (
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight",
        "embed_vision.embedding_projection.weight",
        "embed_audio.embedding_projection.weight",
        "vision_embedder.patch_proj.weight",
    ),
    "mistral3": (
        "vision_tower.transformer.layers.0.attention.q_proj.weight",
        "model.multi_modal_projector.linear_1.weight",
    ),
    "minimax_m3_vl": (
        "vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "patch_merge_mlp.linear_1.weight",
    ),
    "glm4_moe": ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.switch_mlp.up_proj.weight"),
}
"""What checkpoints of a model file hold beside the text model; the tiny ones have two layers."""

_ROWS: Final = 512
_COLUMNS: Final = 1024
TENSOR_BYTES: Final = _ROWS * _COLUMNS * 2

# As in a published config.json; nothing of it concerns the text model.
_VISION_CONFIG: Final = {
    "depth": 27,
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_heads": 16,
    "intermediate_size": 4304,
    "max_position_embeddings": 64,
    "patch_size": 16,
    "vocab_size": 7,
}


def add_extras(folder: Path, module: str, placement: Placement) -> frozenset[str]:
    """Add what checkpoints of a model file hold beside the text model, in place.

    Args:
        folder: A checkpoint of one shard, as mlx-lm saves it.
        module: The model file.
        placement: Where the tensors go.

    Returns:
        Their names.
    """
    names = EXTRAS[module]
    extras = {
        name: mx.random.normal((_ROWS, _COLUMNS), key=mx.random.key(number)).astype(mx.bfloat16)
        for number, name in enumerate(names)
    }
    [shard] = folder.glob("*.safetensors")
    text = mx.load(str(shard))
    assert isinstance(text, dict)
    mx.eval(text)
    (folder / "model.safetensors.index.json").unlink()
    if placement == "the text's shards":
        # Sorted, so that what is read and what is not lie between each other.
        _save(shard, dict(sorted((text | extras).items())))
    else:
        shard.rename(folder / "model-00001-of-00002.safetensors")
        _save(folder / "model-00002-of-00002.safetensors", extras)
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        config["vision_config"] = _VISION_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return frozenset(names)


def _save(file: Path, tensors: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
