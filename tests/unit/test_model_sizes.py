"""What a checkpoint takes, told from names, shapes and config alone."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace_replicas.engine.cache_size import WINDOWED, cache_size, layer_count
from headrace_replicas.engine.checkpoint import read_checkpoint, resolve
from headrace_replicas.engine.footprint import CacheSize, ModelSizes
from headrace_replicas.engine.model_sizes import TOP_K_KEYS, measure, measure_tensors
from headrace_replicas.engine.safetensors_header import DTYPE_BYTES, TensorEntry
from tests.support.tiny_shards import Spec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def sizes_of(
    tensors: dict[str, Spec], *, float_bytes: int | None = None, **changes: Any
) -> ModelSizes:
    return measure_tensors(
        CONFIG | changes,
        {name: entry(*spec) for name, spec in tensors.items()},
        float_bytes=float_bytes,
    )


def entry(dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    size = DTYPE_BYTES[dtype]
    for dimension in shape:
        size *= dimension
    return TensorEntry(dtype=dtype, shape=shape, start=0, end=size)


def models_folder() -> Path:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "models"


def test_the_demo_model_takes_exactly_this() -> None:
    """8 layers of 32 experts in 4 bits, 4 for a token; scales double on the CPU."""
    checkpoint = read_checkpoint(resolve("demo"))
    on_gpu = measure(checkpoint, dtype="auto", on_gpu=True)
    assert on_gpu.file_bytes == checkpoint.tensor_bytes == 23_083_520
    assert (on_gpu.unused_bytes, on_gpu.resident_bytes) == (0, 1_849_856)
    assert (len(on_gpu.layers), on_gpu.experts, on_gpu.top_k) == (8, 32, 4)
    assert on_gpu.slot_bytes(32) == 21_233_664
    first = on_gpu.layers[0]
    assert (first.path, first.read_bytes, first.memory_bytes) == (
        "model.layers.0.mlp",
        82_944,
        82_944,
    )
    assert on_gpu.cache == CacheSize(
        token_bytes=8 * 2 * 2 * 64 * 2, layer_token_bytes=2 * 2 * 64 * 2, window_tokens=1024
    )
    on_cpu = measure(checkpoint, dtype="auto", on_gpu=False)
    assert on_cpu.resident_bytes == 2_061_312
    assert (on_cpu.layers[0].read_bytes, on_cpu.layers[0].memory_bytes) == (82_944, 92_160)
    assert on_cpu.cache.token_bytes == 2 * on_gpu.cache.token_bytes
    # Only what computing takes depends on where it is done.
    narrow = measure(checkpoint, dtype="bfloat16", on_gpu=False)
    assert replace(narrow, working=on_gpu.working) == on_gpu
    wide = measure(checkpoint, dtype="float32", on_gpu=True)
    assert replace(wide, working=on_cpu.working) == on_cpu


def test_measuring_needs_no_mlx() -> None:
    """A plan can be made where there is no GPU and no memory."""
    program = (
        "import sys\n"
        "from headrace_replicas.engine.budget import draw_up\n"
        "from headrace_replicas.engine.checkpoint import read_checkpoint, resolve\n"
        "from headrace_replicas.contract.settings import EngineSettings\n"
        "draw_up(read_checkpoint(resolve('demo')), EngineSettings(), context_tokens=None,"
        " on_gpu=False)\n"
        "assert not any(name.split('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.switch_mlp.up_proj.weight",
        "model.layers.1.mlp.experts.up_proj.weight",
        "model.layers.1.mlp.experts.switch_mlp.up_proj.weight",
        "model.layers.1.experts.switch_glu.up_proj.weight",
        "model.layers.1.block_sparse_moe.switch_mlp.up_proj.weight",
        "model.layers.1.block_sparse_moe.input_linear.weight",
        "model.layers.1.moe.up_proj.weight",
        "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
        "transformer.h.1.moe.switch_mlp.fc1.weight",
        "backbone.layers.1.mixer.switch_mlp.fc1.weight",
    ],
)
def test_stacked_experts_are_known_by_their_first_dimension(name: str) -> None:
    """In every layout that mlx-lm writes or reads."""
    sizes = sizes_of({name: ("BF16", (8, 32, 64)), "model.norm.weight": ("BF16", (64,))})
    assert sizes.resident_bytes == 128
    assert [(one.experts, one.read_bytes) for one in sizes.layers] == [(8, 32 * 64 * 2)]


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1.mlp.experts.{}.gate_proj.weight",
        "model.layers.1.block_sparse_moe.experts.{}.w1.weight",
        "layers.1.ffn.experts.{}.w1.weight",
        "transformer.h.1.moe.mlp.{}.fc1.weight",
    ],
)
def test_single_experts_are_known_by_their_number(pattern: str) -> None:
    """In the layouts of the original checkpoints; all of one layer together."""
    tensors: dict[str, Spec] = {pattern.format(number): ("F16", (32, 64)) for number in range(8)}
    sizes = sizes_of(tensors)
    assert sizes.resident_bytes == 0
    assert [(one.experts, one.read_bytes) for one in sizes.layers] == [(8, 32 * 64 * 2)]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.post_expert_norm.weight",
        "model.layers.1.self_attn.embed_q.weight",
        "model.layers.1.self_attn.o_a_proj.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
    ],
)
def test_what_every_token_uses_is_resident(name: str) -> None:
    """Shared experts, routers, norms among the experts, and attention heads as many as experts."""
    shape: tuple[int, ...] = (8, 32, 64)
    if "experts.post" in name:
        shape = (64,)
    elif ".gate." in name:
        shape = (8, 64)
    sizes = sizes_of({name: ("BF16", shape)})
    assert sizes.layers == ()
    assert sizes.resident_bytes == entry("BF16", shape).size_bytes


def test_packed_experts_keep_their_words_and_double_their_scales() -> None:
    """On a CPU real numbers become float32; bytes per expert in memory and in the file differ."""
    stem = "model.layers.0.mlp.switch_mlp.up_proj"
    tensors: dict[str, Spec] = {
        f"{stem}.weight": ("U32", (8, 32, 8)),
        f"{stem}.scales": ("BF16", (8, 32, 1)),
        f"{stem}.biases": ("BF16", (8, 32, 1)),
    }
    [shipped] = sizes_of(tensors).layers
    assert shipped.read_bytes == shipped.memory_bytes == 32 * 8 * 4 + 2 * 32 * 2
    [computed] = sizes_of(tensors, float_bytes=4).layers
    assert computed.read_bytes == shipped.read_bytes
    assert computed.memory_bytes == 32 * 8 * 4 + 2 * 32 * 4


def test_other_packings_count_as_they_are() -> None:
    """Bytes of mxfp4 stay in every type, its biases follow; 8-bit floats become bfloat16."""
    stem = "model.layers.0.mlp.experts"
    tensors: dict[str, Spec] = {
        f"{stem}.gate_up_proj_blocks": ("U8", (8, 64, 2, 16)),
        f"{stem}.gate_up_proj_scales": ("U8", (8, 64, 2)),
        f"{stem}.gate_up_proj_bias": ("BF16", (8, 64)),
    }
    [one] = sizes_of(tensors, float_bytes=4).layers
    assert (one.read_bytes, one.memory_bytes) == (64 * 34 + 128, 64 * 34 + 256)
    fp8 = sizes_of({"model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (64, 64))})
    assert fp8.resident_bytes == 2 * 64 * 64


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.blocks.0.attn.qkv.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "multi_modal_projector.linear_1.weight",
        "model.audio_tower.layers.0.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
        "model.mtp_layers.0.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight",
    ],
)
def test_what_mlx_lm_drops_is_neither_resident_nor_an_expert(name: str) -> None:
    """Towers, and layers beyond the last that only predict further tokens."""
    sizes = sizes_of({name: ("BF16", (64, 64)), "model.norm.weight": ("BF16", (64,))})
    assert (sizes.unused_bytes, sizes.resident_bytes, sizes.layers) == (64 * 64 * 2, 128, ())
    assert sizes.file_bytes == 64 * 64 * 2 + 128


def test_a_model_class_that_sees_keeps_its_tower() -> None:
    """It is loaded, so it takes memory."""
    tensors: dict[str, Spec] = {"model.vision_tower.conv.weight": ("BF16", (64, 64))}
    assert sizes_of(tensors, model_type="muse_spark").resident_bytes == 64 * 64 * 2


def test_experts_that_cannot_be_streamed_are_resident() -> None:
    """In dbrx each expert is a module of its own."""
    tensors: dict[str, Spec] = {
        f"transformer.blocks.0.ffn.experts.{number}.w1.weight": ("BF16", (64, 64))
        for number in range(8)
    }
    sizes = sizes_of(tensors, model_type="dbrx")
    assert (sizes.layers, sizes.resident_bytes) == ((), 8 * 64 * 64 * 2)


def test_an_embedding_is_looked_up_only_beside_a_head_of_its_own() -> None:
    """A tied one is multiplied with, whole, for every token."""
    tensors: dict[str, Spec] = {"model.embed_tokens.weight": ("BF16", (100, 64))}
    assert sizes_of(tensors).lookup_bytes == 0
    tensors["lm_head.weight"] = ("BF16", (100, 64))
    untied = sizes_of(tensors)
    assert (untied.lookup_bytes, untied.resident_bytes) == (12_800, 25_600)
    assert untied.active_bytes == 12_800


def test_the_numbers_of_a_model_that_sees_stand_under_text_config() -> None:
    """And are found there."""
    text = CONFIG | {"num_experts": 8, "num_experts_per_tok": 3}
    sizes = measure_tensors(
        {"model_type": "qwen3_vl_moe", "text_config": text},
        {"language_model.model.layers.0.mlp.switch_mlp.up.weight": entry("F32", (8, 4, 4))},
        float_bytes=None,
    )
    assert (sizes.top_k, sizes.experts) == (3, 8)
    assert sizes.cache.token_bytes == 2 * 2 * 2 * 16 * 4


def test_without_a_number_of_experts_for_a_token_all_count() -> None:
    """Too many slots are safe, too few are not."""
    tensors: dict[str, Spec] = {"model.layers.0.mlp.switch_mlp.up.weight": ("F32", (8, 4, 4))}
    assert sizes_of(tensors, num_experts_per_tok=None).top_k == 8


def cache(**config: Any) -> CacheSize:
    return cache_size(CONFIG | config, number_bytes=2)


def test_plain_attention_keeps_keys_and_values_of_each_head() -> None:
    """2 layers x 2 heads x (16 + 16) numbers x 2 bytes; values may be of another width."""
    assert cache().token_bytes == 2 * 2 * (16 + 16) * 2
    assert cache(v_head_dim=8).token_bytes == 2 * 2 * (16 + 8) * 2
    assert cache(head_dim=None).token_bytes == 2 * 2 * (16 + 16) * 2
    assert cache(num_key_value_heads=None).token_bytes == 2 * 4 * (16 + 16) * 2


LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 100,
}


def test_latent_attention_keeps_one_row_for_all_heads() -> None:
    """kv_lora_rank + rope; deepseek_v2's class keeps whole keys and values all the same."""
    assert cache(model_type="deepseek_v3", **LATENT).token_bytes == 2 * (512 + 64) * 2
    assert cache(model_type="deepseek_v2", **LATENT).token_bytes == 2 * 4 * (128 + 64 + 100) * 2
    indexed = cache(model_type="deepseek_v32", **LATENT, index_head_dim=128)
    assert indexed.token_bytes == 2 * (512 + 64 + 2 * 128) * 2
    double = cache(model_type="longcat_flash", num_hidden_layers=None, num_layers=2, **LATENT)
    assert double.token_bytes == 2 * 2 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("config", "full", "window", "state"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, 1, 0, 1),
        ({"layer_types": ["mamba", "attention"]}, 1, 0, 1),
        ({"layers_block_type": ["mamba", "attention"]}, 1, 0, 1),
        ({"hybrid_override_pattern": "ME*-M"}, 1, 0, 2),
        ({"full_attention_interval": 2}, 1, 0, 1),
        ({"full_attn_idxs": [1]}, 1, 0, 1),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}, 1, 0, 1),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, 1, 0, 1),
        (
            {"model_type": "bailing_moe_linear", "layer_group_size": 2, "num_hidden_layers": 5},
            3,
            0,
            2,
        ),
        ({"model_type": "bailing_moe", "layer_group_size": 2}, 2, 0, 0),
        (
            {
                "model_type": "gpt_oss",
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 128,
            },
            1,
            1,
            0,
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
            2,
            0,
            0,
        ),
        (
            {
                "model_type": "gemma2",
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 128,
            },
            2,
            0,
            0,
        ),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 2, "sliding_window": 128},
            1,
            1,
            0,
        ),
        (
            {
                "model_type": "mimo_v2_flash",
                "hybrid_layer_pattern": [1, 0],
                "sliding_window_size": 128,
            },
            1,
            1,
            0,
        ),
        (
            {"model_type": "llama4", "attention_chunk_size": 128, "num_hidden_layers": 4},
            1,
            3,
            0,
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": 128}, 2, 0, 0),
    ],
)
def test_layers_are_told_apart_as_configs_tell_them(
    config: dict[str, Any], full: int, window: int, state: int
) -> None:
    """Full attention grows, a window does not, a recurrent state is constant."""
    size = cache(**config)
    width = 2 * (16 + 16) * 2
    assert size.token_bytes == full * width
    assert size.window_token_bytes == window * width
    assert size.request_bytes == state * 64 * 512 * 4
    assert size.window_tokens == (128 if window else 0) + 1024 or not window


