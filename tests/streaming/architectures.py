"""A tiny config.json for every architecture of mlx-lm whose experts can be streamed.

Which these are is read from mlx-lm's sources: every model file that names `SwitchGLU` or
`SwitchMLP`, and every one that builds its layers from such a file. A new release of mlx-lm with a
new one therefore shows up as a gap, not as silence.
"""

from dataclasses import dataclass
from typing import Any, Final

Config = dict[str, Any]

EXPERTS: Final = 16
VOCABULARY: Final = 96
# Every dimension that a weight is multiplied along is a multiple of 64, so that all modes can
# quantise it.
WIDTH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model file, and a model small enough to try everything with.

    Attributes:
        module: The file's name in `mlx_lm.models`.
        config: config.json.
        top_k: Experts of one token in one layer.
        experts: Experts of a layer.
        unbatched: Why mlx-lm itself cannot batch it; empty where it can.
    """

    module: str
    config: Config
    top_k: int = 2
    experts: int = EXPERTS
    unbatched: str = ""


# Names that most families share. A model class takes those that it knows and ignores the rest.
_COMMON: Final[Config] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_LATENT_ATTENTION: Final[Config] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_LINEAR_ATTENTION: Final[Config] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
_MAMBA: Final[Config] = {
    "mamba_num_heads": 2,
    "mamba_head_dim": 32,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 1,
}
_KIMI_DELTA: Final[Config] = {
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    }
}
_INDEXER: Final[Config] = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16}
_ALTERNATING: Final = ["sliding_attention", "full_attention"]


def _plain(module: str, *parts: Config, **own: Any) -> Architecture:
    """An architecture whose numbers stand at the top level."""
    config: Config = {"model_type": module, **_COMMON}
    for part in (*parts, own):
        config |= part
    return Architecture(module=module, config=config)
