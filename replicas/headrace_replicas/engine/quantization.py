"""Compares what a config says about quantization with how the tensors are packed.

MLX packs a row of `n` elements at `b` bits into `n * b / 32` words (U32) and keeps one scale per
group of `g` elements, so the words and scales of a row tell `b * g` whatever `n` is:
`32 * words / scales`. mlx-lm knows `n` from the model, and infers `b` and `g` of every tensor that
the config does not name one by one. Hence the laws:

- A setting that MLX does not support is refused by its name, before anything loads.
- A tensor whose shapes fit no supported setting is refused by its name, with the numbers.
- A default that contradicts the shapes is a warning: the shapes decide, and they are exact.
- A setting for one tensor that contradicts its shapes is refused: mlx-lm would follow it.
- "Quantized" with no packed tensor loads as what the tensors are, with a warning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.json_files import (
    JsonObject,
    nested_object,
    quoted,
    read_object,
    whole_number,
)
from headrace_replicas.engine.safetensors_header import TensorEntry

Tensors = Mapping[str, TensorEntry]

# The table in the documentation of `mlx.core.quantize` (0.32.4): bits and group sizes by mode.
MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
SUPPORTED = "; ".join(
    f"{mode} with bits {', '.join(map(str, bits))} and group size {', '.join(map(str, groups))}"
    for mode, (bits, groups) in MODES.items()
)
# What mlx-lm converts while it loads.
_METHODS = ("awq", "gptq", "bitnet", "mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt")
_COMPRESSED_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized")
_SAME_CONVERSION = "take config.json from the same conversion as the shards."


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One way in which MLX packs a matrix."""

    mode: str
    bits: int
    group_size: int

    @property
    def group_bits(self) -> int:
        """Bits that one scale stands for."""
        return self.bits * self.group_size

    def __str__(self) -> str:
        return (
            f"{self.mode}, {self.bits} bits, group size {self.group_size} "
            f"({self.group_bits} bits a scale)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShapes:
    """What the shapes of one packed tensor tell.

    Attributes:
        stem: Its name without `.weight`.
        words: U32 words in a row.
        scales: Scales in a row.
        affine: Whether the scales are real numbers; the other modes keep a byte per scale.
    """

    stem: str
    words: int
    scales: int
    affine: bool

    @property
    def name(self) -> str:
        """The packed tensor, for a message."""
        return quoted(f"{self.stem}.weight")

    @property
    def group_bits(self) -> int:
        """Bits that one scale stands for."""
        return 32 * self.words // self.scales

    def __str__(self) -> str:
        return (
            f"{self.name} is packed with {self.group_bits} bits a scale: {self.words} "
            f"words and {self.scales} scales in a row"
        )


def check_quantization(config: JsonObject, folder: Path, tensors: Tensors) -> tuple[str, ...]:
    """Refuse settings that cannot be right, and tell of those that are only odd.

    Returns:
        Warnings.

    Raises:
        CheckpointError: Naming the setting or the tensor.
    """
    packed = [
        _packed_shapes(stem, tensors)
        for stem in (name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
        if (weight := tensors.get(f"{stem}.weight")) and weight.dtype == "U32"
    ]
    settings = config.get("quantization")
    if settings is not None:
        if not isinstance(settings, dict):
            raise CheckpointError(
                f"config.json: `quantization` is not an object: {_SAME_CONVERSION}"
            )
        return _check_settings(settings, packed)
    if method := _method_settings(config, folder):
        _check_method(method, tensors)
    elif packed:
        raise CheckpointError(
            f"tensor {packed[0].name} is packed, but config.json has no `quantization`: "
            f"{_SAME_CONVERSION}"
        )
    return ()


def _check_settings(settings: JsonObject, packed: Sequence[PackedShapes]) -> tuple[str, ...]:
    default = _packing(settings, where="quantization", complete=True)
    overrides = {
        stem: _packing(value, where=f"quantization[{quoted(stem)}]", complete=False)
        for stem, value in settings.items()
        if isinstance(value, dict)
    }
    if not packed:
        return (f"config.json says {default}, but no tensor is packed: loaded as they are",)
    odd = []
    for shapes in packed:
        claimed = overrides.get(shapes.stem, default)
        if shapes.group_bits == claimed.group_bits and shapes.affine == (claimed.mode == "affine"):
            continue
        if shapes.stem in overrides:
            raise CheckpointError(
                f"config.json: quantization[{quoted(shapes.stem)}] says {claimed}, but {shapes}: "
                f"{_SAME_CONVERSION}"
            )
        odd.append(shapes)
    if not odd:
        return ()
    warning = (
        f"config.json says {default}, which {len(odd)} of {len(packed)} packed tensors "
        f"contradict ({odd[0]}); they are loaded by their shapes"
    )
    return (warning,)


def _packing(settings: JsonObject, *, where: str, complete: bool) -> Packing:
    """The packing that a setting names; where it need not be complete, MLX's defaults fill in."""
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise CheckpointError(
            f"config.json: {where} has mode {mode!r:.40}, which MLX does not know. "
            f"Supported: {SUPPORTED}."
        )
    found = {}
    for key, allowed, usual in zip(("bits", "group_size"), MODES[mode], (4, 64), strict=True):
        fallback = usual if usual in allowed else allowed[0]
        number = whole_number(settings.get(key, None if complete else fallback))
        if number not in allowed:
            raise CheckpointError(
                f"config.json: {where} has {key} {settings.get(key)!r:.40}, which mode {mode} "
                f"does not support. Supported: {SUPPORTED}."
            )
        found[key] = number
    return Packing(mode=mode, bits=found["bits"], group_size=found["group_size"])


def _packed_shapes(stem: str, tensors: Tensors) -> PackedShapes:
    weight, scales = tensors[f"{stem}.weight"], tensors[f"{stem}.scales"]
    affine = scales.dtype != "U8"
    possible = {
        bits * group
        for mode, (all_bits, groups) in MODES.items()
        if (mode == "affine") == affine
        for bits in all_bits
        for group in groups
    }
    rows_agree = weight.shape and weight.shape[:-1] == scales.shape[:-1] and scales.shape[-1] > 0
    if not rows_agree or (32 * weight.shape[-1] / scales.shape[-1]) not in possible:
        raise CheckpointError(
            f"tensor {quoted(stem + '.weight')} is packed in a way that MLX does not support: "
            f"weight of shape {list(weight.shape)}, scales of shape {list(scales.shape)} and type "
            f"{scales.dtype}. Supported: {SUPPORTED}."
        )
    return PackedShapes(stem=stem, words=weight.shape[-1], scales=scales.shape[-1], affine=affine)


def _method_settings(config: JsonObject, folder: Path) -> JsonObject:
    """Settings of other tools than MLX, from where mlx-lm looks for them, in its order."""
    for owner in (config, nested_object(config, "text_config")):
        if "quantization_config" in owner:
            settings = owner["quantization_config"]
            if settings and not isinstance(settings, dict):
                raise CheckpointError("config.json: `quantization_config` is not an object.")
            return nested_object(owner, "quantization_config")
    beside = folder / "hf_quant_config.json"
    if not beside.exists():
        return {}
    settings = read_object(beside)
    return {"quant_method": "modelopt", **settings}


def _check_method(settings: JsonObject, tensors: Tensors) -> None:
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"config.json: quantization_config has quant_method {method!r:.40}, which mlx-lm "
            f"cannot load (it converts {', '.join(_METHODS)}). Use a checkpoint converted by "
            "mlx_lm.convert."
        )
    if method in {"awq", "gptq"}:
        _check_auto_awq(method, settings, tensors)
    elif method == "compressed-tensors" and settings.get("format") not in _COMPRESSED_FORMATS:
        raise CheckpointError(
            f"config.json: quant_method compressed-tensors has format "
            f"{settings.get('format')!r:.40}; mlx-lm loads {', '.join(_COMPRESSED_FORMATS)}."
        )
    elif method == "modelopt":
        algorithm = (nested_object(settings, "quantization") or settings).get("quant_algo")
        if algorithm != "NVFP4":
            raise CheckpointError(
                f"config.json: quant_method modelopt has quant_algo {algorithm!r:.40}; mlx-lm "
                "loads NVFP4."
            )


def _check_auto_awq(method: str, settings: JsonObject, tensors: Tensors) -> None:
    """Only AutoAWQ's own layout is converted: (inputs, outputs / 8) words, in groups of inputs."""
    stems = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if not stems:
        raise CheckpointError(
            f"config.json: quantization_config says quant_method {method}, but no tensor is in "
            "that layout (none is named *.qweight). Remove quantization_config to load the tensors "
            "as they are, or use a checkpoint converted by mlx_lm.convert."
        )
    if settings.get("bits", 4) != 4:
        raise CheckpointError(
            f"config.json: quant_method {method} with bits {settings['bits']!r:.40}; mlx-lm "
            "converts 4 bits only."
        )
    if ordered := next((name for name in tensors if name.endswith(".g_idx")), None):
        raise CheckpointError(
            f"quant_method {method}: tensor {quoted(ordered)} reorders groups, which mlx-lm does "
            "not convert. Use a checkpoint converted by mlx_lm.convert."
        )
    for stem in stems:
        words, scales = tensors[f"{stem}.qweight"].shape, tensors.get(f"{stem}.scales")
        if scales is None or len(words) != 2 or scales.shape[-1:] != (words[1] * 8,):
            raise CheckpointError(
                f"quant_method {method}: tensor {quoted(stem + '.qweight')} of shape "
                f"{list(words)} is not in AutoAWQ's layout, the only one that mlx-lm converts. "
                "Use a checkpoint converted by mlx_lm.convert."
            )
