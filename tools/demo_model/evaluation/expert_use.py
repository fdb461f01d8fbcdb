"""How the experts of a Qwen3-MoE of `transformers` are used: balance, reuse, working set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

_WINDOW_TOKENS: Final = 128


@dataclass(slots=True)
class _LayerUse:
    """What one layer's experts did.

    Attributes:
        counts: Tokens of each expert, shape (experts,).
        kept: For each token, the share of its experts that the next one uses again.
        working_sets: Experts in use in each window of tokens.
    """

    counts: Tensor
    kept: list[float] = field(default_factory=list)
    working_sets: list[int] = field(default_factory=list)

    def add(self, hot: Tensor, top_k: int) -> None:
        """Count a run: `hot` is 1 where a token used an expert, shape (tokens, experts)."""
        self.counts += hot.sum(0)
        self.kept += ((hot[1:] * hot[:-1]).sum(-1) / top_k).tolist()
        for start in range(0, len(hot) - _WINDOW_TOKENS + 1, _WINDOW_TOKENS):
            window = hot[start : start + _WINDOW_TOKENS]
            self.working_sets.append(int((window.sum(0) > 0).sum()))

    def summary(self, layer: int, top_k: int) -> dict[str, float]:
        """The row of the report."""
        p = self.counts / self.counts.sum()
        experts = len(p)
        entropy = -(p * p.clamp_min(1e-9).log()).sum()
        return {
            "layer": layer,
            "max_over_mean": (p.max() * experts).item(),
            "min_over_mean": (p.min() * experts).item(),
            "variation": (p.std() * experts).item(),
            "effective_experts": torch.exp(entropy).item(),
            "top8_share": p.topk(8).values.sum().item(),
            "next_token_overlap": sum(self.kept) / max(1, len(self.kept)),
            "overlap_by_chance": (top_k * (p * p).sum()).item(),
            "working_set_128": sum(self.working_sets) / max(1, len(self.working_sets)),
            "windows": len(self.working_sets),
        }


@contextmanager
def _watched_gates(model: Qwen3MoeForCausalLM) -> Iterator[dict[int, Tensor]]:
    """The experts that each layer chose in the last pass, shape (tokens, top_k), by layer."""
    chosen: dict[int, Tensor] = {}
    top_k = model.config.num_experts_per_tok

    def watch(number: int, weight: Tensor) -> Any:
        def keep(_gate: Any, arguments: tuple[Tensor, ...], _output: Any) -> None:
            x = arguments[0].reshape(-1, weight.shape[1])
            chosen[number] = (x @ weight.T).topk(top_k, -1).indices

        return keep

    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(watch(i, gate.weight)) for i, gate in enumerate(gates)]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def expert_use(
    model: Qwen3MoeForCausalLM, runs: list[tuple[list[int], list[int]]]
) -> list[dict[str, float]]:
    """Use, reuse and working set of each layer's experts, on generated tokens only.

    Args:
        model: The model.
        runs: Pairs of prompt and answer in tokens.
    """
    experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    layers = [_LayerUse(torch.zeros(experts)) for _ in range(model.config.num_hidden_layers)]
    with _watched_gates(model) as chosen:
        for prompt, answer in runs:
            model.model(input_ids=torch.tensor([prompt + answer]))
            for i, layer in enumerate(layers):
                hot = torch.zeros(len(prompt) + len(answer), experts).scatter_(1, chosen[i], 1.0)
                layer.add(hot[len(prompt) :], top_k)
    return [layer.summary(i, top_k) for i, layer in enumerate(layers)]
