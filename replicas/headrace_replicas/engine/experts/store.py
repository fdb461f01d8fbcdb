"""Where the bytes of every expert lie in the checkpoint as it was shipped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.experts.provenance import Provenance
from headrace_replicas.engine.experts.seam import ExpertLayer, ExpertTensor
from headrace_replicas.engine.safetensors_header import ShardHeader, TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """The file ranges of one tensor of an expert layer.

    Attributes:
        dtype: Element type in the file, as safetensors spells it.
        expert_bytes: Bytes of one expert.
        places: (file index, offset) of each expert.
    """

    dtype: str
    expert_bytes: int
    places: tuple[tuple[int, int], ...]


class Store(Protocol):
    """Says where the experts of one checkpoint lie."""

    files: tuple[Path, ...]

    def source(
        self, layer: ExpertLayer, tensor: ExpertTensor, provenance: Provenance, /
    ) -> TensorSource:
        """Where each expert's part of a tensor lies; files are counted as in `files`."""
        ...


class ExpertStore:
    """Finds experts in the shards.

    Args:
        headers: The checkpoint's shards, checked.
    """

    def __init__(self, headers: Sequence[ShardHeader]) -> None:
        self.files: tuple[Path, ...] = tuple(header.path for header in headers)
        self._entries: Mapping[str, tuple[int, TensorEntry]] = {
            name: (file, entry)
            for file, header in enumerate(headers)
            for name, entry in header.tensors.items()
        }

    def source(
        self, layer: ExpertLayer, tensor: ExpertTensor, provenance: Provenance
    ) -> TensorSource:
        """Where each expert's part of a tensor lies.

        Raises:
            CheckpointError: The model class computes the tensor, so that its bytes lie nowhere.
        """
        whole = provenance.tensor_of(tensor.array)
        if whole is not None:
            return self._from_whole(whole, layer.experts)
        parts = provenance.parts_of(tensor.array)
        if parts is not None:
            return self._from_parts(parts)
        raise CheckpointError(
            f"{layer.path}.{tensor.projection}.{tensor.name} is rearranged by mlx-lm while it "
            "loads, so that its experts cannot be read from the files as they are. Write them once "
            "in a form that can, with headrace pack; or save the checkpoint with mlx_lm.convert, "
            "or serve it with engine.slots = all."
        )

    def _from_whole(self, name: str, experts: int) -> TensorSource:
        file, entry = self._entries[name]
        expert_bytes = entry.size_bytes // experts
        places = tuple((file, entry.start + number * expert_bytes) for number in range(experts))
        return TensorSource(dtype=entry.dtype, expert_bytes=expert_bytes, places=places)

    def _from_parts(self, names: Sequence[str]) -> TensorSource:
        entries = [self._entries[name] for name in names]
        first = entries[0][1]
        return TensorSource(
            dtype=first.dtype,
            expert_bytes=first.size_bytes,
            places=tuple((file, entry.start) for file, entry in entries),
        )
