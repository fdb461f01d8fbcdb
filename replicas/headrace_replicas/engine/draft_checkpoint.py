"""Reads the checkpoint of a draft model, and makes sure that its tokens are the model's tokens.

A draft model with another vocabulary would be fed other words than it is asked about. Nothing
wrong would come of it, because every guess is verified, and nothing right either.
"""

from typing import Final

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint, resolve
from headrace_replicas.engine.tokenizer_files import read_token_ids

_SETTING: Final = "engine.draft_model"


def read_draft(path: str, target: Checkpoint) -> Checkpoint:
    """Read and check everything of a draft model but tensor data.

    Args:
        path: `demo`, a folder, or a Hugging Face repository id.
        target: The model that it is to draft for.

    Raises:
        CheckpointError: It is broken or not supported, or its vocabulary is another one.
    """
    try:
        draft = read_checkpoint(resolve(path))
    except CheckpointError as error:
        raise CheckpointError(f"{_SETTING}: {error.message}", _SETTING) from error
    _require_same_tokens(draft, target)
    return draft


def _require_same_tokens(draft: Checkpoint, target: Checkpoint) -> None:
    ours, theirs = read_token_ids(draft.path), read_token_ids(target.path)
    if ours == theirs:
        return
    both = ours.keys() | theirs.keys()
    differing = sorted(token for token in both if ours.get(token) != theirs.get(token))
    token = differing[0]
    raise CheckpointError(
        f"{_SETTING}: {draft.path} has another vocabulary than {target.path}: {len(differing)} "
        f"tokens differ, {token!r:.80} for example is {_shown(ours.get(token))} there and "
        f"{_shown(theirs.get(token))} here. Take a draft model of the same family, or set "
        f"{_SETTING} to null.",
        _SETTING,
    )


def _shown(token_id: int | None) -> str:
    return "unknown" if token_id is None else f"id {token_id}"
