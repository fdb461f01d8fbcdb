"""What must become of every broken checkpoint: refused with which words, or loaded."""

from typing import Final

from tests.support.checkpoint_breaks import BREAKS

# Before anything loads, without MLX: words that the error must contain.
REFUSED_BY_READING: Final[dict[str, tuple[str, ...]]] = {
    "empty_shard": ("model-00002-of-00003.safetensors", "empty", "incomplete download?"),
    "missing_shard": ("model-00002-of-00003.safetensors", "incomplete download?", "12 tensors"),
    "bad_index_json": ("model.safetensors.index.json", "not valid JSON"),
    "bad_offsets": (
        *("model-00002-of-00003.safetensors", "model.layers.1.mlp.switch_mlp.down_proj.weight"),
        *("claims 4 bytes", "needs 1048576"),
    ),
    "overlapping": ("gate_proj.weight", "down_proj.weight", "share the same bytes"),
    "huge_header": ("model-00001-of-00003.safetensors", "claims a header of 1152921504606846976"),
    "missing_tensor": ("no shard holds", "model.layers.1.mlp.switch_mlp.up_proj.weight"),
    "mode_unknown": ("'turboquant'", "Supported: affine with bits 1, 2, 3, 4, 5, 6, 8"),
    "awq": ("quant_method awq", "*.qweight", "mlx_lm.convert"),
    "model_type": ("'qwen9_hyper_moe'", "not known to the installed mlx-lm"),
    "experts_key_renamed": ("has no num_experts", "text_config.n_routed_experts"),
    "no_config": ("config.json is missing",),
    "bad_config": ("config.json is not valid JSON",),
    "bad_template": ("tokenizer_config.json", "does not parse", "line 1"),
    "no_tokenizer": ("tokenizer.json is missing",),
    "bad_tokenizer": ("tokenizer.json is damaged",),
    "bad_generation_config": ("generation_config.json is not valid JSON",),
}
# When the tensors meet the model class, before any of them is read.
REFUSED_BY_LOADING: Final[dict[str, tuple[str, ...]]] = {
    "wrong_shape": ("model.layers.0.mlp.gate.weight", "(8, 512)", "(512, 8)"),
}
# Loads and speaks the scripted text; the words must be in a warning, none means no warning.
LOADS: Final[dict[str, tuple[str, ...]]] = {
    "stale_index": ("model.safetensors.index.json is stale", "of-00007", "all 26 tensors"),
    "index_wrong_file": ("maps 1 tensors to a file", "model.layers.1.mlp.gate.weight"),
    "appledouble": (),
    "misaligned": ("26 tensors are not aligned",),
    "single_file": (),
    "no_index": (),
    "bits1": (),
    "bits3_claim": ("3 bits, group size 64", "6 of 6 packed tensors", "256 bits a scale"),
    "says_quantised": ("4 bits, group size 64", "no tensor is packed"),
    "no_template": (),
    "template_in_file": (),
    "eos_mismatch": (),
}
# Loads and speaks wrongly: only the canary can find it.
LOADS_DAMAGED: Final = frozenset({"flipped_bytes"})

if BREAKS.keys() != {*REFUSED_BY_READING, *REFUSED_BY_LOADING, *LOADS, *LOADS_DAMAGED}:
    raise AssertionError("every break needs exactly one verdict")
