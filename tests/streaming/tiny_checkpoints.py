"""Writes tiny random models as checkpoints, exactly as mlx-lm saves and quantises them."""

import contextlib
import copy
import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headrace_replicas.engine.experts.seam import expert_layers
from headrace_replicas.engine.loading import DtypeChoice
from headrace_replicas.engine.safetensors_header import read_header
from tests.streaming.model_configs import EXPERTS, Architecture, Config

Predicate = Callable[[str, Module], bool | dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How a model is saved, and what it is computed in.

    Attributes:
        name: For the table.
        saved: Type of the real-valued tensors in the file.
        computed: What the engine is asked to compute in; `auto` is float32 on a CPU.
        packing: Arguments of `mlx_lm.utils.quantize_model`; empty saves it dense.
        mixed: Whether modules are packed differently.
    """

    name: str
    saved: str = "float32"
    computed: DtypeChoice = "auto"
    packing: Mapping[str, Any] | None = None
    mixed: bool = False


# Another packing for each projection of the experts (and of all that is called as they are), and
# one for the rest.
_MIXED: Final[Mapping[str, bool | dict[str, Any]]] = {
    "gate_proj": {"group_size": 64, "bits": 3},
    "up_proj": {"group_size": 32, "bits": 8},
    "down_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "fc1": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "fc2": False,
}
_MIXED_REST: Final = {"group_size": 32, "bits": 6}


MODES: Final = (
    Mode(name="float32"),
    # MLX's CPU multiplies dense experts in float32 alone, so that these are converted as they come.
    Mode(name="bfloat16", saved="bfloat16"),
    Mode(name="affine g32", packing={"mode": "affine", "bits": 4, "group_size": 32}),
    Mode(
        name="affine g64",
        saved="bfloat16",
        computed="bfloat16",
        packing={"mode": "affine", "bits": 4, "group_size": 64},
    ),
    Mode(name="mxfp4", packing={"mode": "mxfp4", "bits": 4, "group_size": 32}),
    Mode(name="mxfp8", packing={"mode": "mxfp8", "bits": 8, "group_size": 32}),
    Mode(name="nvfp4", packing={"mode": "nvfp4", "bits": 4, "group_size": 16}),
    Mode(
        name="mixed",
        saved="float16",
        packing={"mode": "affine", "bits": 4, "group_size": 64},
        mixed=True,
    ),
)
# MLX computes with it on a GPU only, so that elsewhere the bytes are compared and nothing is run.
SCALED: Final = Mode(
    name="nvfp4 with scales",
    packing={"mode": "nvfp4", "bits": 4, "group_size": 16, "global_scale": True},
)


def mode_named(name: str) -> Mode:
    """The mode of that name.

    Raises:
        KeyError: There is none.
    """
    return {mode.name: mode for mode in MODES}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint on disk.

    Attributes:
        folder: Where it is.
        expert_tensors: Names of the tensors that experts are made of.
    """

    folder: Path
    expert_tensors: frozenset[str]

    def bytes_per_expert(self, layers: int) -> int:
        """Bytes in the files of one expert of one layer; all are of one size."""
        sizes = {
            name: entry.size_bytes
            for file in self.folder.glob("*.safetensors")
            for name, entry in read_header(file).tensors.items()
        }
        return sum(sizes[name] for name in self.expert_tensors) // (layers * EXPERTS)


def build(architecture: Architecture) -> Module:
    """mlx-lm's model with every parameter drawn at random, routers and their biases too."""
    config = copy.deepcopy(architecture.config)
    model_class, arguments_class = _get_classes(config)
    model: Module = model_class(arguments_class.from_dict(config))
    model.update(tree_map_with_path(_random, _parameters(model)))
    return model


def _random(path: str, shape_of: mx.array) -> mx.array:
    """A parameter of the same shape; its value depends on its path alone."""
    key = mx.random.key(zlib.crc32(path.encode()))
    shape, dtype = shape_of.shape, shape_of.dtype
    if not mx.issubdtype(dtype, mx.floating):
        return mx.random.randint(0, 1 << 31, shape, key=key).astype(dtype)
    noise = mx.random.normal(shape, key=key)
    if len(shape) > 1:
        return mx.multiply(noise, shape[-1] ** -0.5).astype(dtype)
    if "correction_bias" in path or "expert_bias" in path:
        # As small as the scores that it is added to, or it alone would choose the experts.
        return (0.01 * noise).astype(dtype)
    return ((1.0 if path.endswith(".weight") else 0.0) + 0.1 * noise).astype(dtype)


def write(folder: Path, architecture: Architecture, mode: Mode) -> Written:
    """Save a model of an architecture in a mode, with config.json and a tokenizer."""
    model, config = build(architecture), copy.deepcopy(architecture.config)
    _cast(model, getattr(mx, mode.saved))
    if mode.packing is not None:
        choice = _mixed(model) if mode.mixed else None
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            model, config = quantize_model(model, config, quant_predicate=choice, **mode.packing)
    save_model(folder, model)
    write_texts(folder, config)
    return Written(
        folder=folder,
        expert_tensors=frozenset(
            f"{layer.path}.{tensor.projection}.{tensor.name}"
            for layer in expert_layers(model)
            for tensor in layer.tensors
        ),
    )


def _mixed(model: Module) -> Predicate:
    own: Predicate = getattr(model, "quant_predicate", None) or (lambda _path, _module: True)

    def choose(path: str, module: Module) -> bool | dict[str, Any]:
        # What the model class wants dense is used as a matrix somewhere.
        return own(path, module) and _MIXED.get(path.rpartition(".")[2], _MIXED_REST)

    return choose


def _cast(model: Module, target: mx.Dtype) -> None:
    """As mlx_lm.convert does: what the model class wants kept stays."""
    wanted: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _path: True)

    def convert(path: str, array: mx.array) -> mx.array:
        cast = wanted(path) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(target) if cast else array

    model.update(tree_map_with_path(convert, _parameters(model)))


def write_texts(folder: Path, config: Config) -> None:
    """The files of a checkpoint that are no tensors."""
    save_config(config, folder / "config.json")
    Tokenizer(WordLevel({"word": 0, "end": 1})).save(str(folder / "tokenizer.json"))


def _parameters(model: Module) -> dict[str, Any]:
    tree: dict[str, Any] = model.parameters()  # type: ignore[no-untyped-call]  # MLX's own
    return tree
