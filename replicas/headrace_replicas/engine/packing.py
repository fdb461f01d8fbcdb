"""Packs a checkpoint's experts: load lazily, keep what earlier runs finished, write the rest."""

import shutil
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from headrace_replicas.contract.errors import CheckpointError, SettingsError
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.durable_files import locked
from headrace_replicas.engine.experts.pack import FILE_LIMIT_BYTES, PackWriter, layout_of, take
from headrace_replicas.engine.experts.pack_index import INDEX_FILE, LayerLayout
from headrace_replicas.engine.experts.pack_resume import (
    Found,
    candidates,
    checked,
    discarded_bytes,
)
from headrace_replicas.engine.experts.provenance import Provenance
from headrace_replicas.engine.experts.seam import ExpertLayer, expert_layers
from headrace_replicas.engine.loading import explained_reads, load_lazily

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows how far something is: takes a title and a total, and gives what takes each advance."""

# For the index, and for what else happens on the disk meanwhile.
_SPARE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was done.

    Attributes:
        index: The pack's index.
        layers: Expert layers in the pack.
        kept: Of these, layers that earlier runs had written.
        records: Experts of all layers.
        size_bytes: Of all records, with the zeros at their ends.
        padding_bytes: Of these, the zeros.
    """

    index: Path
    layers: int
    kept: int
    records: int
    size_bytes: int
    padding_bytes: int


def free_bytes_of(folder: Path) -> int:
    """Bytes that can still be written to a folder's disk."""
    return shutil.disk_usage(folder).free


def pack_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    workers: int,
    bar: Bar,
    replaces: bool = False,
    free_bytes: Callable[[Path], int] = free_bytes_of,
    file_limit_bytes: int = FILE_LIMIT_BYTES,
) -> PackReport:
    """Write every expert of a checkpoint into a record of its own.

    Args:
        checkpoint: A checked one.
        folder: Where the pack goes; it exists.
        workers: Threads for checksums and for reading what earlier runs wrote.
        bar: Shows the progress of each part, in bytes.
        replaces: Whether the pack of another checkpoint in this folder may go.
        free_bytes: Room on a folder's disk.
        file_limit_bytes: A new file is begun when a layer would make one longer.

    Raises:
        CheckpointError: The checkpoint cannot be loaded, or has no experts to pack.
        SettingsError: The folder is held by another run, holds another checkpoint's pack, cannot
            be written, or is too small.
    """
    with locked(folder) as is_ours:
        if not is_ours:
            raise SettingsError(f"another headrace pack is writing into {folder}.", "output")
        provenance = Provenance()
        layers = deque(expert_layers(load_lazily(checkpoint, provenance)))
        if not layers:
            raise CheckpointError(
                f"{checkpoint.path}: model type {checkpoint.model_type!r} has no experts that can "
                "be streamed, so there is nothing to pack."
            )
        layouts = [layout_of(layer, provenance) for layer in layers]
        provenance.forget()  # it holds arrays, which would keep their bytes once they are read
        found = candidates(folder, checkpoint.fingerprint, layouts, replaces=replaces)
        if found.kept:
            found = _checked(folder, found, len(layouts), workers, bar)
        if not found.is_complete:
            _refuse_full_disk(folder, found, layouts, free_bytes(folder))
            with explained_reads(checkpoint):
                _write(checkpoint, folder, layers, layouts, found, (workers, file_limit_bytes), bar)
    return PackReport(
        index=folder / INDEX_FILE,
        layers=len(layouts),
        kept=len(found.kept),
        records=sum(layout.experts for layout in layouts),
        size_bytes=sum(layout.size_bytes for layout in layouts),
        padding_bytes=sum(one.size_bytes - one.experts * one.record_bytes for one in layouts),
    )


def _checked(folder: Path, found: Found, wanted: int, workers: int, bar: Bar) -> Found:
    total = sum(layer.layout.size_bytes for layer in found.kept)
    with bar("checking what is there", total) as on_bytes:
        return checked(folder, found, wanted, workers=workers, on_bytes=on_bytes)


def _remaining(layouts: list[LayerLayout], found: Found) -> list[LayerLayout]:
    kept = {layer.layout.path for layer in found.kept}
    return [layout for layout in layouts if layout.path not in kept]


def _refuse_full_disk(
    folder: Path, found: Found, layouts: list[LayerLayout], free_bytes: int
) -> None:
    needed = sum(layout.size_bytes for layout in _remaining(layouts, found)) + _SPARE_BYTES
    available = free_bytes + discarded_bytes(folder, found)
    if available < needed:
        raise SettingsError(
            f"{folder}: the pack needs {needed / 1e9:.2f} GB more, and {available / 1e9:.2f} GB "
            f"are free. Free {(needed - available) / 1e9:.2f} GB, or give a folder on another disk "
            "with --output.",
            "output",
        )


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    layers: deque[ExpertLayer],
    layouts: list[LayerLayout],
    found: Found,
    limits: tuple[int, int],
    bar: Bar,
) -> None:
    todo = _remaining(layouts, found)
    workers, file_limit_bytes = limits
    with bar("packing", sum(layout.size_bytes for layout in todo)) as on_bytes:
        writer = PackWriter(
            folder,
            checkpoint.fingerprint,
            found,
            file_limit_bytes=file_limit_bytes,
            workers=workers,
            on_bytes=on_bytes,
        )
        wanted = {layout.path: layout for layout in todo}
        while layers:
            if (layout := wanted.get(layers[0].path)) is None:
                layers.popleft()
                continue
            # Taken from the queue and from the model: nothing holds the layer once it is written.
            writer.add(layout, take(layers.popleft()))
        writer.publish(layouts)
