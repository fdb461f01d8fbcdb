"""Rendered conversations packed into blocks of tokens for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.demo_model.generator.dialogs import dialog
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.material import Material
from tools.demo_model.generator.render import BLOCK_TOKENS, Segment, segments

PROMPT_WEIGHT: Final = 0.1
"""Loss weight of the tokens that the model does not have to write (the others have 1)."""
THINKING_SHARE: Final = 0.3
"""Share of the conversations in which thinking is on."""
_OPEN_BLOCKS: Final = 16
_DIALOGS_AT_ONCE: Final = 64


class Block(NamedTuple):
    """One block for training; all arrays have the shape (BLOCK_TOKENS,).

    Attributes:
        tokens: Token ids.
        documents: The number of the conversation that a token belongs to, from 0 in each block.
        weights: Loss weight of each token as a target; 0 for the first of a conversation and
            for padding.
    """

    tokens: NDArray[np.int32]
    documents: NDArray[np.int32]
    weights: NDArray[np.float32]


class _Document(NamedTuple):
    tokens: list[int]
    weights: list[float]


@dataclass(slots=True)
class _OpenBlock:
    """A block that still takes conversations."""

    tokens: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def next_document(self) -> int:
        return self.documents[-1] + 1 if self.documents else 0

    def has_room_for(self, document: _Document) -> bool:
        return len(self.tokens) + len(document.tokens) <= BLOCK_TOKENS

    def add(self, document: _Document) -> None:
        self.documents += [self.next_document] * len(document.tokens)
        self.tokens += document.tokens
        self.weights += document.weights

    def close(self, padding: int) -> Block:
        """The block, padded with that token to its full length."""
        missing = BLOCK_TOKENS - len(self.tokens)
        return Block(
            np.array(self.tokens + [padding] * missing, np.int32),
            np.array(self.documents + [self.next_document] * missing, np.int32),
            np.array(self.weights + [0.0] * missing, np.float32),
        )


def blocks(tokenizer: Tokenizer, material: Material, seed: int) -> Iterator[Block]:
    """An endless stream of packed blocks, the same for the same seed and tokenizer.

    Conversations longer than a block are left out.

    Raises:
        ValueError: The tokenizer lacks the token that ends a conversation.
    """
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is None:
        raise ValueError("the tokenizer has no <|endoftext|>; use the one of the demo model")
    opened = [_OpenBlock() for _ in range(_OPEN_BLOCKS)]
    for document in _documents(tokenizer, Draw(seed, material), end):
        if len(document.tokens) > BLOCK_TOKENS:
            continue
        fitting = [block for block in opened if block.has_room_for(document)]
        if not fitting:
            fullest = max(range(_OPEN_BLOCKS), key=lambda i: len(opened[i].tokens))
            yield opened[fullest].close(end)
            opened[fullest] = _OpenBlock()
            fitting = [opened[fullest]]
        max(fitting, key=lambda block: len(block.tokens)).add(document)


def _documents(tokenizer: Tokenizer, draw: Draw, end: int) -> Iterator[_Document]:
    """The conversations in tokens with their weights, each ending with `end`."""
    while True:
        rendered = []
        for _ in range(_DIALOGS_AT_ONCE):
            made = dialog(draw)
            thinking = draw.chance(THINKING_SHARE)
            rendered.append(segments(made.messages, made.tools, thinking=thinking))
        texts = [segment.text for one in rendered for segment in one]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for one in rendered:
            yield _document([(segment, next(encoded).ids) for segment in one], end)


def _document(pieces: list[tuple[Segment, list[int]]], end: int) -> _Document:
    tokens: list[int] = []
    weights: list[float] = []
    for segment, ids in pieces:
        tokens += ids
        weights += [1.0 if segment.is_answer else PROMPT_WEIGHT] * len(ids)
    tokens.append(end)
    weights.append(PROMPT_WEIGHT)
    weights[0] = 0.0  # the first token has nothing before it to be predicted from
    return _Document(tokens, weights)
