"""Writes packs: one layer of a lazily loaded model at a time, kept whatever happens later.

mlx-lm's own load and `sanitize` produce each stacked tensor, so that every layout that mlx-lm can
load can be packed, and the bytes are the resident model's by construction. A layer counts when its
bytes are on the disk and the partial index says so; what a killed run left behind that is cut off.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.durable_files import sync, sync_folder, write_whole
from headrace_replicas.engine.experts.dtypes import CONTAINERS
from headrace_replicas.engine.experts.pack_index import (
    FILE_PATTERN,
    INDEX_FILE,
    PARTIAL_FILE,
    LayerLayout,
    PackedLayer,
    PackIndex,
    padded,
    this_writer,
)
from headrace_replicas.engine.experts.pack_resume import Found
from headrace_replicas.engine.experts.packed_store import packed_tensors
from headrace_replicas.engine.experts.provenance import Provenance
from headrace_replicas.engine.experts.seam import ExpertLayer

FILE_LIMIT_BYTES: Final = 16 * 1024**3
"""A new file is begun when a layer would make one longer: it can be copied again on its own."""


def layout_of(layer: ExpertLayer, provenance: Provenance) -> LayerLayout:
    """What the records of a layer will look like; nothing is evaluated.

    Raises:
        CheckpointError: A tensor has a type that experts do not come in.
    """
    tensors = packed_tensors(layer, provenance)
    record_bytes = sum(tensor.size_bytes for tensor in tensors)
    return LayerLayout(
        path=layer.path, experts=layer.experts, stride=padded(record_bytes), tensors=tensors
    )


class PackWriter:
    """Adds layers to a folder's files; nobody else may write there meanwhile.

    Args:
        folder: Where to write; what is not kept is removed now.
        fingerprint: Of the checkpoint.
        found: What stays.
        file_limit_bytes: A new file is begun when a layer would make one longer.
        workers: Threads that compute checksums.
        on_bytes: Called with the number of bytes just written.

    Raises:
        SettingsError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        found: Found,
        *,
        file_limit_bytes: int,
        workers: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._layers = list(found.kept)
        self._file_limit_bytes = file_limit_bytes
        self._workers = workers
        self._on_bytes = on_bytes
        lengths = found.lengths()
        self._file = "" if found.published else max(lengths, default="")
        self._numbers = len(lengths) and int(max(lengths)[-9:-4])
        self._length = lengths.get(self._file, 0)
        try:
            self._clear(lengths)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def _clear(self, lengths: dict[str, int]) -> None:
        # The partial index goes first: it is what a killed run is resumed from.
        self._save(PARTIAL_FILE)
        (self._folder / INDEX_FILE).unlink(missing_ok=True)
        for left in self._folder.glob(f"{INDEX_FILE}*.new"):
            left.unlink()
        for file in self._folder.glob(FILE_PATTERN):
            if file.name not in lengths:
                file.unlink()
            elif file.stat().st_size > lengths[file.name]:
                with file.open("r+b") as opened:
                    opened.truncate(lengths[file.name])
        sync_folder(self._folder)

    def add(self, layout: LayerLayout, buffers: Sequence[memoryview]) -> None:
        """Write one layer, and return when it is safe on the disk.

        Args:
            layout: From `layout_of`.
            buffers: Bytes of each of its tensors, all experts one after the other.

        Raises:
            SettingsError: The disk is full, or the folder cannot be written.
        """
        if not self._file or self._length + layout.size_bytes > self._file_limit_bytes:
            self._numbers += 1
            self._file, self._length = f"headrace.experts-{self._numbers:05d}.bin", 0
        try:
            with ThreadPoolExecutor(self._workers) as threads:
                records = range(layout.experts)
                digests = threads.map(lambda n: _digest(layout, buffers, n), records)
                self._append(layout, buffers)
                layer = PackedLayer(
                    layout=layout, file=self._file, offset=self._length, digests=tuple(digests)
                )
            self._layers.append(layer)
            self._length = layer.end
            self._save(PARTIAL_FILE)
        except OSError as error:
            raise _unwritable(self._folder / self._file, error) from error

    def _append(self, layout: LayerLayout, buffers: Sequence[memoryview]) -> None:
        path = self._folder / self._file
        with path.open("r+b" if self._length else "wb") as file:
            file.seek(self._length)
            for expert in range(layout.experts):
                for piece in _pieces(layout, buffers, expert):
                    file.write(piece)
                self._on_bytes(layout.stride)
            file.flush()
            sync(file.fileno())

    def publish(self, order: Sequence[LayerLayout]) -> None:
        """Write the index: from now on engines use the pack.

        Args:
            order: All layers, as the model has them.

        Raises:
            SettingsError: The folder cannot be written.
        """
        by_path = {layer.layout.path: layer for layer in self._layers}
        self._layers = [by_path[layout.path] for layout in order]
        try:
            self._save(INDEX_FILE)
            (self._folder / PARTIAL_FILE).unlink()
            sync_folder(self._folder)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def _save(self, name: str) -> None:
        index = PackIndex(
            fingerprint=self._fingerprint, writer=this_writer(), layers=tuple(self._layers)
        )
        write_whole(self._folder / name, index.model_dump_json().encode() + b"\n")


def take(layer: ExpertLayer) -> list[memoryview]:
    """The bytes of a layer's tensors, which the model loses, so that memory stays bounded.

    Returns:
        For each tensor all experts one after the other.
    """
    containers: list[mx.array] = []
    for tensor in layer.tensors:
        with mx.stream(mx.cpu):
            container = mx.contiguous(tensor.array).view(CONTAINERS[tensor.array.dtype.size])
            mx.eval(container)
        containers.append(container)
        del layer.module[tensor.projection][tensor.name]
    mx.clear_cache()  # nothing computes in this process but the copies above
    return [
        memoryview(container).cast("B")  # type: ignore[arg-type]  # buffer protocol
        for container in containers
    ]


def _pieces(
    layout: LayerLayout, buffers: Sequence[memoryview], expert: int
) -> Iterator[memoryview | bytes]:
    """A record, piece by piece."""
    for tensor, buffer in zip(layout.tensors, buffers, strict=True):
        begin = expert * tensor.size_bytes
        yield buffer[begin : begin + tensor.size_bytes]
    yield bytes(layout.stride - layout.record_bytes)


def _digest(layout: LayerLayout, buffers: Sequence[memoryview], expert: int) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(layout, buffers, expert):
        digest.update(piece)
    return digest.hexdigest()


def _unwritable(path: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"{path} cannot be written: {error.strerror}. Layers that were finished are kept: run the "
        "same command again when this is mended, or give another folder with --output.",
        "output",
    )
