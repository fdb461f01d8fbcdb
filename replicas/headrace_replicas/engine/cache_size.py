"""Tells from a config how large the KV cache of mlx-lm's model class grows.

Exact for plain and for latent attention (MLA). Elsewhere an upper bound for every model file with
routed experts: a layer counts as attending to everything unless the config names it otherwise in
one of the ways below, and a recurrent layer's state is taken as `_STATE_PER_CHANNEL` numbers for
each channel of the hidden state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from headrace_replicas.engine.footprint import CacheSize
from headrace_replicas.engine.json_files import JsonObject, nested_object, whole_number

_LAYERS: Final = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "num_transformer_layers",
)
HIDDEN_KEYS: Final = ("hidden_size", "model_dim", "d_model", "n_embd", "hidden_dim", "dim")
"""How model families spell the width of the hidden state."""
HEADS_KEYS: Final = ("num_attention_heads", "n_heads", "n_head", "num_heads", "num_query_heads")
"""How they spell the number of attention heads."""
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", *HEADS_KEYS)

UNCOMPRESSED: Final = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
"""Model classes that cache whole keys and values although their attention is latent."""
# Two attentions in each layer.
_DOUBLE: Final = frozenset({"longcat_flash", "longcat_flash_ngram"})
# Model files whose class keeps no more than the window that the config speaks of. Others have a
# window in their config too, and keep everything.
WINDOWED: Final = frozenset(
    {
        "afmoe",
        "cohere2",
        "exaone4",
        "exaone_moe",
        "gemma3_text",
        "gemma3n",
        "gemma4_text",
        "gpt_oss",
        "laguna",
        "llama",
        "llama4",
        "mellum",
        "mimo_v2_flash",
        "ministral3",
        "muse_glimmer",
        "muse_spark",
        "olmo3",
        "step3p5",
    }
)
# Recurrent layers in groups that end with one of full attention.
_GROUPED: Final = frozenset({"bailing_moe_linear", "bailing_hybrid", "bailing_moe_v3"})
_WINDOW_KEYS: Final = ("sliding_window", "sliding_window_size", "attention_chunk_size")
# A prefill chunk stands in the window's cache beside the window itself.
_CHUNK_TOKENS: Final = 1024
# The largest known is 390 (Nemotron-H: 128 heads of 64 x 128 for 2688 channels)).
_STATE_PER_CHANNEL: Final = 512
_STATE_BYTES: Final = 4  # kept in float32


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The config of the text model.

    Attributes:
        numbers: `text_config` where the checkpoint also sees or hears, else config.json itself.
        types: The model types that it and config.json name.
    """

    numbers: JsonObject
    types: frozenset[str]

    def first(self, *keys: str) -> int | None:
        """The first of these numbers that is there; of one for each layer the largest."""
        for key in keys:
            value = self.numbers.get(key)
            found = [
                number
                for item in (value if isinstance(value, list) else [value])
                if (number := whole_number(item)) is not None
            ]
            if found:
                return max(found)
        return None


class _Kind(Enum):
    """What a layer remembers of the tokens before."""

    FULL = "keys and values of all tokens"
    WINDOW = "keys and values of the last ones"
    STATE = "a state of constant size"
    NOTHING = "nothing"


def cache_size(config: JsonObject, *, number_bytes: int) -> CacheSize:
    """How large the cache is.

    Args:
        config: config.json.
        number_bytes: Bytes of one number in the type that the engine computes in.
    """
    text = text_config(config)
    if isinstance(text.numbers.get("compress_ratios"), list):
        return _compressed(text, number_bytes)
    hidden = text.first(*HIDDEN_KEYS) or 0
    kinds = _layer_kinds(text)
    window = text.first(*_WINDOW_KEYS) or 0
    if not window:
        kinds = [_Kind.FULL if kind is _Kind.WINDOW else kind for kind in kinds]
    caches = 2 if text.types & _DOUBLE else text.first("num_loops") or 1
    layer_bytes = _full_width(text, hidden) * number_bytes
    return CacheSize(
        token_bytes=kinds.count(_Kind.FULL) * caches * layer_bytes,
        layer_token_bytes=layer_bytes if _Kind.FULL in kinds else 0,
        window_token_bytes=kinds.count(_Kind.WINDOW) * _window_width(text, hidden) * number_bytes,
        window_tokens=window + _CHUNK_TOKENS,
        request_bytes=_recurrent_layers(text, kinds) * hidden * _STATE_PER_CHANNEL * _STATE_BYTES,
    )


def layer_count(config: JsonObject) -> int | None:
    """How many layers mlx-lm builds, or None when the config does not say."""
    return _layer_count(text_config(config))


def _layer_count(text: TextConfig) -> int | None:
    pattern = text.numbers.get("hybrid_override_pattern")
    return len(pattern) if isinstance(pattern, list | str) else text.first(*_LAYERS)


def text_config(config: JsonObject) -> TextConfig:
    """What a config says of the text model."""
    numbers = nested_object(config, "text_config") or config
    types = (config.get("model_type"), numbers.get("model_type"))
    return TextConfig(numbers, frozenset(str(name) for name in types if name is not None))


