"""A tiny config.json for each architecture: a few layers, 16 experts, two of them for a token.

Every dimension that a weight is multiplied along is a multiple of 64, so that all modes can
quantise it.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

Config = dict[str, Any]

EXPERTS: Final = 16
VOCABULARY: Final = 96
WIDTH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model file of mlx-lm, and a model small enough to try everything with.

    Attributes:
        module: The file's name in `mlx_lm.models`.
        config: config.json.
        top_k: Experts of one token in one layer.
        unbatched: Why mlx-lm cannot batch it; empty where it can.
        metal_only: Its attention is written in Metal alone: elsewhere the expert layers are
            compared one by one, not the model.
        modes: The modes that it can be saved in, where they are not all.
    """

    module: str
    config: Config
    top_k: int = 2
    unbatched: str = ""
    metal_only: bool = False
    modes: tuple[str, ...] = ()


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
_QWEN3_5: Final[Config] = _LINEAR_ATTENTION | {
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
_KIMI: Final[Config] = _LATENT_ATTENTION | {
    "num_experts_per_token": 2,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}
_LONGCAT: Final[Config] = _LATENT_ATTENTION | {
    "num_layers": 2,
    "ffn_hidden_size": WIDTH,
    "expert_ffn_hidden_size": WIDTH,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_GEMMA4: Final[Config] = {
    "num_kv_shared_layers": 0,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "top_k_experts": 2,
}
_GRANITE: Final[Config] = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_MISTRAL4: Final[Config] = _LATENT_ATTENTION | {
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
    },
}
_INDEXER: Final[Config] = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16}
_WINDOW: Final = ["sliding_attention", "full_attention"]
# A window shorter than the prompt, on every other layer.
_ALTERNATING: Final[Config] = {"sliding_window": 8, "layer_types": _WINDOW}


def _plain(module: str, *parts: Config, **own: Any) -> Architecture:
    """An architecture whose numbers stand at the top level."""
    return Architecture(module=module, config=_merged({"model_type": module}, *parts, own))


def _nested(module: str, text_type: str, *parts: Config, **own: Any) -> Architecture:
    """One whose numbers stand under `text_config`, because it also sees or hears."""
    text = _merged({"model_type": text_type}, *parts, own)
    config = {"model_type": module, "vocab_size": VOCABULARY, "text_config": text}
    return Architecture(module=module, config=config)


def _merged(first: Config, *parts: Config) -> Config:
    config = _COMMON | first
    for part in parts:
        config |= part
    return config


