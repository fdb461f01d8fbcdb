"""Checks a checkpoint before anything loads, without MLX: gateways do it too.

Everything that can be told from the files' headers is told here; whether the tensors are those
that the model class wants is told by `loading`, before any of them is read.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.architecture import check_architecture
from headrace_replicas.engine.checkpoint_source import DEMO, resolve
from headrace_replicas.engine.json_files import (
    LARGE_FILE_BYTES,
    SMALL_FILE_BYTES,
    JsonObject,
    parse_object,
    read_bytes,
)
from headrace_replicas.engine.model_config import (
    UNSTATED_CONTEXT_TOKENS,
    check_numbers,
    read_context_tokens,
    read_eos_ids,
    read_vocab_size,
)
from headrace_replicas.engine.quantization import check_quantization
from headrace_replicas.engine.shards import ShardSet, read_shards
from headrace_replicas.engine.tokenizer_files import read_tokenizer

__all__ = ["DEMO", "Checkpoint", "read_checkpoint", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files passed every check that needs no MLX.

    Attributes:
        path: Its folder.
        config: config.json as it is.
        model_type: What mlx-lm builds.
        context_tokens: Prompt and answer together, at most, as the checkpoint states it.
        vocab_size: Rows of the embedding.
        eos_ids: Tokens that end an answer: the union of generation_config.json, config.json, the
            tokenizer's own and the one that the chat template writes after a turn.
        has_chat_template: Whether chat requests can be served.
        shards: The weight files, sorted by name; other weight files in the folder do not count.
        tensor_bytes: All tensors together.
        fingerprint: SHA-256, hex, over config.json, the files of tokenizer and template, and each
            shard's header and length. It does not read tensor data: a flipped byte in the data
            keeps it, and the canary finds that.
        warnings: What is odd and does no harm, for a person.
    """

    path: Path
    config: JsonObject
    model_type: str
    context_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    has_chat_template: bool
    shards: tuple[Path, ...]
    tensor_bytes: int
    fingerprint: str
    warnings: tuple[str, ...]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check everything but tensor data.

    Raises:
        CheckpointError: The checkpoint is broken or not supported; the message names the file,
            the tensor or the setting, and the remedy.
    """
    if not path.is_dir():
        raise CheckpointError(f"no such folder: {path}. Give the folder of a checkpoint.")
    raw_config = read_bytes(path / "config.json", limit_bytes=SMALL_FILE_BYTES)
    config = parse_object(raw_config, path / "config.json")
    model_type = check_architecture(config)
    check_numbers(config)
    config_eos_ids = read_eos_ids(config, path)
    tokenizer = read_tokenizer(path)
    shards = read_shards(path)
    tensors = shards.tensors
    quantization_warnings = check_quantization(config, path, tensors)
    vocab_size = read_vocab_size(config, tensors)
    eos_ids = config_eos_ids | tokenizer.eos_ids
    context_tokens = read_context_tokens(config, tokenizer.context_tokens)
    return Checkpoint(
        path=path,
        config=config,
        model_type=model_type,
        context_tokens=context_tokens or UNSTATED_CONTEXT_TOKENS,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        has_chat_template=tokenizer.has_chat_template,
        shards=tuple(header.path for header in shards.headers),
        tensor_bytes=sum(entry.size_bytes for entry in tensors.values()),
        fingerprint=_fingerprint(raw_config, tokenizer.files, shards),
        warnings=(
            *shards.warnings,
            *quantization_warnings,
            *tokenizer.warnings,
            *_limits_warnings(context_tokens, vocab_size, eos_ids),
        ),
    )


def _limits_warnings(
    context_tokens: int | None, vocab_size: int, eos_ids: frozenset[int]
) -> Iterable[str]:
    if context_tokens is None:
        yield (
            f"no file states a context length: {UNSTATED_CONTEXT_TOKENS} tokens are taken; set "
            "model.context_tokens"
        )
    if not any(token < vocab_size for token in eos_ids):
        yield "no file names a token that ends an answer: every answer runs to max_tokens"


def _fingerprint(raw_config: bytes, tokenizer_files: tuple[Path, ...], shards: ShardSet) -> str:
    digest = hashlib.sha256()

    def add(label: str, content: bytes) -> None:
        # Lengths keep the parts apart: no two lists of parts give the same stream.
        for part in (label.encode("utf-8", "surrogateescape"), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

    add("config.json", raw_config)
    for file in tokenizer_files:
        add(file.name, read_bytes(file, limit_bytes=LARGE_FILE_BYTES))
    for header in shards.headers:
        add("shard", f"{header.digest} {header.file_bytes}".encode())
    return digest.hexdigest()
