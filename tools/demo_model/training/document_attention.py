"""Losses with attention inside each document of a packed block only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tools.demo_model.generator.render import BLOCK_TOKENS
from tools.demo_model.training.batches import Batch
from tools.demo_model.training.model import Losses, Model

LossOf = Callable[[Batch, Tensor], Losses]
"""The losses of a batch with a share of rounding."""


def fused_losses(model: Model, batch: int, device: torch.device) -> LossOf:
    """Losses on a GPU, compiled once for batches of that many blocks."""

    def step(tokens: Tensor, weights: Tensor, share: Tensor, mask: Any) -> Losses:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

        return model.losses(tokens, weights, share, attend, grouped=True)

    compiled = torch.compile(step, dynamic=False)
    make_mask = torch.compile(create_block_mask, dynamic=False)
    # The mask reads one fixed tensor, so that nothing is compiled again for the next batch.
    current = torch.zeros(batch, BLOCK_TOKENS, dtype=torch.int32, device=device)

    def is_seen(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (current[b, q] == current[b, k])

    def loss_of(rows: Batch, share: Tensor) -> Losses:
        current.copy_(rows.documents)
        mask = make_mask(is_seen, batch, None, BLOCK_TOKENS, BLOCK_TOKENS, device=device)
        return compiled(rows.tokens.long(), rows.weights, share, mask)

    return loss_of


def plain_losses(model: Model) -> LossOf:
    """Losses on a CPU, slow but with nothing to compile."""

    def loss_of(rows: Batch, share: Tensor) -> Losses:
        position = torch.arange(BLOCK_TOKENS)
        is_same = rows.documents[:, :, None] == rows.documents[:, None, :]
        mask = (is_same & (position[:, None] >= position))[:, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return model.losses(rows.tokens.long(), rows.weights, share, attend, grouped=False)

    return loss_of
