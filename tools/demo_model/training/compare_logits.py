"""Compare the logits of the model with those of `transformers` (on the CPU, a minute)."""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.demo_model.training.model import Layer, Model, causal
from tools.demo_model.training.shape import Shape

_MOST_DIFFERENCE: Final = 0.03


def _uneven(shape: Shape) -> Model:
    """A random model whose weights and norms are far enough from their start to matter."""
    model = Model(shape)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.mul_(3.0)
        else:
            p.data.add_(0.1 * torch.randn_like(p))
    return model


def _experts(base: str, layer: Layer, *, stacked: bool) -> dict[str, Tensor]:
    """The experts under the names of `transformers`, whose releases differ in stacking them."""
    if stacked:
        return {f"{base}.gate_up_proj": layer.gate_up, f"{base}.down_proj": layer.down}
    tensors: dict[str, Tensor] = {}
    for e in range(layer.shape.experts):
        gate, up = layer.gate_up[e].chunk(2)
        for part, weight in (("gate", gate), ("up", up), ("down", layer.down[e])):
            tensors[f"{base}.{e}.{part}_proj.weight"] = weight
    return tensors


def _layer_tensors(base: str, layer: Layer, *, stacked: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {
        f"{base}.input_layernorm.weight": layer.norm1,
        f"{base}.post_attention_layernorm.weight": layer.norm2,
        f"{base}.self_attn.q_norm.weight": layer.q_norm,
        f"{base}.self_attn.k_norm.weight": layer.k_norm,
        f"{base}.mlp.gate.weight": layer.router,
    }
    tensors |= {f"{base}.self_attn.{n}_proj.weight": getattr(layer, n) for n in "qkvo"}
    return tensors | _experts(f"{base}.mlp.experts", layer, stacked=stacked)


def _as_transformers(model: Model) -> Qwen3MoeForCausalLM:
    """The same weights in the model of `transformers`."""
    config = model.shape.to_config()
    kept = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**kept))
    stacked = "model.layers.0.mlp.experts.gate_up_proj" in theirs.state_dict()
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "lm_head.weight": model.embed,
        "model.norm.weight": model.norm,
    }
    for i, layer in enumerate(model.stack):
        tensors |= _layer_tensors(f"model.layers.{i}", layer, stacked=stacked)
    theirs.load_state_dict({k: v.detach() for k, v in tensors.items()}, strict=True)
    return theirs.to(torch.bfloat16)


@torch.no_grad()
def relative_difference() -> float:
    """The median over tokens: rounding to bfloat16 can flip the choice of an expert in a few."""
    torch.manual_seed(0)
    shape = Shape.tiny(vocab=512)
    ours = _uneven(shape)
    theirs = _as_transformers(ours)
    tokens = torch.randint(0, shape.vocab, (2, 40))
    unrounded = torch.zeros(())
    h, _ = ours.hidden(tokens, unrounded, causal, grouped=False)
    a, b = ours.logits(h, unrounded).float(), theirs(tokens).logits.float()
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).median().item()


def main() -> None:
    """Print the difference; exit with an error when it is more than rounding explains."""
    difference = relative_difference()
    print(f"relative difference of the logits: {difference:.4f} (at most {_MOST_DIFFERENCE})")
    if difference >= _MOST_DIFFERENCE:
        sys.exit("the model does not compute what transformers computes")


if __name__ == "__main__":
    main()
