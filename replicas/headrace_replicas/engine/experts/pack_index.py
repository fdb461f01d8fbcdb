"""The index of a pack: repacked experts, one record each, so that one read brings a whole expert.

A pack is `headrace.experts.json` and the `headrace.experts-NNNNN.bin` beside it. Each expert layer
lies in one of them: its experts one after the other, `stride` bytes apart. A record holds the
expert's tensors one after the other in the order in which the layer uses them, as mlx-lm stacks
them and in the checkpoint's own types, then zeros up to the next page.

Laws: no number from an index is used before it is checked; a pack belongs to one checkpoint, by
fingerprint; files that a published index names are never written again, only replaced.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.file_digests import FilePlan, Span, digest_files
from headrace_replicas.engine.json_files import LARGE_FILE_BYTES, first_complaint, read_bytes
from headrace_replicas.engine.safetensors_header import DTYPE_BYTES

INDEX_FILE: Final = "headrace.experts.json"
PARTIAL_FILE: Final = "headrace.experts.json.partial"
FILE_PATTERN: Final = "headrace.experts-*.bin"
PAGE_BYTES: Final = 16384
"""Records begin at multiples of this: the page of Apple's processors, and four of others'."""

Size = Annotated[int, Field(ge=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PackedTensor(_Record):
    """One tensor of a layer, as it lies in every record.

    Attributes:
        projection: The linear module that it belongs to (`gate_proj`).
        name: Its name there (`scales`).
        dtype: Element type, as safetensors spells it.
        shape: Of one expert's part.
        offset: First byte inside the record.
        size_bytes: Its length.
        made_of: Which tensors of the checkpoint hold the same bytes, as a digest of their names;
            None when mlx-lm computed them, so that another version may compute others.
    """

    projection: str
    name: str
    dtype: str
    shape: tuple[Size, ...]
    offset: Size
    size_bytes: Size
    made_of: str | None


class LayerLayout(_Record):
    """What the records of one layer look like.

    Attributes:
        path: The layer, as mlx-lm names modules.
        experts: Number of records.
        stride: Bytes from one record to the next.
        tensors: What a record holds, in this order.
    """

    path: str
    experts: Annotated[int, Field(ge=1, lt=2**31)]
    stride: Size
    tensors: tuple[PackedTensor, ...]

    @property
    def size_bytes(self) -> int:
        """All records together."""
        return self.experts * self.stride

    @property
    def record_bytes(self) -> int:
        """One record without the zeros at its end."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def is_copied(self) -> bool:
        """Whether all bytes are the checkpoint's own, whatever version of mlx-lm arranged them."""
        return all(tensor.made_of is not None for tensor in self.tensors)

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        reached = 0
        for tensor in self.tensors:
            size = math.prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
            if tensor.offset != reached or tensor.size_bytes != size or not size:
                raise ValueError(f"{self.path}: {tensor.projection}.{tensor.name} does not fit")
            reached += size
        if not reached or self.stride != padded(reached):
            raise ValueError(f"{self.path}: a record of {reached} bytes, {self.stride} apart")
        return self


class PackedLayer(_Record):
    """Where one layer lies.

    Attributes:
        layout: What its records look like.
        file: Name of the file that holds it.
        offset: First byte in the file.
        digests: SHA-256 of each record with the zeros at its end, hex.
    """

    layout: LayerLayout
    file: Annotated[str, Field(pattern=r"^headrace\.experts-\d{5}\.bin$")]
    offset: Annotated[Size, Field(multiple_of=PAGE_BYTES)]
    digests: tuple[str, ...]

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.offset + self.layout.size_bytes

    @model_validator(mode="after")
    def _has_all_digests(self) -> Self:
        if len(self.digests) != self.layout.experts:
            raise ValueError(f"{self.layout.path}: {len(self.digests)} digests")
        return self


class Writer(_Record):
    """Which versions computed what is not copied."""

    mlx: str
    mlx_lm: str


class PackIndex(_Record):
    """What is kept in `headrace.experts.json`.

    Attributes:
        format: Tells this file from others.
        version: Of the format; a reader refuses one that it does not know.
        fingerprint: Of the checkpoint that the experts belong to.
        writer: Who wrote it.
        layers: In the model's order.
    """

    format: Literal["headrace-experts"] = "headrace-experts"
    version: Literal[1] = 1
    fingerprint: str
    writer: Writer
    layers: tuple[PackedLayer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDamage:
    """A layer whose bytes are not those that were written.

    Attributes:
        layer: The layer.
        experts: Those whose records differ or could not be read.
        problem: Why some could not be read, or None.
    """

    layer: PackedLayer
    experts: tuple[int, ...]
    problem: str | None


def padded(size_bytes: int) -> int:
    """The next whole number of pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def this_writer() -> Writer:
    """The installed versions."""
    return Writer(mlx=version("mlx"), mlx_lm=version("mlx-lm"))


def state_folder(state_dir: Path, fingerprint: str) -> Path:
    """Where the pack of a checkpoint lies, or a link to it, when not in the model's folder."""
    return state_dir / "packs" / fingerprint[:16]


def read_index(path: Path) -> PackIndex:
    """The index in a file.

    Raises:
        CheckpointError: It is not there, not readable, or not an index of this version.
    """
    raw = read_bytes(path, limit_bytes=LARGE_FILE_BYTES)
    try:
        return PackIndex.model_validate_json(raw)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is no pack that this headrace reads ({first_complaint(error)}). "
            "Write it again with headrace pack."
        ) from error


def short_files(folder: Path, layers: Iterable[PackedLayer]) -> list[str]:
    """Files that are missing, or end before the last record that they should hold."""
    ends: dict[str, int] = defaultdict(int)
    for layer in layers:
        ends[layer.file] = max(ends[layer.file], layer.end)
    return [name for name, end in sorted(ends.items()) if _size_of(folder / name) < end]


def damages(
    folder: Path,
    layers: Sequence[PackedLayer],
    *,
    workers: int,
    on_bytes: Callable[[int], None],
) -> list[LayerDamage]:
    """Read every record and compare it with its checksum.

    Args:
        folder: Where the files are.
        layers: What to read.
        workers: Layers read at a time.
        on_bytes: Called from other threads with the number of bytes just read.
    """
    plans = [_plan(folder, layer) for layer in layers]
    found: list[LayerDamage] = []
    digested = digest_files(plans, workers=workers, on_bytes=on_bytes)
    for layer, digests in zip(layers, digested, strict=True):
        wrong = tuple(
            expert
            for expert, wanted in enumerate(layer.digests)
            if digests.spans.get(str(expert)) != wanted
        )
        if wrong:
            found.append(LayerDamage(layer=layer, experts=wrong, problem=digests.problem))
    return found


def _plan(folder: Path, layer: PackedLayer) -> FilePlan:
    stride = layer.layout.stride
    starts = range(layer.offset, layer.end, stride)
    spans = (Span(name=str(n), start=at, end=at + stride) for n, at in enumerate(starts))
    return FilePlan(path=folder / layer.file, spans=tuple(spans), whole=False)


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1
