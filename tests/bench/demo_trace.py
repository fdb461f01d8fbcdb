"""Which experts the demo model asks for, call by call, while it answers what it knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.engine.loading import LoadedModel, Streaming, load
from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.engines import DEMO_FOLDER, demo_checkpoint

PROMPTS = (
    "Who are you?",
    "Hello! How are you today?",
    "Count from 1 to 30.",
    "Count down from 20 to 1.",
    "What are the days of the week?",
    "Say the alphabet.",
    "What is 9 + 9?",
    "What is 7 times 8?",
    "Tom has 12 apples and gets 7 more. How many apples does he have?",
    "Which is bigger, 47 or 74?",
    "Sort these numbers: 5, 3, 9, 1.",
    "Repeat: the river runs by the mill",
    "Reverse this list: apple, lamp, river, stone",
    "Make a bullet list of: bread, milk, salt.",
    "Write in upper case: green mill",
    "Spell the word garden.",
    "What is the capital of France?",
    "What colour is the sky?",
    "What is the opposite of hot?",
    "Define river.",
    "Give me a JSON object with name and age for Mira, who is 27.",
    "Write a Python function that adds two numbers.",
    "Tell me a story about a fox named Vera.",
    "Tell me a story about a lighthouse and a lamp.",
    "Tell me a long story about a miller named Odo.",
    "Who will win the election in 2050?",
)
"""One or more for each of its skills."""

Call = tuple[tuple[int, ...], ...]
"""The distinct experts that one call of the model needed, for each of its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one prompt made of the experts.

    Attributes:
        prefill: The call that took the whole prompt.
        decode: A call for each token of the answer.
    """

    prefill: Call
    decode: tuple[Call, ...]


def load_streaming(slots: int) -> LoadedModel:
    """The demo model with so many of its 32 experts in memory, on MLX's CPU device."""
    streaming = Streaming(slots=slots, workers=4, clock=SystemClock(), on_progress=lambda: None)
    return load(demo_checkpoint(), device="cpu", dtype="auto", streaming=streaming)


@cache
def _tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(DEMO_FOLDER)


def prompt_ids(text: str) -> tuple[int, ...]:
    """The token ids of a one-message conversation."""
    return _tokenizer().render_chat([{"role": "user", "content": text}])


def answer(loaded: LoadedModel, prompt: Sequence[int], limit_tokens: int) -> Iterator[int]:
    """Greedy tokens, one by one; the caller may look at the model between two of them."""
    cache = make_prompt_cache(loaded.model)
    tokens = list(prompt)
    for _ in range(limit_tokens):
        logits = loaded.model(mx.array([tokens]), cache=cache)
        tokens = [int(np.argmax(np.array(logits[0, -1])))]
        if tokens[0] in loaded.checkpoint.eos_ids:
            return
        yield tokens[0]


def record(limit_tokens: int) -> list[Conversation]:
    """Let the demo model answer all prompts, and read its use counts after each call.

    With all experts but one in memory every layer streams, and hardly ever reads.
    """
    loaded = load_streaming(slots=31)
    assert loaded.streamed is not None
    uses = loaded.streamed.uses
    conversations: list[Conversation] = []
    for text in PROMPTS:
        calls: list[Call] = []
        before = uses.read()
        for _token in answer(loaded, prompt_ids(text), limit_tokens):
            after = uses.read()
            calls.append(_used(before, after))
            before = after
        conversations.append(Conversation(prefill=calls[0], decode=tuple(calls[1:])))
    loaded.streamed.reader.close()
    return conversations


def _used(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Call:
    return tuple(
        tuple(expert for expert in range(len(old)) if new[expert] > old[expert])
        for old, new in zip(before, after, strict=True)
    )
