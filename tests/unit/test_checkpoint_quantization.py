"""Quantization: a setting is refused by its name, a tensor by its name and numbers."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import read_checkpoint
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_shards import Spec, tiny_checkpoint

PACKED: Mapping[str, Spec] = {"w.weight": ("U32", (2, 16)), "w.scales": ("F16", (2, 2))}
"""256 bits a scale: 4 bits in groups of 64, or 8 in groups of 32, or 2 in groups of 128."""
MX: Mapping[str, Spec] = {"w.weight": ("U32", (2, 8)), "w.scales": ("U8", (2, 2))}
"""128 bits a scale, one byte each: mxfp4."""
AWQ: Mapping[str, Spec] = {
    "w.qweight": ("I32", (128, 4)),
    "w.scales": ("F16", (1, 32)),
    "w.qzeros": ("I32", (1, 4)),
}
PLAIN: Mapping[str, Spec] = {"w.weight": ("F16", (2, 2))}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sound checkpoint that no test changes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("sound") / "model")
    yield folder
    shutil.rmtree(folder)


def warnings(
    tmp_path: Path, sound: Path, tensors: Mapping[str, Spec], config: Mapping[str, object]
) -> tuple[str, ...]:
    """What is odd about a checkpoint with these tensors and this config."""
    return read_checkpoint(
        tiny_checkpoint(tmp_path / "model", sound, tensors, config=config)
    ).warnings


def refusal(
    tmp_path: Path, sound: Path, tensors: Mapping[str, Spec], config: Mapping[str, object]
) -> str:
    """The message with which it is refused."""
    with pytest.raises(CheckpointError) as caught:
        warnings(tmp_path, sound, tensors, config)
    return caught.value.message


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ([], "`quantization` is not an object"),
        ({}, "has bits None"),
        ({"bits": 4}, "has group_size None"),
        ({"bits": 7, "group_size": 64}, "has bits 7, which"),
        ({"bits": True, "group_size": 64}, "has bits True"),
        ({"bits": 4.0, "group_size": 64}, "has bits 4.0"),
        ({"bits": "4", "group_size": 64}, "has bits '4'"),
        ({"bits": 4, "group_size": 48}, "has group_size 48"),
        ({"bits": 4, "group_size": 64, "mode": "turboquant"}, "has mode 'turboquant'"),
        ({"bits": 4, "group_size": 64, "mode": None}, "has mode None"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "has group_size 64"),
        ({"bits": 4, "group_size": 64, "w": {"bits": 9}}, "quantization['w'] has bits 9"),
        ({"bits": 4, "group_size": 64, "w": {"mode": "x"}}, "quantization['w'] has mode 'x'"),
    ],
)
def test_a_setting_that_mlx_does_not_support_is_refused(
    tmp_path: Path, sound: Path, quantization: object, words: str
) -> None:
    """The setting is named, and what is supported."""
    message = refusal(tmp_path, sound, PACKED, {"quantization": quantization})
    assert words in message
    assert isinstance(quantization, list) or "Supported: affine with bits" in message


@pytest.mark.parametrize(
    ("tensors", "quantization"),
    [
        (PACKED, {"bits": 4, "group_size": 64}),
        (PACKED, {"bits": 8, "group_size": 32, "mode": "affine"}),
        (PACKED, {"bits": 2, "group_size": 128}),
        (PACKED, {"bits": 3, "group_size": 64, "w": {"bits": 4}}),
        (PACKED, {"bits": 4, "group_size": 64, "w": True, "other": False}),
        (MX, {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
        (MX, {"bits": 4, "group_size": 64, "w": {"mode": "mxfp4"}}),
    ],
)
def test_a_setting_that_fits_the_shapes_is_silent(
    tmp_path: Path, sound: Path, tensors: Mapping[str, Spec], quantization: object
) -> None:
    """The default, or the setting for the tensor, says what the shapes say."""
    assert warnings(tmp_path, sound, tensors, {"quantization": quantization}) == ()


@pytest.mark.parametrize(
    ("tensors", "quantization", "measured"),
    [
        (PACKED, {"bits": 3, "group_size": 64}, "256 bits a scale"),
        (MX, {"bits": 4, "group_size": 32}, "128 bits a scale"),
    ],
)
def test_a_default_that_contradicts_the_shapes_is_a_warning(
    tmp_path: Path, sound: Path, tensors: Mapping[str, Spec], quantization: object, measured: str
) -> None:
    """mlx-lm infers what the default gets wrong; the numbers of both are told."""
    (warning,) = warnings(tmp_path, sound, tensors, {"quantization": quantization})
    assert "1 of 1 packed tensors contradict" in warning
    assert f"'w.weight' is packed with {measured}" in warning


def test_a_setting_for_one_tensor_that_contradicts_its_shapes_is_refused(
    tmp_path: Path, sound: Path
) -> None:
    """mlx-lm would follow it: the refusal names tensor and numbers."""
    settings = {"bits": 4, "group_size": 64, "w": {"bits": 8, "group_size": 64}}
    message = refusal(tmp_path, sound, PACKED, {"quantization": settings})
    assert "quantization['w'] says affine, 8 bits, group size 64 (512 bits a scale)" in message
    assert "'w.weight' is packed with 256 bits a scale: 16 words and 2 scales" in message


@pytest.mark.parametrize(
    ("weight", "scales"),
    [
        ((2, 16), ("F16", (2, 3))),
        ((2, 16), ("F16", (3, 2))),
        ((2, 16), ("F16", (2, 0))),
        ((2, 16), ("F16", ())),
        ((), ("F16", ())),
        ((2, 14), ("F16", (2, 2))),
        ((2, 16), ("U8", (2, 1))),
    ],
)
def test_shapes_that_fit_no_setting_are_refused(
    tmp_path: Path, sound: Path, weight: tuple[int, ...], scales: Spec
) -> None:
    """The tensor is named with its shapes, whatever the config says."""
    tensors: dict[str, Spec] = {"w.weight": ("U32", weight), "w.scales": scales}
    settings = {"quantization": {"bits": 4, "group_size": 64}}
    message = refusal(tmp_path, sound, tensors, settings)
    assert (
        f"'w.weight' is packed in a way that MLX does not support: weight of shape {list(weight)}"
        in message
    )


def test_packed_tensors_without_a_setting_are_refused(tmp_path: Path, sound: Path) -> None:
    """A config.json of the unquantized model beside quantized shards."""
    assert "'w.weight' is packed, but config.json has no" in refusal(tmp_path, sound, PACKED, {})


@pytest.mark.parametrize(
    ("method", "tensors", "words"),
    [
        ({"quant_method": "bitsandbytes"}, PLAIN, "quant_method 'bitsandbytes'"),
        ({"bits": 4, "group_size": 64}, PLAIN, "quant_method None"),
        ({"quant_method": ["awq"]}, PLAIN, "quant_method ['awq']"),
        ({"quant_method": "awq"}, PLAIN, "quant_method awq, but no tensor"),
        ({"quant_method": "gptq"}, PLAIN, "quant_method gptq, but no tensor"),
        ({"quant_method": "awq", "bits": 8}, AWQ, "awq with bits 8"),
        ({"quant_method": "gptq"}, {**AWQ, "w.g_idx": ("I32", (128,))}, "'w.g_idx' reorders"),
        (
            {"quant_method": "gptq", "bits": 4},
            {"w.qweight": ("I32", (16, 32)), "w.scales": ("F16", (1, 32))},
            "'w.qweight' of shape [16, 32] is not in AutoAWQ's layout",
        ),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, PLAIN, "format"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, PLAIN, "quant_algo 'FP8'"),
        ("awq", PLAIN, "is not an object"),
    ],
)
def test_a_quant_method_that_mlx_lm_cannot_convert_is_refused(
    tmp_path: Path, sound: Path, method: object, tensors: Mapping[str, Spec], words: str
) -> None:
    """By its name, at the top level and in text_config."""
    assert words in refusal(tmp_path, sound, tensors, {"quantization_config": method})
    shutil.rmtree(tmp_path / "model")
    nested = {"text_config": {"quantization_config": method}}
    assert words in refusal(tmp_path, sound, tensors, nested)


@pytest.mark.parametrize(
    ("method", "tensors"),
    [
        ({"quant_method": "awq", "bits": 4}, AWQ),
        ({"quant_method": "mxfp4"}, MX),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, PLAIN),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, PLAIN),
        ({"quant_method": "fp8"}, PLAIN),
        ({}, PLAIN),
        (None, PLAIN),
    ],
)
def test_a_quant_method_that_mlx_lm_converts_is_accepted(
    tmp_path: Path, sound: Path, method: object, tensors: Mapping[str, Spec]
) -> None:
    """Loading decides whether the model class can take it."""
    assert warnings(tmp_path, sound, tensors, {"quantization_config": method}) == ()


def test_settings_in_a_file_of_their_own_are_checked_too(tmp_path: Path, sound: Path) -> None:
    """hf_quant_config.json counts when config.json says nothing."""
    tiny = tiny_checkpoint(tmp_path / "model", sound)
    settings = {"quantization": {"quant_algo": "W4A8"}}
    (tiny / "hf_quant_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="modelopt has quant_algo 'W4A8'"):
        read_checkpoint(tiny)
