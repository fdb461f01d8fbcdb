"""The two models of `make bench`, and the texts that they are fed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_serve.text.tokenizer import TextTokenizer
from tests.bench.generated_model import Shape
from tests.bench.topics import Topics
from tests.support.engines import DEMO_FOLDER, demo_checkpoint, load_on_cpu

TOPICS: Final = Topics(
    count=96, common=512, common_ratio=0.2, run_tokens=32, exponent=0.8, strength=3.0
)
# Few active bytes, because MLX's CPU backend is slow: 4 of 768 experts for a token. The largest
# public models have as many (Kimi K3: 896), but use more of them.
GENERATED: Final = Shape(
    layers=6,
    hidden=512,
    experts=768,
    top_k=4,
    expert_hidden=512,
    skew=0.0,
    shared=0.3,
    topics=TOPICS,
    packed_rest=False,
)
GENERATED_SHORT: Final = Shape(
    layers=3,
    hidden=512,
    experts=192,
    top_k=4,
    expert_hidden=512,
    skew=0.0,
    shared=0.3,
    topics=TOPICS,
    packed_rest=False,
)
_QUESTIONS: Final = (
    "Tell me a story about a fox named Vera.",
    "Count from 1 to 30.",
    "Give me a JSON object with name and age for Mira, who is 27.",
    "Tell me a story about a clock.",
    "List the days of the week.",
    "Tell me a story about a river.",
    "Tell me a story about an otter named Bo.",
    "Count from 10 to 60.",
)
_ANSWER_TOKENS: Final = 400
# Texts begin at different places of what the demo model says.
_SPARE_TOKENS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to be measured.

    Attributes:
        name: For the tables.
        folder: Its checkpoint.
        experts: Experts of a layer.
        top_k: Experts that a token uses.
        context_tokens: The longest text that it takes.
        text: Draws a text of some length; another number gives another text.
    """

    name: str
    folder: Path
    experts: int
    top_k: int
    context_tokens: int
    text: Callable[[int, int], Sequence[int]]


def demo_model(longest_tokens: int) -> Model:
    """The packaged model, whose routing is a trained one, with what it says itself.

    Args:
        longest_tokens: Of the texts that are wanted, those that its context takes.
    """
    checkpoint = demo_checkpoint()
    spoken = _conversations(checkpoint, longest_tokens + _SPARE_TOKENS)

    def text(length: int, number: int) -> Sequence[int]:
        begin = 97 * number % (len(spoken) - length)
        return spoken[begin : begin + length]

    return Model(
        name="demo model",
        folder=DEMO_FOLDER,
        experts=32,
        top_k=4,
        context_tokens=checkpoint.context_tokens,
        text=text,
    )


def _conversations(checkpoint: Checkpoint, least_tokens: int) -> list[int]:
    """Questions and the model's own answers, most likely token by most likely token."""
    tokenizer = TextTokenizer.from_folder(DEMO_FOLDER)
    model = load_on_cpu(checkpoint).model
    spoken: list[int] = []
    for question in cycle(_QUESTIONS):
        if len(spoken) >= least_tokens:
            break
        prompt = tokenizer.render_chat([{"role": "user", "content": question}])
        spoken += prompt
        cache = make_prompt_cache(model)
        logits = model(mx.array([prompt]), cache=cache)
        for _ in range(_ANSWER_TOKENS):
            token = mx.argmax(logits[0, -1]).item()
            assert isinstance(token, int)
            spoken.append(token)
            if token in checkpoint.eos_ids:
                break
            logits = model(mx.array([[token]]), cache=cache)
    return spoken


def generated_model(folder: Path, shape: Shape) -> Model:
    """A generated checkpoint that is already in its folder."""

    def text(length: int, number: int) -> Sequence[int]:
        return TOPICS.text(shape.vocabulary, length, seed=number)

    return Model(
        name="generated model",
        folder=folder,
        experts=shape.experts,
        top_k=shape.top_k,
        context_tokens=shape.context,
        text=text,
    )
