"""Finds the pack of a checkpoint, and says where each expert's tensors lie in it."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.experts.dtypes import name_of
from headrace_replicas.engine.experts.pack_index import (
    INDEX_FILE,
    PackedLayer,
    PackedTensor,
    PackIndex,
    read_index,
    short_files,
    this_writer,
)
from headrace_replicas.engine.experts.provenance import Provenance
from headrace_replicas.engine.experts.seam import ExpertLayer, ExpertTensor
from headrace_replicas.engine.experts.store import TensorSource
from headrace_replicas.engine.json_files import is_regular_file

log = logging.getLogger("ray.serve.headrace.experts")


class PackedStore:
    """The experts of a checkpoint in a pack that was found to fit.

    Args:
        folder: Where the pack is.
        index: Its index.
    """

    def __init__(self, folder: Path, index: PackIndex) -> None:
        names = sorted({layer.file for layer in index.layers})
        self.files: tuple[Path, ...] = tuple(folder / name for name in names)
        self._layers = {layer.layout.path: layer for layer in index.layers}
        self._file_of = {name: number for number, name in enumerate(names)}

    def source(
        self, layer: ExpertLayer, tensor: ExpertTensor, _provenance: Provenance
    ) -> TensorSource:
        """Where each expert's part of a tensor lies."""
        packed = self._layers[layer.path]
        [part] = [
            one
            for one in packed.layout.tensors
            if (one.projection, one.name) == (tensor.projection, tensor.name)
        ]
        file, first = self._file_of[packed.file], packed.offset + part.offset
        return TensorSource(
            dtype=part.dtype,
            expert_bytes=part.size_bytes,
            places=tuple(
                (file, first + expert * packed.layout.stride) for expert in range(layer.experts)
            ),
        )


def find_pack(
    folders: Iterable[Path],
    fingerprint: str,
    layers: Sequence[ExpertLayer],
    provenance: Provenance,
) -> PackedStore | None:
    """The first pack that fits, or None; one that does not fit is reported and left alone.

    Args:
        folders: Where to look, in this order.
        fingerprint: Of the checkpoint that is loaded.
        layers: Its expert layers, not evaluated.
        provenance: From its load.
    """
    for folder in folders:
        path = folder / INDEX_FILE
        if not is_regular_file(path):
            continue
        try:
            index = read_index(path)
        except CheckpointError as error:
            log.warning("ignored: %s", error)
            continue
        problem = misfit(index, folder, fingerprint, layers, provenance)
        if problem is None:
            return PackedStore(folder, index)
        log.warning("%s is ignored: %s. Write it again with headrace pack.", path, problem)
    return None


def misfit(
    index: PackIndex,
    folder: Path,
    fingerprint: str,
    layers: Sequence[ExpertLayer],
    provenance: Provenance,
) -> str | None:
    """Why a pack may not stand in for the checkpoint's own files, or None."""
    if index.fingerprint != fingerprint:
        return "it belongs to another checkpoint, or this one was changed"
    if short := short_files(folder, index.layers):
        return f"{short[0]} is missing or cut"
    packed = {layer.layout.path: layer for layer in index.layers}
    is_same_writer = index.writer == this_writer()
    for layer in layers:
        there = packed.get(layer.path)
        if there is None or not _fits(there, layer, provenance):
            return f"mlx-lm arranges {layer.path} in another way now"
        if not is_same_writer and not there.layout.is_copied:
            return f"mlx-lm {index.writer.mlx_lm} computed {layer.path}, and it is another now"
    return None


def origin(array_of: ExpertTensor, provenance: Provenance) -> str | None:
    """A digest of the names of the tensors that a stacked tensor is a copy of; None if computed."""
    whole = provenance.tensor_of(array_of.array)
    parts = provenance.parts_of(array_of.array)
    if whole is None and parts is None:
        return None
    names = ("whole", whole) if whole is not None else ("parts", *(parts or ()))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def packed_tensors(layer: ExpertLayer, provenance: Provenance) -> tuple[PackedTensor, ...]:
    """How the tensors of a layer lie in a record; nothing is evaluated.

    Raises:
        CheckpointError: A tensor has a type that experts do not come in.
    """
    tensors: list[PackedTensor] = []
    offset = 0
    for tensor in layer.tensors:
        dtype = name_of(tensor.array.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{layer.path}.{tensor.projection}.{tensor.name} has type {tensor.array.dtype}, "
                "which experts cannot be streamed in. Convert the checkpoint with mlx_lm.convert."
            )
        size = tensor.array.nbytes // layer.experts
        tensors.append(
            PackedTensor(
                projection=tensor.projection,
                name=tensor.name,
                dtype=dtype,
                shape=tuple(tensor.array.shape[1:]),
                offset=offset,
                size_bytes=size,
                made_of=origin(tensor, provenance),
            )
        )
        offset += size
    return tuple(tensors)


def _fits(packed: PackedLayer, layer: ExpertLayer, provenance: Provenance) -> bool:
    return packed.layout.experts == layer.experts and packed.layout.tensors == packed_tensors(
        layer, provenance
    )
