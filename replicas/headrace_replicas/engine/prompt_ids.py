"""Token ids of the canary's prompt: the one text that a replica ever encodes."""

from mlx_lm.tokenizer_utils import load as load_tokenizer

from headrace_replicas.engine.checkpoint import Checkpoint


def encode(checkpoint: Checkpoint, text: str) -> tuple[int, ...]:
    """The ids of a text in the checkpoint's own vocabulary, without a template."""
    return tuple(load_tokenizer(checkpoint.path).encode(text))
