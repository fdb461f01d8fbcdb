"""MLX's affine quantisation: the codes, their packed form, and its imitation in training."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

GROUP: Final = 64
"""Weights along the last axis that share a scale and a bias."""
BITS: Final = 4
ROUTER_BITS: Final = 8
_WORD_BITS: Final = 32


class Quantised(NamedTuple):
    """A weight of shape (..., groups * GROUP) as codes; a value is code * scale + bias.

    Attributes:
        codes: Whole numbers as floats, shape (..., groups, GROUP).
        scales: Shape (..., groups, 1), rounded to bfloat16.
        biases: As `scales`.
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor


class Packed(NamedTuple):
    """A quantised weight as a checkpoint holds it.

    Attributes:
        weight: Codes in 32-bit words, lowest bits first.
        scales: bfloat16, shape (..., groups).
        biases: As `scales`.
    """

    weight: Tensor
    scales: Tensor
    biases: Tensor


def affine(weight: Tensor, bits: int) -> Quantised:
    """Quantise as `mlx.core.quantize` does: the edge of larger magnitude is hit exactly."""
    grouped = weight.float().unflatten(-1, (-1, GROUP))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    levels = float(2**bits - 1)
    is_negative = low.abs() > high.abs()
    scale = ((high - low) / levels).clamp_min(1e-7)
    scale = torch.where(is_negative, scale, -scale)
    edge = torch.where(is_negative, low, high)
    code_of_zero = torch.round(edge / scale)
    has_zero = code_of_zero != 0
    scale = torch.where(has_zero, edge / torch.where(has_zero, code_of_zero, 1.0), scale)
    bias = torch.where(has_zero, edge, 0.0)
    scale, bias = scale.bfloat16().float(), bias.bfloat16().float()
    codes = torch.round((grouped - bias) / torch.where(scale == 0, 1.0, scale)).clamp(0, levels)
    return Quantised(codes, scale, bias)


def rounded(weight: Tensor, share: Tensor, bits: int = BITS) -> Tensor:
    """The weight with a share of its rounding error added, in bfloat16.

    Args:
        weight: Any shape whose last axis is a multiple of `GROUP`.
        share: A scalar from 0 (as it is) to 1 (as the exported file has it).
        bits: Bits of a code.

    Returns:
        The mixed weight; gradients pass straight through to `weight`.
    """
    codes, scales, biases = affine(weight.detach(), bits)
    value = (codes * scales + biases).flatten(-2)
    return (weight + share * (value - weight.detach())).to(torch.bfloat16)


def pack(weight: Tensor, bits: int) -> Packed:
    """Quantise and pack a weight, on the CPU."""
    codes, scales, biases = affine(weight, bits)
    per_word = _WORD_BITS // bits
    words = codes.to(torch.int64).flatten(-2).unflatten(-1, (-1, per_word))
    shifts = torch.arange(per_word, device=weight.device) * bits
    packed = (words << shifts).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return Packed(
        packed.cpu().contiguous().view(torch.uint32),
        scales.squeeze(-1).bfloat16().cpu().contiguous(),
        biases.squeeze(-1).bfloat16().cpu().contiguous(),
    )


def expand(packed: Packed, bits: int) -> Tensor:
    """The values of a packed weight: rounded to bfloat16 as MLX does, held in float32."""
    words = packed.weight.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    shifts = torch.arange(_WORD_BITS // bits) * bits
    codes = (words[..., None] >> shifts) & (2**bits - 1)
    grouped = codes.flatten(-2).unflatten(-1, (-1, GROUP)).float()
    value = grouped * packed.scales.float()[..., None] + packed.biases.float()[..., None]
    return value.flatten(-2).bfloat16().float()
