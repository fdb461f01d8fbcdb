"""A generated mixture-of-experts checkpoint of any size, for benches of expert streaming.

Random weights tell nothing of answers, but their bytes, shapes and arithmetic are those of a real
model. The gates are skewed towards a few popular experts and, where the shape has topics, follow
the topic of a text, as trained ones do; how far is printed by the bench that uses it, because hit
ratios mean nothing without it.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model

from tests.bench.topics import Topics
from tests.support.engines import DEMO_FOLDER

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHAPE_FILE = "shape.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that make a Qwen3-MoE.

    Attributes:
        skew: Standard deviation of the experts' popularity, in units of a gate's logits; 0 makes
            all experts equally likely.
        shared: Length of what all tokens' embeddings have in common, in lengths of a token's own
            part; the larger, the more the experts differ in popularity.
        topics: What the embedding is made of besides; None gives each token a direction of its own.
        packed_rest: Whether attention, gates, embedding and head are in 4 bit too. MLX's CPU
            backend multiplies packed weights slowly (0.85 G weights a second, on one thread): with
            the rest in bfloat16 more of a token's time goes to experts.
    """

    layers: int
    hidden: int
    experts: int
    top_k: int
    expert_hidden: int
    vocabulary: int = 6144
    context: int = 8192
    skew: float = 1.0
    shared: float = 0.7
    topics: Topics | None = None
    packed_rest: bool = True

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
        model, config = quantize_model(
            model,
            config,
            group_size=64,
            bits=4,
            quant_predicate=None if shape.packed_rest else _is_of_experts,
        )
        _draw_packed_experts(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, donate_model=True)
    save_config(config, config_path=folder / "config.json")
    for name in _TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    _write_out(folder)


def kept_model(folder: Path, shape: Shape) -> bool:
    """The shape's checkpoint in a folder; one of another shape there is replaced.

    Returns:
        Whether it had to be written.
    """
    wanted = json.dumps(asdict(shape))
    mark = folder / _SHAPE_FILE
    if mark.exists() and mark.read_text() == wanted:
        return False
    if folder.exists():
        shutil.rmtree(folder)
    make_model(folder, shape)
    mark.write_text(wanted)  # last: a folder without it is not whole
    return True


def _is_of_experts(path: str, _module: Any) -> bool:
    return "switch_mlp" in path


def _draw_packed_experts(model: Any, seed: int) -> None:
    """Draw the experts as 4-bit codes, which is what packing uniform weights gives.

    The weights that they replace are never computed: a tenth of the time and memory.
    """
    draw = np.random.default_rng(seed)
    for layer in model.model.layers:
        for projection in layer.mlp.switch_mlp.values():
            if "scales" not in projection:
                continue  # the activation
            bound = projection.input_dims**-0.5
            codes = draw.integers(1 << 32, size=projection.weight.shape, dtype=np.uint32)
            projection.weight = mx.array(codes)
            # 16 levels from -bound to bound; groups differ a little.
            step = mx.random.uniform(0.9, 1.0, projection.scales.shape) * (2 * bound / 15)
            projection.scales = step.astype(mx.bfloat16)
            projection.biases = (-7.5 * step).astype(mx.bfloat16)


def _write_out(folder: Path) -> None:
    """Wait until the disk has the files: pages that it lacks cannot be dropped from the cache."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _skew_gates(model: Any, shape: Shape) -> None:
    """Let all hidden states share a direction, along which experts differ in popularity."""
    direction = mx.random.normal((shape.hidden,))
    direction = direction / mx.linalg.norm(direction)
    length = shape.hidden**0.5  # of a normalised hidden state
    along = shape.shared / (1 + shape.shared**2) ** 0.5 * length
    for layer in model.model.layers:
        popularity = mx.random.normal((shape.experts,)) * (shape.skew / along)
        gate = layer.mlp.gate
        gate.weight = (gate.weight + popularity[:, None] * direction[None]).astype(mx.bfloat16)
    embedding = model.model.embed_tokens
    scaled = embedding.weight / mx.std(embedding.weight)
    shared = direction[None] * (length * shape.shared)
    if shape.topics is not None:
        scaled = scaled + shape.topics.strength * _topic_parts(shape, shape.topics)
    embedding.weight = (scaled + shared).astype(mx.bfloat16)


def _topic_parts(shape: Shape, topics: Topics) -> mx.array:
    """For each token the direction of its topic, shape (vocabulary, hidden); 0 without one."""
    directions = mx.random.normal((topics.count, shape.hidden))
    topic_of = mx.array(topics.topic_of(shape.vocabulary))
    return mx.where(topic_of[:, None] < 0, 0.0, directions[mx.maximum(topic_of, 0)])
