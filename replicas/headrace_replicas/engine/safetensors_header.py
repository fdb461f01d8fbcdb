"""Reads and checks the header of one safetensors file, without touching tensor data.

The format (huggingface/safetensors, README "Format"): 8 bytes of little-endian header length, a
JSON object {name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {...}}, then the
data; offsets count from the first data byte, tensors neither overlap nor leave holes. The header
is at most 100 MB.

Laws: no number from the file is used before it is type-checked and bounded; any bytes give a
`ShardHeader` or a `CheckpointError` that names the file, and the tensor where there is one.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.json_files import REMEDY, quoted, whole_number

HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
DIMENSION_LIMIT = 2**31 - 1  # MLX counts a dimension in an int32
RANK_LIMIT = 16

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
"""The types that MLX loads (tried one by one on 0.32.4), with bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies in its file.

    Attributes:
        dtype: Element type as the format spells it (`BF16`).
        shape: Sizes of the dimensions; empty for a scalar.
        start: First byte, counted from the start of the file.
        end: One past the last byte, counted from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Length of the tensor's data."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What the header of one file says, checked against the file's length.

    Attributes:
        path: The file.
        tensors: By name, in the order of the header.
        data_start: First byte of the data block, counted from the start of the file.
        file_bytes: Length of the file.
        digest: SHA-256 of the header's bytes, hex.
    """

    path: Path
    tensors: Mapping[str, TensorEntry]
    data_start: int
    file_bytes: int
    digest: str


def read_header(path: Path) -> ShardHeader:
    """Read one file's header and check every tensor in it.

    Holes between tensors are left to `check_coverage`, because a tensor that the index names
    and the header lacks makes one, and its name says more than the hole does.

    Raises:
        CheckpointError: The file is missing, empty, cut, or its header is wrong.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file. {REMEDY}")
            length = _header_length(file.read(8), file_bytes=status.st_size, path=path)
            header = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. {REMEDY}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_header(header, file_bytes=status.st_size, path=path)


def parse_header(header: bytes, *, file_bytes: int, path: Path) -> ShardHeader:
    """Check a header's bytes against the length of the file that they came from.

    Raises:
        CheckpointError: Naming the file, and the tensor where there is one.
    """
    data_start = 8 + len(header)
    tensors = {
        name: _entry(name, claim, data_start=data_start, file_bytes=file_bytes, path=path)
        for name, claim in _claims(header, path).items()
    }
    _refuse_overlap(tensors, path)
    return ShardHeader(
        path=path,
        tensors=tensors,
        data_start=data_start,
        file_bytes=file_bytes,
        digest=hashlib.sha256(header).hexdigest(),
    )


def check_coverage(shard: ShardHeader) -> None:
    """Every byte of the data block must belong to a tensor.

    Raises:
        CheckpointError: There is a hole, or bytes after the last tensor.
    """
    reached, before = shard.data_start, "the header"
    for name, entry in _by_position(shard.tensors):
        if entry.start > reached:
            raise CheckpointError(
                f"{shard.path}: bytes {reached} to {entry.start} between {before} and "
                f"{quoted(name)} belong to no tensor, which the format forbids. {REMEDY}"
            )
        reached, before = entry.end, quoted(name)
    if reached != shard.file_bytes:
        raise CheckpointError(
            f"{shard.path}: {shard.file_bytes - reached} bytes after {before} belong to no "
            f"tensor, which the format forbids. {REMEDY}"
        )


def misaligned_count(shard: ShardHeader) -> int:
    """How many tensors start at an address that their element size does not divide."""
    return sum(entry.start % DTYPE_BYTES[entry.dtype] != 0 for entry in shard.tensors.values())


def _header_length(prefix: bytes, *, file_bytes: int, path: Path) -> int:
    if file_bytes == 0:
        raise CheckpointError(f"{path} is empty (0 bytes): incomplete download? {REMEDY}")
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, too few for a safetensors file: incomplete "
            f"download? {REMEDY}"
        )
    (length,) = struct.unpack("<Q", prefix)
    bound = min(HEADER_LIMIT_BYTES, file_bytes - 8)
    if length > bound:
        raise CheckpointError(
            f"{path} claims a header of {length} bytes; a file of {file_bytes} bytes can have "
            f"{bound} at most. It is cut, or no safetensors file. {REMEDY}"
        )
    return int(length)


def _claims(header: bytes, path: Path) -> dict[str, object]:
    try:
        value: object = json.loads(header.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header is not valid JSON ({error}). {REMEDY}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object. {REMEDY}")
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: `__metadata__` must map strings to strings. {REMEDY}")
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{quoted(key)} appears twice")
        seen[key] = value
    return seen


def _entry(
    name: str, claim: object, *, data_start: int, file_bytes: int, path: Path
) -> TensorEntry:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(claim, dict):
        raise CheckpointError(f"{where} is not described by an object. {REMEDY}")
    dtype, shape, offsets = (claim.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{where} has dtype {dtype!r:.40}, which MLX cannot load (it knows "
            f"{', '.join(DTYPE_BYTES)}). Use a checkpoint converted by mlx_lm.convert."
        )
    sizes = _bounded_integers(shape, DIMENSION_LIMIT)
    if sizes is None or len(sizes) > RANK_LIMIT:
        raise CheckpointError(f"{where} has the impossible shape {shape!r:.80}. {REMEDY}")
    span = _bounded_integers(offsets, file_bytes)
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise CheckpointError(
            f"{where} has the impossible data_offsets {offsets!r:.80} in a file of "
            f"{file_bytes} bytes: cut or damaged. {REMEDY}"
        )
    entry = TensorEntry(
        dtype=dtype, shape=sizes, start=data_start + span[0], end=data_start + span[1]
    )
    _refuse_wrong_size(entry, where=where, file_bytes=file_bytes)
    return entry


def _refuse_wrong_size(entry: TensorEntry, *, where: str, file_bytes: int) -> None:
    needed = _product(entry.shape) * DTYPE_BYTES[entry.dtype]
    if entry.size_bytes != needed:
        raise CheckpointError(
            f"{where} claims {entry.size_bytes} bytes of data, but {entry.dtype} of shape "
            f"{list(entry.shape)} needs {needed}. {REMEDY}"
        )
    if entry.end > file_bytes:
        raise CheckpointError(
            f"{where} ends at byte {entry.end}, but the file has only {file_bytes}: incomplete "
            f"download? {REMEDY}"
        )


def _refuse_overlap(tensors: Mapping[str, TensorEntry], path: Path) -> None:
    reached, before = 0, ""
    for name, entry in _by_position(tensors):
        if entry.start < reached:
            raise CheckpointError(
                f"{path}: tensors {quoted(before)} and {quoted(name)} share the same bytes. "
                f"{REMEDY}"
            )
        reached, before = entry.end, name


def _by_position(tensors: Mapping[str, TensorEntry]) -> Sequence[tuple[str, TensorEntry]]:
    """Tensors in file order; those without data too: they may lie between others, not inside."""
    return sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))


def _bounded_integers(value: object, limit: int) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = tuple(number for item in value if (number := whole_number(item)) is not None)
    if len(numbers) != len(value) or not all(0 <= number <= limit for number in numbers):
        return None
    return numbers


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