def test_gemma4_keeps_few_wide_heads_in_its_full_layers() -> None:
    """Their number and width are their own."""
    size = cache(
        model_type="gemma4_text",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=128,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        global_head_dim=32,
    )
    assert (size.token_bytes, size.window_token_bytes) == (1 * 2 * 32 * 2, 2 * 2 * 16 * 2)


def test_deepseek_v41_keeps_one_row_for_several_tokens() -> None:
    """And a window in each layer."""
    size = cache(
        model_type="deepseek_v41",
        compress_ratios=[0, 4],
        kv_source_layer_ids=[1],
        index_head_dim=8,
        sliding_window=128,
    )
    assert (size.token_bytes, size.window_token_bytes) == ((16 + 8) // 4 * 2, 2 * 16 * 2)


def test_a_recurrent_state_beside_attention_counts() -> None:
    """Each layer of falcon_h1 has both."""
    size = cache(model_type="falcon_h1", mamba_d_state=256)
    assert (size.token_bytes, size.request_bytes) == (256, 2 * 64 * 512 * 4)


def test_a_model_without_attention_has_states_alone() -> None:
    """Mamba."""
    size = cache(num_attention_heads=None, head_dim=None)
    assert (size.token_bytes, size.request_bytes) == (0, 2 * 64 * 512 * 4)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, 2),
        ({"hybrid_override_pattern": "ME*E"}, 4),
        ({"num_hidden_layers": None, "n_layers": 7}, 7),
        ({"num_hidden_layers": None}, None),
        ({"text_config": {"num_hidden_layers": 3}}, 3),
    ],
)
def test_the_number_of_layers_has_many_names(config: dict[str, Any], layers: int | None) -> None:
    """A pattern that spells the layers out decides."""
    assert layer_count(CONFIG | config) == layers


def test_model_types_with_a_window_are_those_whose_class_keeps_one() -> None:
    """Told from the sources of the installed mlx-lm."""
    folder = models_folder()
    for name in WINDOWED:
        source = (folder / f"{name}.py").read_text("utf-8")
        assert re.search(r"\b(Rotating|Chunked)KVCache\(", source), name


def test_every_model_file_with_routed_experts_names_its_top_k_as_known() -> None:
    """A new spelling in mlx-lm shows here, not as a plan that keeps all experts."""
    for file in sorted(models_folder().glob("*.py")):
        source = file.read_text("utf-8")
        if re.search(r"\bSwitch(GLU|MLP)\(", source) and file.stem != "switch_layers":
            assert any(re.search(rf"\b{key}\b", source) for key in TOP_K_KEYS), file.stem