def _compressed(text: TextConfig, number_bytes: int) -> CacheSize:
    """DeepSeek V4.1: a window in each layer, and some layers keep one row for several tokens."""
    ratios, sources = text.numbers.get("compress_ratios"), text.numbers.get("kv_source_layer_ids")
    layers = text.first(*_LAYERS) or 0
    head = text.first("head_dim") or 512
    row = head + (text.first("index_head_dim") or 0)
    kept = [
        -(-row // ratio)
        for layer, item in enumerate(ratios if isinstance(ratios, list) else [])
        if (ratio := whole_number(item)) and (not isinstance(sources, list) or layer in sources)
    ]
    return CacheSize(
        token_bytes=sum(kept) * number_bytes,
        layer_token_bytes=max(kept, default=0) * number_bytes,
        window_token_bytes=layers * head * number_bytes,
        window_tokens=(text.first(*_WINDOW_KEYS) or 0) + _CHUNK_TOKENS,
    )


def _recurrent_layers(text: TextConfig, kinds: Sequence[_Kind]) -> int:
    """Layers with a state of constant size, also such that attend beside it."""
    if _Kind.STATE not in kinds and any(key.startswith(("mamba_", "ssm_")) for key in text.numbers):
        return len(kinds)
    return kinds.count(_Kind.STATE)


def _full_width(text: TextConfig, hidden: int) -> int:
    """Numbers that a layer with full attention keeps of a token."""
    index = 2 * (text.first("index_head_dim") or 0)  # mlx-lm keeps zeros beside the keys
    latent = text.first("kv_lora_rank")
    rope = text.first("qk_rope_head_dim") or 64
    if latent and not text.types & UNCOMPRESSED:
        return latent + rope + index
    if latent:
        heads = text.first(*HEADS_KEYS) or 0
        value = text.first("v_head_dim") or 128
        return heads * ((text.first("qk_nope_head_dim") or 128) + rope + value)
    if text.numbers.get("attention_k_eq_v") is True:
        global_heads = text.first("num_global_key_value_heads", *_KV_HEADS)
        return 2 * (global_heads or 0) * (text.first("global_head_dim", "head_dim") or 512)
    head = max(head_width(text, hidden), text.first("global_head_dim") or 0)
    return _plain_width(text, hidden, _KV_HEADS, head, "v_head_dim") + index


def _window_width(text: TextConfig, hidden: int) -> int:
    """Numbers that a layer with attention over a window keeps of a token."""
    head = text.first("swa_head_dim") or head_width(text, hidden)
    keys = ("swa_num_key_value_heads", *_KV_HEADS)
    return _plain_width(text, hidden, keys, head, "swa_v_head_dim")


def _plain_width(
    text: TextConfig, hidden: int, heads_keys: Sequence[str], head: int, value_key: str
) -> int:
    heads = text.first(*heads_keys)
    if heads is None:
        return 4 * hidden  # no family has heads more than twice as wide as its hidden state
    return heads * (head + (text.first(value_key) or head))


def head_width(text: TextConfig, hidden: int) -> int:
    """Numbers of one attention head, in the layers that attend to everything."""
    stated = text.first("head_dim")
    return stated or -(-hidden // (text.first(*HEADS_KEYS) or 1))


def _layer_kinds(text: TextConfig) -> list[_Kind]:
    """One kind for each layer, in the ways in which configs say it."""
    layers = _layer_count(text) or 0
    if text.first(*HEADS_KEYS) is None and text.numbers.get("head_dim") is None:
        return [_Kind.STATE] * layers  # no attention at all
    kinds = (_listed(text) or _periodic(text, layers))[:layers]
    kinds += [_Kind.FULL] * (layers - len(kinds))
    if not text.types & WINDOWED:
        return [_Kind.FULL if kind is _Kind.WINDOW else kind for kind in kinds]
    return kinds


def _listed(text: TextConfig) -> list[_Kind]:
    """Kinds that the config lists layer by layer."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        names = text.numbers.get(key)
        if isinstance(names, list | str) and names:
            return [_kind_of(str(name)) for name in names]
    flags = text.numbers.get("hybrid_layer_pattern")
    if isinstance(flags, list):
        return [_Kind.WINDOW if flag == 1 else _Kind.FULL for flag in flags]
    full = text.numbers.get("full_attn_idxs")
    first = 0
    if not isinstance(full, list):
        full, first = nested_object(text.numbers, "linear_attn_config").get("full_attn_layers"), 1
    if isinstance(full, list):
        layers = text.first(*_LAYERS) or 0
        return [_Kind.FULL if first + i in full else _Kind.STATE for i in range(layers)]
    return []


def _kind_of(name: str) -> _Kind:
    match name:
        case "*":
            return _Kind.FULL
        case "moe" | "mlp" | "E" | "-":
            return _Kind.NOTHING
        case _ if "sliding" in name or "chunked" in name:
            return _Kind.WINDOW
        case _ if "attention" in name and "linear" not in name:
            return _Kind.FULL
        case _:
            return _Kind.STATE


def _periodic(text: TextConfig, layers: int) -> list[_Kind]:
    """Kinds that the config tells by a period."""
    if period := text.first("attn_layer_period"):
        return _every(layers, period, text.first("attn_layer_offset") or 0, _Kind.STATE)
    if text.types & _GROUPED:
        period = text.first("layer_group_size") or 1
        whole = layers // period * period  # the layers after the last whole group are full ones
        return _every(whole, period, period - 1, _Kind.STATE)
    if period := text.first("full_attention_interval"):
        return _every(layers, period, period - 1, _Kind.STATE)
    period = 4 if "llama4" in text.types else text.first("sliding_window_pattern") or 1
    return _every(layers, period, period - 1, _Kind.WINDOW)


def _every(layers: int, period: int, offset: int, others: _Kind) -> list[_Kind]:
    return [_Kind.FULL if i % period == offset else others for i in range(layers)]
