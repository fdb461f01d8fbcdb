"""Ways to break a checkpoint that `tests.support.checkpoints` has written."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.scripted_weights import EXPERT_WIDTH, HIDDEN

Json = dict[str, Any]
INDEX: Final = "model.safetensors.index.json"
APPLE_DOUBLE: Final = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4064)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One way to break a checkpoint.

    Attributes:
        description: What is wrong.
        apply: Does it to a folder.
    """

    description: str
    apply: Callable[[Path], None]


def shard(folder: Path, index: int) -> Path:
    """The weight file at `index` in the order of names."""
    return sorted(folder.glob("[!.]*.safetensors"))[index]


def edit_json(path: Path, change: Callable[[Json], object], *, indent: int | None = None) -> None:
    """Read an object, let `change` alter it, write it back."""
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value, indent=indent), "utf-8")


def edit_config(folder: Path, change: Callable[[Json], object]) -> None:
    """Alter config.json."""
    edit_json(folder / "config.json", change, indent=1)


def edit_header(path: Path, change: Callable[[Json], object]) -> None:
    """Alter a shard's header; the data stays."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def find(header: Json, part: str) -> str:
    """The first tensor whose name contains `part`."""
    return next(name for name in header if part in name)


def halve(path: Path) -> None:
    """Cut a file in the middle."""
    os.truncate(path, path.stat().st_size // 2)


def _stale_index(folder: Path) -> None:
    def change(index: Json) -> None:
        index["weight_map"] = {
            name: file.replace("-of-00003", "-of-00007")
            for name, file in index["weight_map"].items()
        }
        index["metadata"]["total_size"] *= 3

    edit_json(folder / INDEX, change)


def _index_wrong_file(folder: Path) -> None:
    wrong = {"model.layers.1.mlp.gate.weight": shard(folder, 0).name}
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(wrong))


def _bad_offsets(header: Json) -> None:
    for name in header:
        if "down_proj.w" in name:
            start = header[name]["data_offsets"][0]
            header[name]["data_offsets"] = [start, start + 4]


def _overlapping(header: Json) -> None:
    offsets = header[find(header, "gate_proj.w")]["data_offsets"]
    header[find(header, "down_proj.w")]["data_offsets"] = offsets


def _wrong_shape(header: Json) -> None:
    header[find(header, "mlp.gate.weight")]["shape"].reverse()


def _huge_header(folder: Path) -> None:
    with shard(folder, 0).open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 60))


def _flipped_bytes(folder: Path) -> None:
    path = shard(folder, 1)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    start, end = header[find(header, "down_proj.w")]["data_offsets"]
    with path.open("r+b") as file:
        file.seek(8 + length + start)
        file.write(bytes(min(HIDDEN * EXPERT_WIDTH * 4, end - start)))


def _appledouble(folder: Path) -> None:
    for path in list(folder.glob("*.safetensors")):
        (folder / f"._{path.name}").write_bytes(APPLE_DOUBLE)
    (folder / ".DS_Store").write_bytes(b"\x00\x00\x00\x01Bud1")
    (folder / "model-00009.safetensors.part").write_bytes(b"x" * 99)


def _awq(config: Json) -> None:
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    }


def _model_type(config: Json) -> None:
    config["model_type"] = "qwen9_hyper_moe"
    config["architectures"] = ["Qwen9HyperMoeForCausalLM"]


def _experts_key_renamed(config: Json) -> None:
    config["text_config"] = {
        "n_routed_experts": config.pop("num_experts"),
        "num_experts_per_tok": config["num_experts_per_tok"],
    }


def _template_in_file(folder: Path) -> None:
    def change(settings: Json) -> None:
        (folder / "chat_template.jinja").write_text(settings.pop("chat_template"), "utf-8")

    edit_json(folder / "tokenizer_config.json", change)


def _bad_template(settings: Json) -> None:
    settings["chat_template"] = "{% for m in messages %}{{ m.role }"


def _eos_mismatch(folder: Path) -> None:
    path = folder / "generation_config.json"
    other = json.loads(path.read_text("utf-8"))["other_eos"]
    edit_json(path, lambda generation: generation.update(eos_token_id=other))
    edit_config(folder, lambda config: config.update(eos_token_id=other))


def _bad_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{eos: 1", "utf-8")


def _claims(**quantization: object) -> Callable[[Path], None]:
    """config.json says this about quantization, whatever the tensors are."""
    return lambda folder: edit_config(
        folder, lambda config: config.update(quantization=quantization)
    )


def _in_header(index: int, change: Callable[[Json], object]) -> Callable[[Path], None]:
    return lambda folder: edit_header(shard(folder, index), change)


def _in_config(change: Callable[[Json], object]) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, change)


def _in_tokenizer_config(change: Callable[[Json], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", change)


def _as_written(_: Path) -> None:
    """The writer has done it already."""


_BREAKS: Final[tuple[tuple[str, str, Callable[[Path], None]], ...]] = (
    ("empty_shard", "0-byte shard", lambda folder: os.truncate(shard(folder, 1), 0)),
    (
        "missing_shard",
        "index names a shard that is not there",
        lambda folder: shard(folder, 1).unlink(),
    ),
    (
        "stale_index",
        "index names shards of another packing; all tensors are present",
        _stale_index,
    ),
    (
        "bad_index_json",
        "index.json is cut in the middle",
        lambda folder: halve(folder / INDEX),
    ),
    (
        "index_wrong_file",
        "index maps a tensor to a shard that does not hold it",
        _index_wrong_file,
    ),
    (
        "bad_offsets",
        "down_proj claims its full shape over 4 bytes",
        _in_header(1, _bad_offsets),
    ),
    ("overlapping", "two expert tensors share the same bytes", _in_header(1, _overlapping)),
    ("huge_header", "header length field is 2^60", _huge_header),
    (
        "flipped_bytes",
        "the down_proj bytes of expert 0, layer 1 are zeroed; all sizes are right",
        _flipped_bytes,
    ),
    (
        "missing_tensor",
        "one expert tensor is in no shard",
        _in_header(1, lambda header: header.pop(find(header, "up_proj.w"))),
    ),
    ("wrong_shape", "router is transposed in the header", _in_header(0, _wrong_shape)),
    (
        "appledouble",
        "macOS ._ files and an unfinished download lie beside the shards (must load)",
        _appledouble,
    ),
    ("misaligned", "data block at an odd offset (must load, same text)", _as_written),
    ("single_file", "one model.safetensors, no index (must load)", _as_written),
    ("no_index", "three shards, no index", lambda folder: (folder / INDEX).unlink()),
    (
        "bits1",
        "experts really packed 1-bit affine, config says so",
        _claims(group_size=64, bits=1),
    ),
    (
        "mode_unknown",
        "config names a quantization mode that does not exist",
        _claims(group_size=64, bits=4, mode="turboquant"),
    ),
    (
        "bits3_claim",
        "tensors are packed 4-bit, config says 3",
        _claims(group_size=64, bits=3),
    ),
    ("awq", "config says AWQ, for another engine", _in_config(_awq)),
    (
        "says_quantised",
        "config says 4 bit, tensors are float",
        _claims(group_size=64, bits=4),
    ),
    ("model_type", "model_type nobody knows", _in_config(_model_type)),
    (
        "experts_key_renamed",
        "expert count under other names, nested",
        _in_config(_experts_key_renamed),
    ),
    ("no_config", "config.json is missing", lambda folder: (folder / "config.json").unlink()),
    (
        "bad_config",
        "config.json is cut in the middle",
        lambda folder: halve(folder / "config.json"),
    ),
    (
        "no_template",
        "no chat template anywhere",
        _in_tokenizer_config(lambda settings: settings.pop("chat_template")),
    ),
    ("template_in_file", "template only in chat_template.jinja (must work)", _template_in_file),
    ("bad_template", "template does not parse", _in_tokenizer_config(_bad_template)),
    (
        "no_tokenizer",
        "tokenizer.json is missing",
        lambda folder: (folder / "tokenizer.json").unlink(),
    ),
    (
        "bad_tokenizer",
        "tokenizer.json is cut in the middle",
        lambda folder: halve(folder / "tokenizer.json"),
    ),
    (
        "eos_mismatch",
        "generation_config and config name <|endoftext|>, turns end with <|im_end|>",
        _eos_mismatch,
    ),
    (
        "bad_generation_config",
        "generation_config.json is not JSON",
        _bad_generation_config,
    ),
)
BREAKS: Final[dict[str, Break]] = {
    name: Break(description=description, apply=apply) for name, description, apply in _BREAKS
}
"""By name, in the order in which the command line lists them."""
