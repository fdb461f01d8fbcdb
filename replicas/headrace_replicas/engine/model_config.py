"""Reads numbers out of config.json and generation_config.json, each type-checked and bounded.

The numbers of a text model stand at the top level, or under `text_config` where the checkpoint
also sees or hears.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.architecture import EXPERT_COUNT_KEYS
from headrace_replicas.engine.json_files import (
    REMEDY,
    JsonObject,
    nested_object,
    read_object,
    whole_number,
)
from headrace_replicas.engine.safetensors_header import TensorEntry

# Far above every published model, far below what makes a size overflow.
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "hidden_size": (1, 2**20),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "vocab_size": (1, 2**24),
    "num_experts_per_tok": (0, 2**16),
    **dict.fromkeys(EXPERT_COUNT_KEYS, (0, 2**16)),
}
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
    "model_max_length",
)
_CONTEXT_BOUND = 2**40
UNSTATED_CONTEXT_TOKENS = 32_768
_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "embedding",
    "embeddings",
)
_TOKEN_ID_BOUND = 2**32


def check_numbers(config: JsonObject) -> None:
    """The sizes of a model must be integers that a model can have.

    Some families give one number per layer as a list; those, and null, pass.

    Raises:
        CheckpointError: Naming the key and what is allowed.
    """
    for where, key, value in _numbers(config, _BOUNDS):
        low, high = _BOUNDS[key]
        number = whole_number(value)
        if number is None or not low <= number <= high:
            raise CheckpointError(
                f"config.json: {where} is {value!r:.40}; it must be a whole number from {low} to "
                f"{high}. {REMEDY}"
            )


def read_context_tokens(config: JsonObject, tokenizer_limit: int | None) -> int | None:
    """Prompt and answer together, at most; None when no file tells.

    Raises:
        CheckpointError: A limit is no positive whole number.
    """
    for where, _, value in _numbers(config, _CONTEXT_KEYS):
        number = whole_number(value)
        if number is None or not 1 <= number <= _CONTEXT_BOUND:
            raise CheckpointError(
                f"config.json: {where} is {value!r:.40}; it must be a positive whole number. "
                f"{REMEDY}"
            )
        return number
    return tokenizer_limit


def read_vocab_size(config: JsonObject, tensors: Mapping[str, TensorEntry]) -> int:
    """Rows of the embedding: as configured, or else as the tensor has them.

    Raises:
        CheckpointError: Neither tells.
    """
    for _, _, value in _numbers(config, ("vocab_size",)):
        return whole_number(value) or 0
    for name, entry in tensors.items():
        parts = name.split(".")
        if parts[-1] == "weight" and parts[-2:-1][0:1] and parts[-2] in _EMBEDDINGS and entry.shape:
            return entry.shape[0]
    raise CheckpointError("config.json has no vocab_size, and no embedding tensor tells it.")


def read_eos_ids(config: JsonObject, folder: Path) -> frozenset[int]:
    """Stop tokens of generation_config.json, config.json and its text_config together.

    A generation_config.json that is damaged is refused, not passed over: without its stop tokens
    answers run on, and a cut file tells of a cut download.

    Raises:
        CheckpointError: A file is damaged, or an id is no token id.
    """
    path = folder / "generation_config.json"
    generation = read_object(path) if path.exists() else {}
    return (
        _eos_ids(generation, path)
        | _eos_ids(config, folder / "config.json")
        | _eos_ids(nested_object(config, "text_config"), folder / "config.json")
    )


def _eos_ids(owner: JsonObject, path: Path) -> frozenset[int]:
    value = owner.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = frozenset(
        number
        for item in (value if isinstance(value, list) else [value])
        if (number := whole_number(item)) is not None and 0 <= number < _TOKEN_ID_BOUND
    )
    if len(ids) != len(set(map(repr, value if isinstance(value, list) else [value]))):
        raise CheckpointError(f"{path}: eos_token_id is {value!r:.60}, no token ids. {REMEDY}")
    return ids


def _numbers(
    config: JsonObject, keys: "Mapping[str, object] | tuple[str, ...]"
) -> Iterator[tuple[str, str, object]]:
    """(where, key, value) of the keys that are there, the top level first."""
    for prefix, owner in (("", config), ("text_config.", nested_object(config, "text_config"))):
        for key in keys:
            value = owner.get(key)
            if value is not None and not isinstance(value, list):
                yield f"{prefix}{key}", key, value
