"""Qwen3-MoE in plain PyTorch, with the 4-bit rounding of the exported file mixed in.

The maths is that of `transformers`' `Qwen3MoeForCausalLM` (`compare_logits` shows it). Weights are
held as MLX holds them: experts are stacked in one array (experts, out, in), and gate and up
projection lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.training.quantisation import ROUTER_BITS, rounded
from tools.demo_model.training.shape import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over queries, keys and values of shape (batch, heads, tokens, head_dim)."""


class Losses(NamedTuple):
    """What a step is judged by, each a scalar.

    Attributes:
        weighted: Next-token loss with the weights of the block.
        assistant: Plain next-token loss on what the assistant writes.
        balance: Load-balancing loss with a small router z-loss, mean of the layers.
    """

    weighted: Tensor
    assistant: Tensor
    balance: Tensor


class _Spread(torch.autograd.Function):
    """The rows of x (tokens, hidden), repeated k times and in the order of their experts.

    With its own gradient because a plain gather sums it by slow scattered additions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """The rows of y (tokens * k, hidden), back from the order of experts to that of tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention, for one document per row."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * weight).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def _weight(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def _ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class Layer(nn.Module):
    """One layer: attention and experts, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = c = shape
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        deep = 0.02 / (2 * c.layers) ** 0.5
        self.q, self.k, self.v = _weight(q, c.hidden), _weight(kv, c.hidden), _weight(kv, c.hidden)
        self.o = _weight(c.hidden, q, std=deep)
        self.q_norm, self.k_norm = _ones(c.head_dim), _ones(c.head_dim)
        self.norm1, self.norm2 = _ones(c.hidden), _ones(c.hidden)
        self.router = _weight(c.experts, c.hidden)
        self.gate_up = _weight(c.experts, 2 * c.inter, c.hidden)
        self.down = _weight(c.experts, c.hidden, c.inter, std=deep)

    def attention(
        self, x: Tensor, share: Tensor, turn: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Self-attention of x (batch, tokens, hidden); `turn` is cosine and sine of RoPE."""
        c = self.shape
        b, t, _ = x.shape
        q = functional.linear(x, rounded(self.q, share)).view(b, t, c.heads, c.head_dim)
        k = functional.linear(x, rounded(self.k, share)).view(b, t, c.kv_heads, c.head_dim)
        v = functional.linear(x, rounded(self.v, share)).view(b, t, c.kv_heads, c.head_dim)
        q = _rotated(_rms(q, self.q_norm, c.eps).transpose(1, 2), *turn)
        k = _rotated(_rms(k, self.k_norm, c.eps).transpose(1, 2), *turn)
        y = attend(q, k, v.transpose(1, 2)).transpose(1, 2).reshape(b, t, -1)
        return functional.linear(y, rounded(self.o, share))

    def moe(self, x: Tensor, share: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
        """Experts on x (tokens, hidden): their mixed output and the balance loss."""
        c = self.shape
        logits = functional.linear(x, rounded(self.router, share, bits=ROUTER_BITS)).float()
        p = logits.softmax(-1)
        w, index = p.topk(c.top_k, -1)
        w = w / w.sum(-1, keepdim=True)
        flat = index.flatten()
        counts = (flat[:, None] == torch.arange(c.experts, device=x.device)).sum(0)
        balance = c.experts * ((counts / flat.numel()) * p.mean(0)).sum()
        balance = balance + 0.01 * logits.logsumexp(-1).pow(2).mean()
        order = torch.argsort(flat, stable=True)
        inverse = torch.argsort(order)
        rows = _Spread.apply(x, order, inverse, c.top_k)
        y = self._experts(rows, counts, share, grouped=grouped)
        y = _Collect.apply(y, order, inverse).unflatten(0, (-1, c.top_k))
        return (y * w[..., None].to(y.dtype)).sum(1), balance

    def _experts(self, rows: Tensor, counts: Tensor, share: Tensor, *, grouped: bool) -> Tensor:
        """Each expert on its rows; `rows` is sorted by expert, `counts` says how many it has."""
        gate_up, down = rounded(self.gate_up, share), rounded(self.down, share)
        if grouped:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = torch._grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
            h = functional.silu(gate) * up
            return torch._grouped_mm(h, down.transpose(-2, -1), offs=ends)
        parts = []
        for expert, part in enumerate(rows.split(counts.tolist())):
            gate, up = functional.linear(part, gate_up[expert]).chunk(2, -1)
            parts.append(functional.linear(functional.silu(gate) * up, down[expert]))
        return torch.cat(parts)

    def forward(
        self,
        x: Tensor,
        share: Tensor,
        turn: tuple[Tensor, Tensor],
        attend: Attend,
        *,
        grouped: bool,
    ) -> tuple[Tensor, Tensor]:
        """The output of the layer and its balance loss."""
        x = x + self.attention(_rms(x, self.norm1, self.shape.eps), share, turn, attend)
        normed = _rms(x, self.norm2, self.shape.eps).flatten(0, 1)
        y, balance = self.moe(normed, share, grouped=grouped)
        return x + y.view_as(x), balance


class Model(nn.Module):
    """The whole model, with float32 master weights and bfloat16 maths."""

    cos: Tensor
    sin: Tensor
    stack: Sequence[Layer]

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = c = shape
        self.embed = _weight(c.vocab, c.hidden)
        self.norm = _ones(c.hidden)
        # A module list is a sequence of its layers, but its type does not say so.
        self.stack = nn.ModuleList(Layer(c) for _ in range(c.layers))  # type: ignore[assignment]
        freq = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.context).float(), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def hidden(
        self, tokens: Tensor, share: Tensor, attend: Attend, *, grouped: bool
    ) -> tuple[Tensor, Tensor]:
        """Last hidden state (batch, tokens, hidden) and mean balance loss.

        Args:
            tokens: Token ids, shape (batch, tokens).
            share: Share of the 4-bit rounding, a scalar.
            attend: The attention to use.
            grouped: Whether experts run as one grouped matrix product (GPU only).
        """
        x = functional.embedding(tokens, rounded(self.embed, share))
        t = tokens.shape[1]
        turn = self.cos[:t], self.sin[:t]
        total = torch.zeros((), device=tokens.device)
        for layer in self.stack:
            x, balance = layer(x, share, turn, attend, grouped=grouped)
            total = total + balance
        return _rms(x, self.norm, self.shape.eps), total / self.shape.layers

    def logits(self, h: Tensor, share: Tensor) -> Tensor:
        """Logits over the vocabulary of hidden states."""
        return functional.linear(h, rounded(self.embed, share))

    def losses(
        self, tokens: Tensor, weights: Tensor, share: Tensor, attend: Attend, *, grouped: bool
    ) -> Losses:
        """The losses of a batch of blocks; tokens and weights have the shape (batch, tokens)."""
        h, balance = self.hidden(tokens, share, attend, grouped=grouped)
        out = self.logits(h[:, :-1], share).flatten(0, 1)
        each = functional.cross_entropy(out.float(), tokens[:, 1:].flatten(), reduction="none")
        w = weights[:, 1:].flatten()
        mine = (w >= 1.0).float()
        return Losses((each * w).sum() / w.sum(), (each * mine).sum() / mine.sum(), balance)
