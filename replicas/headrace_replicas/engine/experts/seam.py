"""Finds mlx-lm's expert layers, whatever the architecture.

Every MoE of mlx-lm that shares the switch layers computes its experts in a `SwitchGLU` or a
`SwitchMLP`: a module whose tensors have the expert as their first dimension, called with the
hidden states and the chosen expert ids. Gates, top-k, score weighting, shared experts and norms
lie outside of it, so nothing else of a model needs to be known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from headrace_replicas.engine.backend import mx

# In the order in which a layer uses them; a per-expert `bias` and nvfp4's scale are rarer.
_TENSORS: Final = ("weight", "scales", "biases", "bias", "global_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """One tensor of an expert layer.

    Attributes:
        projection: The linear module that it belongs to (`gate_proj`).
        name: Its name there (`scales`).
        array: All experts, shape (experts, ...), not evaluated.
    """

    projection: str
    name: str
    array: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One `SwitchGLU` or `SwitchMLP` of a model.

    Attributes:
        path: Where it is in the model, as mlx-lm names parameters.
        module: The module itself.
        tensors: Everything in it that belongs to single experts.
        experts: How many there are.
    """

    path: str
    module: Any
    tensors: tuple[ExpertTensor, ...]
    experts: int


def expert_layers(model: Module) -> list[ExpertLayer]:
    """All expert layers of a model, in its own order, each once."""
    seen: set[int] = set()
    return [
        _layer(path, module)
        for path, module in _walk("", model)
        if isinstance(module, (SwitchGLU, SwitchMLP)) and not _seen_before(module, seen)
    ]


def _seen_before(module: Any, seen: set[int]) -> bool:
    # By identity: modules are dicts, and equality would compare their contents.
    known = id(module) in seen
    seen.add(id(module))
    return known


def _walk(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Module):
        yield path, node
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _walk(f"{path}.{name}" if path else name, child)
    elif isinstance(node, (list, tuple)):
        for number, child in enumerate(node):
            yield from _walk(f"{path}.{number}" if path else str(number), child)


def _layer(path: str, module: Any) -> ExpertLayer:
    tensors = tuple(
        ExpertTensor(projection=projection, name=name, array=linear[name])
        for projection, linear in module.items()
        if isinstance(linear, Module) and "weight" in linear and linear["weight"].ndim == 3
        for name in _TENSORS
        if linear.get(name) is not None
    )
    return ExpertLayer(path=path, module=module, tensors=tensors, experts=tensors[0].array.shape[0])
