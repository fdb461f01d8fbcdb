"""The sizes of the model, and its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a `qwen3_moe` model; the defaults are those of the demo model.

    Attributes:
        vocab: Tokens in the vocabulary.
        top_k: Experts that work on one token.
        inter: Hidden size of one expert.
        context: Trained context in tokens.
    """

    vocab: int = 6144
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    inter: int = 192
    rope_theta: float = 10000.0
    eps: float = 1e-6
    context: int = 2048

    @classmethod
    def tiny(cls, vocab: int) -> Shape:
        """A model that trains on a CPU, to try the programs."""
        return cls(
            vocab=vocab, hidden=128, layers=2, experts=8, top_k=2, inter=64, heads=2, kv_heads=1
        )

    def to_config(self) -> dict[str, Any]:
        """The keys of `config.json` that `transformers` and `mlx-lm` read."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.inter * self.top_k,
            "max_position_embeddings": self.context,
            "moe_intermediate_size": self.inter,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "output_router_logits": False,
            "rms_norm_eps": self.eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "router_aux_loss_coef": 0.01,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }
