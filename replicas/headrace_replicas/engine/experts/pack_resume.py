"""What earlier runs of `headrace pack` left in a folder, and which of it may stay.

Laws: what stays was read and has the bytes that were written; no byte before something that stays
is written again; a file that an index names, so that engines may have it open, is never changed:
it stays as it is or goes as a whole (who has it open keeps it).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError, SettingsError
from headrace_replicas.engine.experts.pack_index import (
    FILE_PATTERN,
    INDEX_FILE,
    PARTIAL_FILE,
    LayerLayout,
    PackedLayer,
    PackIndex,
    damages,
    read_index,
    this_writer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What earlier runs left in a folder.

    Attributes:
        kept: Layers whose bytes were read and are right.
        published: Whether engines may have the files open, because an index names them.
        is_complete: Whether nothing is left to do.
    """

    kept: tuple[PackedLayer, ...]
    published: bool
    is_complete: bool

    def lengths(self) -> dict[str, int]:
        """File name -> bytes of it that stay."""
        lengths: dict[str, int] = defaultdict(int)
        for layer in self.kept:
            lengths[layer.file] = max(lengths[layer.file], layer.end)
        return lengths


def candidates(
    folder: Path, fingerprint: str, layouts: Sequence[LayerLayout], *, replaces: bool
) -> Found:
    """What earlier runs say that they finished, and is still wanted; not yet read.

    Args:
        folder: Where to look.
        fingerprint: Of the checkpoint.
        layouts: What is wanted.
        replaces: Whether the pack of another checkpoint may go.

    Raises:
        SettingsError: There is one, and it may not.
    """
    published = not (folder / PARTIAL_FILE).exists()
    path = folder / (INDEX_FILE if published else PARTIAL_FILE)
    index = _index_of(path, fingerprint)
    if index is None and path.exists() and not replaces:
        raise SettingsError(
            f"{path} is the pack of another checkpoint, or of another headrace. Give an empty "
            "folder with --output, or let it be replaced with --force.",
            "output",
        )
    if index is None:
        return Found(kept=(), published=published, is_complete=False)
    is_same_writer = index.writer == this_writer()
    wanted = {layout.path: layout for layout in layouts}
    kept = tuple(
        layer
        for layer in index.layers
        if wanted.get(layer.layout.path) == layer.layout
        and (is_same_writer or layer.layout.is_copied)
    )
    stay = _without_gaps(index.layers, kept, published)
    return Found(kept=stay, published=published, is_complete=False)


def _index_of(path: Path, fingerprint: str) -> PackIndex | None:
    try:
        index = read_index(path)
    except CheckpointError:
        return None
    return index if index.fingerprint == fingerprint else None


def checked(
    folder: Path, found: Found, wanted: int, *, workers: int, on_bytes: Callable[[int], None]
) -> Found:
    """The same without layers whose bytes are not those that were written.

    Args:
        folder: Where the files are.
        found: From `candidates`.
        wanted: Number of layers that make the pack complete.
        workers: Layers read at a time.
        on_bytes: Called from other threads with the number of bytes just read.
    """
    damaged = damages(folder, found.kept, workers=workers, on_bytes=on_bytes)
    bad = {damage.layer.layout.path for damage in damaged}
    sound = tuple(layer for layer in found.kept if layer.layout.path not in bad)
    kept = _without_gaps(found.kept, sound, found.published)
    is_complete = found.published and len(kept) == wanted
    return Found(kept=kept, published=found.published, is_complete=is_complete)


def _without_gaps(
    layers: Iterable[PackedLayer], kept: Iterable[PackedLayer], published: bool
) -> tuple[PackedLayer, ...]:
    """Those that may stay where they are: an unpublished file is cut after its last good layer."""
    good = {layer.layout.path for layer in kept}
    by_file: dict[str, list[PackedLayer]] = defaultdict(list)
    for layer in sorted(layers, key=lambda layer: layer.offset):
        by_file[layer.file].append(layer)
    stay: list[PackedLayer] = []
    for there in by_file.values():
        sound = list(takewhile(lambda layer: layer.layout.path in good, there))
        if len(sound) == len(there) or not published:
            stay += sound
    return tuple(stay)


def discarded_bytes(folder: Path, found: Found) -> int:
    """Bytes that clearing the folder for what is kept will free."""
    lengths = found.lengths()
    return sum(
        file.stat().st_size - lengths.get(file.name, 0) for file in folder.glob(FILE_PATTERN)
    )
