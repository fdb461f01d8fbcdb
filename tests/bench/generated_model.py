"""A generated mixture-of-experts checkpoint of any size, for benches of expert streaming.

Random weights tell nothing of answers, but their bytes, shapes and arithmetic are those of a real
model. The gates are skewed towards a few popular experts, as trained ones are; how far is printed
by the bench that uses it, because hit ratios mean nothing without it.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model

from tests.support.engines import DEMO_FOLDER

# Share of a token's embedding that all tokens have in common, against what is their own.
_SHARED = 0.7
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that make a Qwen3-MoE.

    Attributes:
        skew: Standard deviation of the experts' popularity, in units of a gate's logits; 0 makes
            all experts equally likely.
    """

    layers: int
    hidden: int
    experts: int
    top_k: int
    expert_hidden: int
    vocabulary: int = 6144
    context: int = 8192
    skew: float = 1.0

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "model_type": "qwen3_moe",
            "intermediate_size": 2 * self.expert_hidden,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocabulary,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.context,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_hidden,
            "num_attention_heads": max(2, self.hidden // 128),
            "num_key_value_heads": 2,
            "head_dim": 128,
            "eos_token_id": 0,
        }


# 24 of the 48 layers of Qwen3-30B-A3B: 8.4 GB in 4 bit.
HALF_QWEN3_30B = Shape(
    layers=24, hidden=2048, experts=128, top_k=8, expert_hidden=768, vocabulary=32768
)


def make_model(folder: Path, shape: Shape, *, seed: int = 0, dense: bool = False) -> None:
    """Write a 4-bit checkpoint (affine, groups of 64), as mlx-lm saves one.

    Args:
        folder: Where to.
        shape: The model's.
        seed: Of its weights.
        dense: Write float32 instead, of which MLX's CPU backend computes many more tokens a second.
    """
    mx.random.seed(seed)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(shape.config))
    model.set_dtype(mx.bfloat16)
    _skew_gates(model, shape)
    config = dict(shape.config)
    if dense:
        model.set_dtype(mx.float32)
    else:
        model, config = quantize_model(model, config, group_size=64, bits=4)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, donate_model=False)
    save_config(config, config_path=folder / "config.json")
    for name in _TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


def _skew_gates(model: Any, shape: Shape) -> None:
    """Let all hidden states share a direction, along which experts differ in popularity."""
    direction = mx.random.normal((shape.hidden,))
    direction = direction / mx.linalg.norm(direction)
    length = shape.hidden**0.5  # of a normalised hidden state
    along = _SHARED / (1 + _SHARED**2) ** 0.5 * length
    for layer in model.model.layers:
        popularity = mx.random.normal((shape.experts,)) * (shape.skew / along)
        gate = layer.mlp.gate
        gate.weight = (gate.weight + popularity[:, None] * direction[None]).astype(mx.bfloat16)
    embedding = model.model.embed_tokens
    scaled = embedding.weight / mx.std(embedding.weight)
    shared = direction[None] * (length * _SHARED)
    embedding.weight = (scaled + shared).astype(mx.bfloat16)
