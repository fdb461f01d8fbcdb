"""Finds the folder of a checkpoint: the packaged demo, a local folder, or Hugging Face's hub."""

from importlib.resources import files
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headrace_replicas.contract.errors import CheckpointError

DEMO = "demo"

_SETTINGS_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "spiece.model"]
_WEIGHT_PATTERNS = ("model*.safetensors", "*.safetensors")
# What the hub's HTTP library raises when a connection breaks; which library that is, is its choice.
_BrokenConnection: type[Exception] = HfHubHTTPError.__bases__[0]


def resolve(path: str, revision: str | None = None) -> Path:
    """The folder that holds a checkpoint's files, downloaded where need be.

    Args:
        path: `demo`, a local folder (`~` is the home folder), or a repository id of the hub.
        revision: Branch, tag or commit of a repository; None takes `main`.

    Raises:
        CheckpointError: There is no such folder or repository, it may not be read, or it is not
            in the cache and the hub cannot be reached.
    """
    if path == DEMO:
        return Path(str(files("headrace_replicas"))) / "demo_model"
    if not path:
        raise CheckpointError(_no_such_folder(path), "model.path")
    try:
        local = Path(path).expanduser()
        if local.is_dir():
            return local.resolve()
        is_file = local.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no home, a NUL byte
        raise CheckpointError(f"{path!r:.200} is no path: {error}.", "model.path") from error
    if is_file:
        raise CheckpointError(
            f"{path} is a file. Give the folder that holds the checkpoint.", "model.path"
        )
    if path.startswith(("/", ".", "~")):
        raise CheckpointError(_no_such_folder(path), "model.path")
    return _download(path, revision)


def _no_such_folder(path: str) -> str:
    return (
        f"no such folder: {path!r:.200}. Give `{DEMO}`, the folder of a checkpoint, or a Hugging "
        "Face repository id (owner/name)."
    )


def _download(repository: str, revision: str | None) -> Path:
    """Settings and `model*.safetensors`; other safetensors files only when there are no such."""
    folder = Path()
    for pattern in _WEIGHT_PATTERNS:
        folder = _snapshot(repository, revision, [*_SETTINGS_PATTERNS, pattern])
        if next(folder.glob(pattern), None):
            break
    return folder


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (HFValidationError, OSError, _BrokenConnection) as error:
        raise CheckpointError(_explain(error, repository, revision), "model.path") from error


def _explain(error: Exception, repository: str, revision: str | None) -> str:
    wanted = f"Hugging Face repository {repository!r} at revision {revision or 'main'!r}"
    match error:
        case HFValidationError():
            return _no_such_folder(repository)
        case GatedRepoError():
            return (
                f"{wanted} is gated: accept its terms on its page, then set HF_TOKEN or run "
                "`hf auth login`."
            )
        case RepositoryNotFoundError():
            return (
                f"there is neither a folder nor a Hugging Face repository {repository!r}: check "
                "the spelling; a private repository needs HF_TOKEN."
            )
        case RevisionNotFoundError():
            return f"{wanted} does not exist: correct `model.revision`."
        case LocalEntryNotFoundError():
            return (
                f"{wanted} is not whole in the local cache, and the hub cannot be reached: connect "
                "this host once (and unset HF_HUB_OFFLINE), or give a local folder."
            )
        case _:
            return f"{wanted} could not be downloaded ({error}): try again."
