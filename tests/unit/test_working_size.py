"""What computing takes, told from names, shapes and config.

MLX's own peaks are held against it in tests/engine/test_memory_plan.py.
"""

from typing import Any

import pytest

from headrace_replicas.engine.footprint import WorkingSize
from headrace_replicas.engine.model_sizes import measure_tensors
from headrace_replicas.engine.safetensors_header import DTYPE_BYTES, TensorEntry
from headrace_replicas.engine.working_size import Widths, working_size
from tests.support.tiny_shards import Spec

MIB = 2**20
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
WIDTHS = Widths(layer=300, expert=160, vocabulary=1000)
LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 100, "v_head_dim": 60}


def working(
    *,
    widths: Widths = WIDTHS,
    sinks: bool = False,
    load_bytes: int = 0,
    on_gpu: bool = False,
    **changes: Any,
) -> WorkingSize:
    return working_size(
        CONFIG | changes,
        widths,
        top_k=2,
        sinks=sinks,
        load_bytes=load_bytes,
        number_bytes=2 if on_gpu else 4,
        on_gpu=on_gpu,
    )


def test_a_token_takes_what_a_layer_and_its_experts_make_of_it() -> None:
    """Twice, because MLX runs ahead; a dense model has no experts' part."""
    assert working().token_bytes == 4 * 2 * (300 + 4 * 64 + 2 * (160 + 3 * 64))
    dense = Widths(layer=300, expert=0, vocabulary=1000)
    assert working(widths=dense).token_bytes == 4 * 2 * (300 + 4 * 64)


def test_logits_count_for_each_request() -> None:
    """In float32, whatever the engine computes in."""
    assert working().request_bytes == working(on_gpu=True).request_bytes == 1000 * 32


def test_attention_scores_count_where_they_are_written_down() -> None:
    """On a CPU always; Metal's kernel keeps them to itself for the usual widths of a head."""
    assert working().pair_bytes == 4 * 5 // 4 * 4
    assert [working(on_gpu=True, head_dim=width).pair_bytes for width in (64, 80, 128)] == [0] * 3
    assert working(on_gpu=True, head_dim=256).pair_bytes == 4 * 5 // 4 * 2


def test_latent_attention_and_sinks_copy_the_scores() -> None:
    """Latent attention also unfolds keys and values of the whole context, on every backend."""
    assert working(sinks=True).pair_bytes == 4 * 14 // 4 * 4
    assert working(**LATENT).pair_bytes == 4 * 14 // 4 * 4
    assert working(on_gpu=True, **LATENT).pair_bytes == 4 * 14 // 4 * 2
    assert working(**LATENT).context_bytes == 4 * (100 + 60) * 4
    whole = working(model_type="deepseek_v2", **LATENT)
    assert (whole.pair_bytes, whole.context_bytes) == (working().pair_bytes, 0)


def test_an_indexer_has_scores_of_its_own() -> None:
    """No kernel keeps them."""
    indexed = working(on_gpu=True, index_n_heads=6)
    assert indexed.pair_bytes == 6 * 8 // 4 * 2


def test_a_scan_in_python_leaves_its_states() -> None:
    """Only Jamba's, of the models with routed experts."""
    more = working(model_type="jamba", mamba_expand=2, mamba_d_state=16).token_bytes
    assert more - working().token_bytes == 4 * 16 * (2 * 64) * 16
    assert working(mamba_expand=2, mamba_d_state=16) == working()


def test_a_process_counts_and_a_gpu_makes_it_larger() -> None:
    """Python and libraries; then drivers and kernels too."""
    assert (working().process_bytes, working(on_gpu=True).process_bytes) == (128 * MIB, 512 * MIB)


@pytest.mark.parametrize(
    "experts",
    [
        {
            "model.layers.0.mlp.switch_mlp.up_proj.weight": ("U32", (8, 96, 8)),
            "model.layers.0.mlp.switch_mlp.up_proj.scales": ("BF16", (8, 96, 1)),
            "model.layers.0.mlp.switch_mlp.down_proj.weight": ("U32", (8, 64, 12)),
            "model.layers.0.mlp.switch_mlp.down_proj.bias": ("BF16", (8, 64)),
        },
        {
            f"model.layers.0.mlp.experts.{number}.{name}.weight": ("BF16", shape)
            for number in range(8)
            for name, shape in (("up_proj", (96, 64)), ("down_proj", (64, 96)))
        },
    ],
    ids=["stacked and packed", "one by one"],
)
def test_widths_are_those_of_the_matrices(experts: dict[str, Spec]) -> None:
    """Outputs of the widest layer, of one expert, and of the head; however they are stored."""
    tensors: dict[str, Spec] = experts | {
        "model.embed_tokens.weight": ("U32", (1000, 8)),
        "model.layers.0.self_attn.q_proj.weight": ("U32", (256, 8)),
        "model.layers.0.self_attn.q_proj.scales": ("BF16", (256, 1)),
        "model.layers.0.input_layernorm.weight": ("BF16", (64,)),
        "model.layers.0.mlp.gate.weight": ("BF16", (44, 64)),
        "model.layers.0.self_attn.sinks": ("BF16", (4,)),
        "vision_tower.blocks.0.attn.qkv.weight": ("BF16", (4096, 64)),
    }
    sizes = measure_tensors(
        CONFIG, {name: entry(*spec) for name, spec in tensors.items()}, float_bytes=4
    )
    # On a CPU scales, norms and the gate become float32; packed matrices are not converted.
    assert sizes.working == working(sinks=True, load_bytes=44 * 64 * 2)


def entry(dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    size = DTYPE_BYTES[dtype]
    for dimension in shape:
        size *= dimension
    return TensorEntry(dtype=dtype, shape=shape, start=0, end=size)
