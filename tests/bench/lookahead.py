"""How well the next layer's gate, asked too early, foretells its choice.

    python -m tests.bench.lookahead

Look-ahead reads experts of the next layer before its gate has spoken, as that gate would choose
from this layer's input. Prints, for the demo model's trained gates: precision and recall of the
first few guesses, and of the guesses that would have been read how many were needed, and of the
misses how many were foreseen. Prefetching was seen to lose below a precision of about 0.9.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.engine.experts.slots import SlotTable
from headrace_replicas.engine.prompt_ids import prompt_ids
from tests.support.engines import demo_checkpoint, load_on_cpu

PROMPTS = (
    "Tell me a story about a fox named Vera.",
    "Count from 1 to 30.",
    "Tell me a story about a bear named Otto.",
)
TOKENS = 90
GUESSES = (1, 2, 3, 4, 6, 8)
SHARES = (0.5, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One layer and token.

    Attributes:
        chosen: The experts that the gate chose.
        ranked: All experts as the gate ranks them on the layer before; empty for the first layer.
    """

    chosen: tuple[int, ...]
    ranked: tuple[int, ...]


def choices(model: Any, prompt: Sequence[int], top_k: int) -> Iterator[list[Choice]]:
    """What each layer chose for each generated token, and what was guessed one layer earlier."""
    inputs: list[mx.array] = []
    blocks = [layer.mlp for layer in model.model.layers]
    kind = type(blocks[0])

    def call(self: Any, x: mx.array) -> mx.array:
        inputs.append(x)
        output: mx.array = kind.__call__(self, x)
        return output

    watched = type(f"Watched{kind.__name__}", (kind,), {"__call__": call})
    for block in blocks:
        block.__class__ = watched
    cache = make_prompt_cache(model)
    token = mx.argmax(model(mx.array([prompt]), cache=cache)[:, -1], axis=-1)
    for _ in range(TOKENS):
        inputs.clear()
        token = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        ranked = [_ranked(block.gate, x) for block, x in zip(blocks, inputs, strict=True)]
        early = [_ranked(block.gate, x) for block, x in zip(blocks[1:], inputs[:-1], strict=True)]
        yield [
            Choice(chosen=own[:top_k], ranked=guess)
            for own, guess in zip(ranked, ((), *early), strict=True)
        ]
    for block in blocks:
        block.__class__ = kind


def _ranked(gate: Any, x: mx.array) -> tuple[int, ...]:
    return tuple(np.argsort(-np.array(gate(x)[0, -1])).tolist())


def foreseen(tokens: Sequence[Sequence[Choice]], slots: int, guesses: int) -> tuple[float, float]:
    """(share of the guesses to read that were needed, share of the misses that were foreseen)."""
    tables = [SlotTable(slots) for _ in tokens[0]]
    read = needed = missed = 0
    for token in tokens:
        for table, choice in zip(tables, token, strict=True):
            if choice.ranked:
                wanted = {e for e in choice.ranked[:guesses] if e not in table}
                read += len(wanted)
                needed += len(wanted & set(choice.chosen))
                missed += sum(expert not in table for expert in choice.chosen)
            table.place(choice.chosen)
    return needed / max(read, 1), needed / max(missed, 1)


def main() -> int:
    """Print the table."""
    checkpoint = demo_checkpoint()
    model: Any = load_on_cpu(checkpoint).model
    block = model.model.layers[0].mlp
    experts, top_k = block.num_experts, block.top_k
    tokens = [
        token
        for prompt in PROMPTS
        for token in choices(model, prompt_ids(checkpoint, prompt), top_k)
    ]
    print("guesses precision recall" + "".join(f"  {s:.0%}: needed foreseen" for s in SHARES))
    for count in GUESSES:
        pairs = [
            len(set(c.ranked[:count]) & set(c.chosen))
            for token in tokens
            for c in token
            if c.ranked
        ]
        hit = sum(pairs) / len(pairs)
        line = f"{count:>7} {hit / count:>9.2f} {hit / top_k:>6.2f}"
        for share in SHARES:
            useful, seen = foreseen(tokens, int(experts * share), count)
            line += f"  {useful:>11.2f} {seen:>8.2f}"
        print(line)
    print("lookahead: a guess pays when it is needed nine times in ten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