_PLAIN: Final = (
    _plain("Klear"),
    _plain("afmoe", _ALTERNATING, num_dense_layers=0),
    _plain("bailing_hybrid", _LATENT_ATTENTION, layer_group_size=2, group_norm_size=1),
    _plain("bailing_moe"),
    _plain("bailing_moe_linear", layer_group_size=2, group_norm_size=1),
    _plain(
        "bailing_moe_v3",
        _LATENT_ATTENTION,
        model_type="bailing_hybrid",
        architectures=["BailingMoeV3ForCausalLM"],
        layer_group_size=2,
        moe_shared_expert_intermediate_size=WIDTH,
    ),
    _plain("deepseek"),
    _plain(
        "deepseek_v2",
        _LATENT_ATTENTION,
        topk_method="greedy",
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    ),
    _plain("deepseek_v3", _LATENT_ATTENTION),
    _plain("deepseek_v32", _LATENT_ATTENTION, _INDEXER),
    _plain(
        "deepseek_v41",
        _INDEXER,
        head_dim=64,
        q_lora_rank=64,
        qk_rope_head_dim=16,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=8,
        compress_ratios=[0, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        hc_mult=2,
        hc_sinkhorn_iters=3,
    ),
    _plain("dots1", scoring_func="noaux_tc"),
    _plain(
        "ernie4_5_moe", use_bias=False, moe_num_experts=EXPERTS, moe_k=2, moe_num_shared_experts=1
    ),
    _plain("exaone_moe", _ALTERNATING, is_moe_layer=[True, True]),
    _plain("gemma4_text", _ALTERNATING, _GEMMA4),
    _plain("glm4_moe", rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5),
    _plain("glm4_moe_lite", _LATENT_ATTENTION, num_nextn_predict_layers=0),
    _plain(
        "glm_moe_dsa",
        _LATENT_ATTENTION,
        _INDEXER,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
    _plain("gpt_oss", _ALTERNATING),
    _plain("granitemoe", _GRANITE),
    _plain(
        "granitemoehybrid",
        _GRANITE,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=WIDTH,
        mamba_n_heads=2,
        mamba_d_head=32,
        mamba_proj_bias=False,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
    ),
    _plain(
        "hunyuan",
        moe_topk=2,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=False,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    _plain(
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=0,
        expert_layer_period=1,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
    ),
    _plain("kimi_linear", _KIMI, model_max_length=512),
    _plain("laguna", _ALTERNATING, mlp_layer_types=["sparse", "sparse"]),
    _plain(
        "lfm2_moe",
        use_expert_bias=True,
        num_dense_layers=0,
        norm_eps=1e-6,
        conv_bias=True,
        conv_L_cache=3,
        layer_types=["conv", "full_attention"],
    ),
    _plain("longcat_flash", _LONGCAT, attention_method="MLA"),
    _plain("longcat_flash_ngram", _LONGCAT, ngram_vocab_size_ratio=3),
    _plain(
        "mellum",
        _ALTERNATING,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _WINDOW},
    ),
    _plain(
        "mimo_v2_flash",
        hybrid_layer_pattern=[1, 0],
        moe_layer_freq=[1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=8,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        layernorm_epsilon=1e-6,
        swa_rope_theta=1e4,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        v_head_dim=32,
        swa_head_dim=32,
        swa_v_head_dim=32,
        partial_rotary_factor=0.5,
    ),
    _plain("minimax", rotary_dim=16, shared_intermediate_size=WIDTH),
    _plain("mistral4", _MISTRAL4),
    _plain("mixtral"),
    _plain(
        "nemotron_h",
        hybrid_override_pattern=["M", "E", "*", "E"],
        mlp_bias=False,
        layer_norm_epsilon=1e-6,
        use_bias=False,
        use_conv_bias=True,
        moe_shared_expert_intermediate_size=WIDTH,
        mamba_num_heads=2,
        mamba_head_dim=32,
        mamba_proj_bias=False,
        ssm_state_size=32,
        conv_kernel=4,
        n_groups=1,
    ),
    _plain("olmoe"),
    _plain(
        "phimoe",
        original_max_position_embeddings=256,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.0] * 16,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        },
    ),
    _plain(
        "phixtral", num_vocab=VOCABULARY, model_dim=WIDTH, num_heads=2, num_layers=2, rotary_dim=16
    ),
    _plain("qwen2_moe"),
    _plain("qwen3_moe"),
    _plain("qwen3_next", _LINEAR_ATTENTION),
    _plain("solar_open", partial_rotary_factor=0.5),
    _plain(
        "step3p5",
        _ALTERNATING,
        num_attention_groups=2,
        moe_num_experts=EXPERTS,
        moe_top_k=2,
        share_expert_dim=WIDTH,
        moe_layers_enum="0,1",
    ),
)
_NESTED: Final = (
    _nested("gemma4", "gemma4_text", _ALTERNATING, _GEMMA4),
    _nested("kimi_k25", "deepseek_v3", _LATENT_ATTENTION),
    _nested(
        "kimi_k3",
        "kimi_linear",
        _KIMI,
        attn_res_block_size=2,
        routed_expert_hidden_size=WIDTH,
        latent_moe_use_norm=True,
    ),
    _nested("kimi_vl", "deepseek_v3", _LATENT_ATTENTION),
    _nested(
        "llama4",
        "llama4_text",
        num_hidden_layers=4,
        attention_chunk_size=32,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=WIDTH,
        rope_scaling=None,
        use_qk_norm=True,
        num_experts_per_tok=1,
    ),
    _nested(
        "minimax_m3_vl",
        "minimax_m3",
        rotary_dim=16,
        dense_intermediate_size=WIDTH,
        shared_intermediate_size=WIDTH,
    ),
    _nested("mistral3", "mistral4", _MISTRAL4),
    _nested(
        "muse_spark",
        "muse_spark_text",
        _ALTERNATING,
        post_norm_eps=1e-6,
        rope_parameters={"rope_theta": 1e4},
        layer_rope_theta=[1e4, 1e4],
        final_logit_softcapping=30.0,
        output_multiplier=1.0,
        moe_hidden_size=WIDTH,
        num_shared_experts=0,
    ),
    _nested("qwen3_5", "qwen3_5_text", _QWEN3_5),
    _nested("qwen3_5_moe", "qwen3_5_moe_text", _QWEN3_5),
    _nested("qwen3_vl_moe", "qwen3_moe"),
)
_PACKED: Final = Architecture(
    module="prism_hadamard_qwen35",
    config={
        "model_type": "prism_hadamard_qwen35",
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
        "vocab_size": VOCABULARY,
        "text_config": _merged({"model_type": "qwen3_5_text"}, _QWEN3_5, {"hidden_size": 128}),
    },
)
# What no table of numbers tells.
_FACTS: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v41": {"unbatched": "its cache cannot be merged"},
    "llama4": {"top_k": 1, "unbatched": "its chunked cache cannot be merged"},
    "muse_spark": {"metal_only": True},
    # A pack fixes its own packing in config.json, so that nothing else can be quantised.
    "prism_hadamard_qwen35": {"modes": ("float32",)},
}

ARCHITECTURES: Final = tuple(
    replace(one, **_FACTS.get(one.module, {})) for one in (*_PLAIN, *_NESTED, _PACKED)
)
