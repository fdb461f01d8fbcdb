"""Writes safetensors files and whole checkpoints of a few bytes, for checks that load nothing."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from headrace_replicas.engine.safetensors_header import DTYPE_BYTES
from tests.support.checkpoint_breaks import edit_config

Spec = tuple[str, tuple[int, ...]]
"""dtype and shape of a tensor."""


def header_of(tensors: Mapping[str, Spec]) -> dict[str, object]:
    """A right header for tensors that lie one after the other."""
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    return header


def data_bytes(tensors: Mapping[str, Spec]) -> int:
    """Length of the data block for these tensors."""
    ends = (entry["data_offsets"][1] for entry in header_of(tensors).values())  # type: ignore[index] # built above
    return max(ends, default=0)


def file_of(header: object, data: bytes) -> bytes:
    """The bytes of a file with this header, padded as writers do."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_shard(path: Path, tensors: Mapping[str, Spec]) -> None:
    """A sound file with zeros for data."""
    path.write_bytes(file_of(header_of(tensors), bytes(data_bytes(tensors))))


def tiny_checkpoint(
    folder: Path,
    like: Path,
    tensors: Mapping[str, Spec] | None = None,
    *,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Everything but the weights of `like`, and one small shard instead of them.

    Args:
        folder: Where it goes.
        like: A whole checkpoint.
        tensors: What the shard holds; None gives it one small tensor.
        config: Written over the values of config.json.
    """
    folder.mkdir()
    for file in like.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, folder)
    edit_config(folder, lambda existing: existing.update(config or {}))
    write_shard(folder / "model.safetensors", tensors or {"model.norm.weight": ("F32", (4,))})
    return folder
