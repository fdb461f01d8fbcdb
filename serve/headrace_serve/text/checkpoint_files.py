"""Loads a checkpoint's tokenizer with transformers: local files only, no remote code, no noise."""

import json
import logging
from pathlib import Path
from typing import Any

from headrace_replicas.contract.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Any one of these holds a vocabulary. With none, transformers makes an empty one in silence."""

_READ_AS_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "config.json",
)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer as transformers builds it, on the `tokenizers` backend.

    Raises:
        CheckpointError: There is no tokenizer, or it does not load. The message names the file.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"No tokenizer in {folder}: looked for {', '.join(TOKENIZER_FILES)}. "
            "Copy the checkpoint's tokenizer files there."
        )
    try:
        loaded = _from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare Exception on a bad file
        raise CheckpointError(
            f"{_broken_file(folder)} in {folder} cannot be loaded: {error}. "
            "Fetch the checkpoint's tokenizer files again."
        ) from error
    if not hasattr(loaded, "backend_tokenizer"):
        raise CheckpointError(
            f"The tokenizer in {folder} exists only as Python code ({type(loaded).__name__}). "
            "Add the tokenizer.json of the same model."
        )
    _take_legacy_template(folder, loaded)
    return loaded


def _from_pretrained(folder: Path) -> Any:
    logger = logging.getLogger("transformers")
    logger.addFilter(_is_not_torch_advice)
    try:
        # Importing transformers takes two seconds, which the modules beside this need not pay.
        from transformers import AutoTokenizer  # noqa: PLC0415
    finally:
        logger.removeFilter(_is_not_torch_advice)
    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def _is_not_torch_advice(record: logging.LogRecord) -> bool:
    """Drops the advice to install PyTorch: models run in MLX here."""
    return "PyTorch was not found" not in record.getMessage()


def _broken_file(folder: Path) -> str:
    for name in _READ_AS_JSON:
        path = folder / name
        if path.is_file():
            try:
                json.loads(path.read_bytes())
            except ValueError:
                return name
    return next(name for name in TOKENIZER_FILES if (folder / name).is_file())


def _take_legacy_template(folder: Path, loaded: Any) -> None:
    """Some repositories keep the template where transformers looks only for processors."""
    path = folder / "chat_template.json"
    if loaded.chat_template is not None or not path.is_file():
        return
    try:
        loaded.chat_template = json.loads(path.read_bytes())["chat_template"]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} holds no chat template: {error}. Remove it.") from error
