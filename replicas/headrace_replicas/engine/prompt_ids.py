"""Token ids of the canary's prompt: the one text that a replica ever encodes."""

from mlx_lm.tokenizer_utils import load as load_tokenizer

from headrace_replicas.engine.checkpoint import Checkpoint


def prompt_ids(checkpoint: Checkpoint, question: str) -> tuple[int, ...]:
    """A question in the checkpoint's own chat format, or as plain text when it has none.

    A question in its own format gets a sharp answer, which small differences between devices do
    not change.
    """
    tokenizer = load_tokenizer(checkpoint.path)
    if not checkpoint.has_chat_template:
        return tuple(tokenizer.encode(question))
    messages = [{"role": "user", "content": question}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
