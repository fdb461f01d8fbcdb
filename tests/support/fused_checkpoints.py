"""Tiny checkpoints in the makers' own layouts, whose experts lie in no file as mlx-lm uses them."""

import json
import zlib
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import gpt_oss, qwen3_vl_moe
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

Weights = dict[str, mx.array]

LAYERS: Final = 3
EXPERTS: Final = 8
_WIDTH: Final = 64
_COMMON: Final = {
    "vocab_size": 96,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def transposed(folder: Path) -> Path:
    """Qwen3-VL-MoE: gate and up in one tensor, all experts transposed, in bfloat16."""
    text = {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "moe_intermediate_size": _WIDTH,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    }
    config = {"model_type": "qwen3_vl_moe", "text_config": text, "eos_token_id": 1}
    model = qwen3_vl_moe.Model(qwen3_vl_moe.ModelArgs.from_dict(config))
    weights = {
        name.replace("language_model.model.", "model.language_model.", 1).removeprefix(
            "language_model."
        ): array.astype(mx.bfloat16)
        for name, array in _random_weights(model).items()
    }
    for layer in range(LAYERS):
        prefix = f"model.language_model.layers.{layer}.mlp."
        gate, up, down = (
            weights.pop(f"{prefix}switch_mlp.{name}_proj.weight").swapaxes(-1, -2)
            for name in ("gate", "up", "down")
        )
        weights[f"{prefix}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-1)
        weights[f"{prefix}experts.down_proj"] = down
    return _save(folder, config, weights)


def interleaved(folder: Path) -> Path:
    """gpt-oss: rows of gate and up take turns in one tensor, mxfp4 in bytes, a bias per expert."""
    config = {
        **_COMMON,
        "model_type": "gpt_oss",
        "num_local_experts": EXPERTS,
        "sliding_window": 32,
        "rope_theta": 150000,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    model = gpt_oss.Model(gpt_oss.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(_noise, model.parameters()))
    quantize(
        model,
        32,
        4,
        mode="mxfp4",
        class_predicate=lambda path, _module: ".experts." in path and path.endswith("_proj"),
    )
    weights = dict(tree_flatten(model.parameters()))
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts."
        for field, suffix in (("weight", "_blocks"), ("scales", "_scales"), ("bias", "_bias")):
            parts = {
                name: _as_shipped(weights.pop(f"{prefix}{name}_proj.{field}"), field)
                for name in ("gate", "up", "down")
            }
            both = mx.stack([parts["gate"], parts["up"]], axis=2)
            weights[f"{prefix}gate_up_proj{suffix}"] = both.flatten(1, 2)
            weights[f"{prefix}down_proj{suffix}"] = parts["down"]
    return _save(folder, config, weights)


def _as_shipped(array: mx.array, field: str) -> mx.array:
    """Packed words as blocks of 16 bytes."""
    if field != "weight":
        return array
    return array.view(mx.uint8).reshape(*array.shape[:-1], -1, 16)


def _random_weights(model: Any) -> Weights:
    model.update(tree_map_with_path(_noise, model.parameters()))
    return dict(tree_flatten(model.parameters()))


def _noise(path: str, like: mx.array) -> mx.array:
    """Of the same shape; routers and biases too, so that all experts are chosen by somebody."""
    noise = mx.random.normal(like.shape, key=mx.random.key(zlib.crc32(path.encode())))
    scale = like.shape[-1] ** -0.5 if like.ndim > 1 else 0.1
    return noise * mx.array(scale) + mx.array(1.0 if "norm" in path else 0.0)


def _save(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    words = WordLevel({"word": 0, "end": 1}, unk_token="word")  # noqa: S106 - not a password
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder
