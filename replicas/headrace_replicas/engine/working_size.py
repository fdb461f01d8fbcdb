"""Tells what computing takes beside weights and KV cache: the buffers between a model's layers.

An upper bound, held against MLX's own count of its peak for every model file with routed experts
(tests/engine/test_memory_plan.py, on the CPU). What makes the bound is a chunk of a prompt:
decode steps compute the same for fewer tokens.

* Every matrix of a layer leaves a row of its output for each token, and every routed expert does
  for each token that picked it; activations, rotations and sums copy some of them. MLX frees each
  as soon as nothing needs it, but runs a few operations ahead.
* Attention scores are an array of heads x chunk x context, unless the backend has a kernel that
  never writes them down: Metal has, for plain attention with the head widths below.
"""

from dataclasses import dataclass
from typing import Final

from headrace_replicas.engine.cache_size import (
    HEADS_KEYS,
    HIDDEN_KEYS,
    UNCOMPRESSED,
    TextConfig,
    head_width,
    text_config,
)
from headrace_replicas.engine.footprint import WorkingSize
from headrace_replicas.engine.json_files import JsonObject

# Python and its libraries: 60 MiB for an engine and 105 inside a Ray Serve replica (Linux, without
# pages of files), and 10 to 20 more once it has served.
_PROCESS_BYTES: Final = 128 * 1024 * 1024
# With a GPU its driver and compiled kernels come on top; not measured on Metal.
_GPU_PROCESS_BYTES: Final = 512 * 1024 * 1024
# What is alive at a time, against one output of everything in a layer: measured 0.5 to 1.9.
_COPIES: Final = 2
# Hidden states beside a layer's own outputs: residual stream, norm, what the gate and the sum of
# the experts see; and for each routed expert its input, its output, and that in the tokens' order.
_HIDDEN_COPIES: Final = 4
_ROUTED_COPIES: Final = 3
# Copies of the attention scores, in quarters. Plain: the scores and a mask (measured 1.1 to 1.2).
# Latent attention adds the part of the positions as a mask of numbers, attention sinks a column:
# each copies twice more (3.1 to 3.6).
_SCORES: Final = 5
_COPIED_SCORES: Final = 14
# An indexer that picks what to attend to has scores of its own (1.9).
_INDEX_SCORES: Final = 8
# Head widths for which Metal's fused attention takes a prompt, in every version of MLX (mlx,
# backend/metal/scaled_dot_product_attention.cpp).
_FUSED_WIDTHS: Final = frozenset({64, 80, 128})
# Mamba's first version is a loop over tokens in Python whose states mlx-lm leaves to MLX at once.
_SCAN_STATES: Final = 16
_SCANNED_TYPES: Final = frozenset({"jamba"})
# Logits, their logarithms, and what filters and penalties make of them, in float32.
_LOGITS_BYTES: Final = 8 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Numbers that a model's matrices give for a token.

    Attributes:
        layer: All matrices together of the layer that has most, routed experts left out.
        expert: All matrices of one routed expert.
        vocabulary: The logits.
    """

    layer: int
    expert: int
    vocabulary: int


def working_size(
    config: JsonObject,
    widths: Widths,
    *,
    top_k: int,
    sinks: bool,
    load_bytes: int,
    number_bytes: int,
    on_gpu: bool,
) -> WorkingSize:
    """What computing takes at most.

    Args:
        config: config.json.
        widths: Of the model's matrices.
        top_k: Experts of a layer that one token uses.
        sinks: Whether attention has sinks.
        load_bytes: Of the largest resident tensor that is converted while it loads.
        number_bytes: Bytes of one number in the type that the engine computes in.
        on_gpu: Whether the engine computes on a GPU.
    """
    text = text_config(config)
    hidden = text.first(*HIDDEN_KEYS) or 0
    routed = top_k * (widths.expert + _ROUTED_COPIES * hidden) if widths.expert else 0
    numbers = _COPIES * (widths.layer + _HIDDEN_COPIES * hidden + routed) + _scanned(text, hidden)
    heads = text.first(*HEADS_KEYS) or 0
    latent = bool(text.first("kv_lora_rank")) and not text.types & UNCOMPRESSED
    fused = on_gpu and not latent and head_width(text, hidden) in _FUSED_WIDTHS
    quarters = 0 if fused else heads * (_COPIED_SCORES if latent or sinks else _SCORES)
    quarters += _INDEX_SCORES * (text.first("index_n_heads") or 0)
    return WorkingSize(
        process_bytes=_GPU_PROCESS_BYTES if on_gpu else _PROCESS_BYTES,
        load_bytes=load_bytes,
        token_bytes=numbers * number_bytes,
        context_bytes=heads * _unfolded(text) * number_bytes if latent else 0,
        pair_bytes=quarters * number_bytes // 4,
        request_bytes=widths.vocabulary * _LOGITS_BYTES,
    )


def _unfolded(text: TextConfig) -> int:
    """Numbers that latent attention makes of one cached token for each head: key and value."""
    return (text.first("qk_nope_head_dim") or 128) + (text.first("v_head_dim") or 128)


def _scanned(text: TextConfig, hidden: int) -> int:
    if text.types.isdisjoint(_SCANNED_TYPES):
        return 0
    channels = hidden * (text.first("mamba_expand") or 2)
    return _SCAN_STATES * channels * (text.first("mamba_d_state") or 16)
