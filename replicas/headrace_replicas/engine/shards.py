"""Which safetensors files make up a checkpoint, and whether they hold what the index promises.

Laws: the tensors that are there decide, not the index. An index that names absent files is stale
when every tensor it names is present, and proof of an incomplete download otherwise. Files that
macOS or a download leaves behind (`._*`, `.DS_Store`, `*.part`, `*.incomplete`) do not count.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.json_files import (
    LARGE_FILE_BYTES,
    REMEDY,
    is_regular_file,
    quoted,
    read_object,
    some_of,
)
from headrace_replicas.engine.safetensors_header import (
    ShardHeader,
    TensorEntry,
    check_coverage,
    misaligned_count,
    read_header,
)

INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"^(?P<stem>.*?)-?(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """The files that hold the weights.

    Attributes:
        headers: Sorted by file name.
        warnings: What is odd about them and does no harm.
    """

    headers: tuple[ShardHeader, ...]
    warnings: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """All tensors by name; no name is in two files."""
        return {name: entry for header in self.headers for name, entry in header.tensors.items()}


def read_shards(folder: Path) -> ShardSet:
    """Find the weights in a folder and check every header, and the index against them.

    Raises:
        CheckpointError: A file or tensor is missing, cut, doubled or damaged; it is named.
    """
    present = _weight_files(folder)
    weight_map = _read_index(folder)
    warnings: list[str] = []
    if weight_map is None:
        _refuse_incomplete_set(present)
        headers = _read_all(_preferred(present))
    else:
        headers, warnings = _follow_index(folder, weight_map, present)
    if not any(header.tensors for header in headers):
        raise CheckpointError(_nothing_found(folder, present))
    _refuse_doubles(headers)
    if weight_map is not None:
        warnings += _compare_with_index(weight_map, headers)
    for header in headers:
        check_coverage(header)
    return ShardSet(headers=headers, warnings=(*warnings, *_misaligned(headers)))


def _weight_files(folder: Path) -> tuple[Path, ...]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}.") from error
    return tuple(
        folder / name
        for name in sorted(names)
        if name.endswith(".safetensors") and not name.startswith(".")
    )


def _preferred(present: Sequence[Path]) -> tuple[Path, ...]:
    """`model*.safetensors` where there are any, as mlx-lm does; else every safetensors file.

    Repositories of some makers carry the same weights a second time under other names.
    """
    named_model = tuple(path for path in present if path.name.startswith("model"))
    return named_model or tuple(present)


def _read_all(files: Iterable[Path]) -> tuple[ShardHeader, ...]:
    return tuple(read_header(file) for file in files)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = read_object(path, limit_bytes=LARGE_FILE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map. {REMEDY}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:  # no way out of the folder
            raise CheckpointError(
                f"{path} maps tensor {quoted(name)} to {file!r:.80}, which is no file name. "
                f"{REMEDY}"
            )
    return weight_map


def _follow_index(
    folder: Path, weight_map: Mapping[str, str], present: Sequence[Path]
) -> tuple[tuple[ShardHeader, ...], list[str]]:
    named = sorted(set(weight_map.values()))
    missing = [name for name in named if not is_regular_file(folder / name)]
    if not missing:
        headers = _read_all(folder / name for name in named)
        ignored = {path.name for path in _preferred(present)} - set(named)
        note = f"{some_of(ignored)}: not in {INDEX_NAME}, left out" if ignored else ""
        return headers, [note] if note else []
    headers = _read_all(path for path in _preferred(present) if is_regular_file(path))
    held = {name for header in headers for name in header.tensors}
    absent = weight_map.keys() - held
    if absent:
        raise CheckpointError(
            f"{folder}: incomplete download? {INDEX_NAME} names {len(missing)} of {len(named)} "
            f"shards that are not there ({some_of(missing)}), and with them {len(absent)} tensors "
            f"({some_of(absent, limit=2)}). {REMEDY}"
        )
    warning = (
        f"{INDEX_NAME} is stale: it names {some_of(missing, limit=2)}, which are not there; all "
        f"{len(weight_map)} tensors were found in {some_of(h.path.name for h in headers)}"
    )
    return headers, [warning]


def _refuse_incomplete_set(present: Sequence[Path]) -> None:
    """Without an index the numbers in the file names tell which shards there should be."""
    sets: dict[tuple[str, str], set[int]] = {}
    for path in _preferred(present):
        if match := _NUMBERED.match(path.name):
            sets.setdefault((match["stem"], match["count"]), set()).add(int(match["number"][:9]))
    for (stem, count), numbers in sets.items():
        wanted = int(count[:9])
        # Some writers count from 0, some from 1.
        if len(numbers) < wanted:
            raise CheckpointError(
                f"{present[0].parent}: incomplete download? {len(numbers)} of {wanted} shards "
                f"'{stem}-*-of-{count}.safetensors' are there, and no {INDEX_NAME}. {REMEDY}"
            )


def _nothing_found(folder: Path, present: Sequence[Path]) -> str:
    if present:
        return f"{folder}: no tensor in {some_of(p.name for p in present)}. {REMEDY}"
    return (
        f"{folder} holds no *.safetensors file. Give the folder of an MLX or Hugging Face "
        "checkpoint; other formats (GGUF, .bin, .npz) are converted with mlx_lm.convert."
    )


def _refuse_doubles(headers: Sequence[ShardHeader]) -> None:
    owner: dict[str, Path] = {}
    for header in headers:
        for name in header.tensors:
            if name in owner:
                raise CheckpointError(
                    f"tensor {quoted(name)} is both in {owner[name]} and in {header.path.name}: "
                    "two checkpoints in one folder? Remove the files that do not belong."
                )
            owner[name] = header.path


def _compare_with_index(weight_map: Mapping[str, str], headers: Sequence[ShardHeader]) -> list[str]:
    owner = {name: header.path for header in headers for name in header.tensors}
    folder = headers[0].path.parent
    absent = weight_map.keys() - owner.keys()
    if absent:
        first = min(absent)
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} names {len(absent)} tensors that no shard holds: "
            f"{some_of(absent)} ({quoted(weight_map[first])} should hold the first). {REMEDY}"
        )
    # A stale index has been reported already: its files are not there at all.
    files = {header.path.name for header in headers}
    moved = [
        name for name, file in weight_map.items() if file in files and owner[name].name != file
    ]
    if not moved:
        return []
    warning = (
        f"{INDEX_NAME} maps {len(moved)} tensors to a file that does not hold them "
        f"({some_of(moved, limit=2)}); they were found elsewhere"
    )
    return [warning]


def _misaligned(headers: Sequence[ShardHeader]) -> list[str]:
    count = sum(misaligned_count(header) for header in headers)
    if not count:
        return []
    cost = "loading copies them once; reads of experts do not care"
    return [f"{count} tensors are not aligned to their element size: {cost}"]
