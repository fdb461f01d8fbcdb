"""The same models in the layouts in which they are published, not in the one mlx-lm saves.

One tensor for each expert, spread over two files, streams as it is; what mlx-lm has to compute
while it loads (gate and up projection in one tensor, transposed) cannot.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from tests.streaming.model_configs import EXPERTS
from tests.streaming.tiny_checkpoints import Written

Tensors = dict[str, mx.array]

_FILES: Final = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_EXPERT_TENSOR: Final = re.compile(r"^(.+)\.switch_mlp\.(\w+)\.(\w+)$")
_MIXTRAL: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to lay a model out in files.

    Attributes:
        module: The model file that reads it.
        mode: Name of the mode that it is saved in.
        rewrite: From the names that mlx-lm saves; tensors of experts get names with `experts`.
        streams: Whether the experts' bytes lie in the files as the model computes with them.
    """

    module: str
    mode: str
    rewrite: Callable[[Tensors], Tensors]
    streams: bool = True

    @property
    def title(self) -> str:
        """For the table."""
        kind = "one tensor for each expert" if self.streams else "fused projections"
        return f"{self.module}, {kind}"


def one_by_one(parent: str, names: Mapping[str, str]) -> Callable[[Tensors], Tensors]:
    """Each expert's tensors by themselves.

    Args:
        parent: What stands in place of `switch_mlp`.
        names: What projections are called, where it is something else.
    """

    def rewrite(tensors: Tensors) -> Tensors:
        apart: Tensors = {}
        for name, array in tensors.items():
            match = _EXPERT_TENSOR.match(name)
            if match is None:
                apart[name] = array
                continue
            before, projection, field = match.groups()
            for expert in range(EXPERTS):
                own = f"{before}.{parent}.{expert}.{names.get(projection, projection)}.{field}"
                apart[own] = array[expert]
        return apart

    return rewrite


def fused(container: str, *, transposed: bool) -> Callable[[Tensors], Tensors]:
    """Gate and up projection as one tensor for all experts.

    Args:
        container: What the experts are called in the names that mlx-lm saves.
        transposed: Whether inputs come before outputs.
    """

    def rewrite(tensors: Tensors) -> Tensors:
        together = dict(tensors)
        for name in tensors:
            before, found, _ = name.partition(f".{container}.gate_proj.weight")
            if not found:
                continue
            gate, up, down = (
                together.pop(f"{before}.{container}.{projection}.weight")
                for projection in ("gate_proj", "up_proj", "down_proj")
            )
            both = mx.concatenate([gate, up], axis=1)
            for whole, array in (("gate_up_proj", both), ("down_proj", down)):
                turned = array.swapaxes(1, 2) if transposed else array
                together[f"{before}.experts.{whole}"] = mx.contiguous(turned)
        return together

    return rewrite


LAYOUTS: Final = (
    Layout(module="mixtral", mode="bfloat16", rewrite=one_by_one("experts", _MIXTRAL)),
    Layout(module="qwen3_moe", mode="float32", rewrite=one_by_one("experts", {})),
    Layout(module="kimi_vl", mode="affine g64", rewrite=one_by_one("experts", {})),
    Layout(module="olmoe", mode="affine g32", rewrite=one_by_one("experts", {})),
    Layout(module="phixtral", mode="float32", rewrite=one_by_one("mlp", {})),
    Layout(
        module="llama4",
        mode="float32",
        rewrite=fused("experts", transposed=True),
        streams=False,
    ),
    Layout(
        module="qwen3_5_moe",
        mode="bfloat16",
        rewrite=fused("switch_mlp", transposed=False),
        streams=False,
    ),
)


def lay_out(written: Written, layout: Layout) -> Written:
    """Rewrite a saved checkpoint in place; even experts go into one file, odd ones into another."""
    [file] = written.folder.glob("*.safetensors")
    saved = mx.load(str(file))
    assert isinstance(saved, dict)
    tensors = layout.rewrite(saved)
    mx.eval(tensors)
    file.unlink()
    (written.folder / "model.safetensors.index.json").unlink()
    experts = frozenset(tensors) - frozenset(saved)
    for number, name in enumerate(_FILES):
        part = {one: array for one, array in tensors.items() if _file_of(one) == number}
        mx.save_safetensors(str(written.folder / name), part, metadata={"format": "mlx"})
    return Written(folder=written.folder, expert_tensors=experts)


def _file_of(name: str) -> int:
    """The last number in a name decides: the expert's, where each has a tensor of its own."""
    return int(([0] + [int(part) for part in name.split(".") if part.isdigit()])[-1]) % 2
