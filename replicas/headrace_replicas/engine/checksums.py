"""Checksums of a checkpoint: every tensor, every file, kept beside it and compared with it.

The fingerprint of a checkpoint covers what gives tokens their meaning and where every tensor
lies, not the tensors' bytes: reading them all takes minutes for a large model. This does, so that
one flipped byte is found and named.

Laws: a byte of a recorded file that differs gives a finding that names the file, and the tensor if
it lies in one; a checkpoint compared with its own record gives none.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.durable_files import write_whole
from headrace_replicas.engine.file_digests import FileDigests, FilePlan, Span, digest_files
from headrace_replicas.engine.json_files import (
    LARGE_FILE_BYTES,
    first_complaint,
    is_regular_file,
    read_bytes,
)
from headrace_replicas.engine.safetensors_header import read_header

CHECKSUMS_FILE: Final = "headrace.checksums.json"
# No tensor can have this name: the format gives it another meaning.
_HEADER: Final = "__metadata__"
# Besides the shards; what a tokenizer, a template or a config may consist of.
_SETTINGS: Final = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")


class FileChecksums(BaseModel):
    """One file's; hex SHA-256 throughout.

    Attributes:
        size_bytes: Its length.
        sha256: Of the whole file, as the hub publishes it and `shasum -a 256` prints it.
        header: Of the part before the tensors; None for a file that is no shard.
        tensors: Of each tensor's bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str
    header: str | None = None
    tensors: Mapping[str, str] = {}


class Checksums(BaseModel):
    """What is kept in `headrace.checksums.json`.

    Attributes:
        format: Tells this file from others.
        version: Of the format; a reader refuses one that it does not know.
        fingerprint: Of the checkpoint that was recorded.
        files: By name inside the folder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["headrace-checksums"] = "headrace-checksums"
    version: Literal[1] = 1
    fingerprint: str
    files: Mapping[str, FileChecksums]

    def tensors(self) -> dict[str, tuple[str, str]]:
        """Tensor name -> (file, digest)."""
        return {
            tensor: (name, digest)
            for name, file in self.files.items()
            for tensor, digest in file.tensors.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it was recorded.

    Attributes:
        file: The file.
        tensor: The tensor in it, where one is known.
        problem: What is wrong, as the end of a sentence.
    """

    file: str
    tensor: str | None
    problem: str

    def __str__(self) -> str:
        where = self.file if self.tensor is None else f"{self.file}: tensor {self.tensor!r}"
        return f"{where} {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A checkpoint as it is on the disk now.

    Attributes:
        checksums: Of everything that could be read.
        unreadable: What could not.
    """

    checksums: Checksums
    unreadable: tuple[Finding, ...]


def plans(checkpoint: Checkpoint) -> dict[str, FilePlan]:
    """What has to be read, by the file's name inside the folder."""
    shards = {shard.name: _shard_plan(shard) for shard in checkpoint.shards}
    settings = {
        str(file.relative_to(checkpoint.path)): FilePlan(
            path=file,
            spans=(Span(name=_HEADER, start=0, end=file.stat().st_size),),
            whole=True,
        )
        for file in _settings_files(checkpoint.path)
    }
    return shards | settings


def scan(
    checkpoint: Checkpoint,
    work: Mapping[str, FilePlan],
    *,
    workers: int,
    on_bytes: Callable[[int], None],
) -> Scan:
    """Read a checkpoint's files from end to end.

    Args:
        checkpoint: A checked one.
        work: From `plans`.
        workers: Files read at a time.
        on_bytes: Called from other threads with the number of bytes just read.
    """
    found = digest_files(list(work.values()), workers=workers, on_bytes=on_bytes)
    shards = {shard.name for shard in checkpoint.shards}
    files: dict[str, FileChecksums] = {}
    unreadable: list[Finding] = []
    for (name, plan), digests in zip(work.items(), found, strict=True):
        files[name] = _checksums_of(plan, digests, is_shard=name in shards)
        if digests.problem is not None:
            at = next((s.name for s in plan.spans if s.name not in digests.spans), _HEADER)
            tensor = None if at == _HEADER else at
            unreadable.append(Finding(file=name, tensor=tensor, problem=digests.problem))
    return Scan(
        checksums=Checksums(fingerprint=checkpoint.fingerprint, files=files),
        unreadable=tuple(unreadable),
    )


def compare(recorded: Checksums, found: Scan) -> tuple[Finding, ...]:
    """Everything that differs, worst first: unreadable, tensors, then files."""
    unreadable = {finding.file for finding in found.unreadable}
    tensors = tuple(
        finding
        for finding in _compare_tensors(recorded, found.checksums)
        if finding.file not in unreadable
    )
    named = unreadable | {finding.file for finding in tensors}
    files = tuple(_compare_files(recorded, found.checksums, named))
    return (*found.unreadable, *tensors, *files)


def compare_published(published: Mapping[str, str], found: Scan) -> tuple[Finding, ...]:
    """Files that are not those that the hub published, as far as that is known."""
    return tuple(
        Finding(file=name, tensor=None, problem="is not the file that the hub published")
        for name, digest in published.items()
        if found.checksums.files[name].sha256 not in {digest, ""}
    )


def published_digests(work: Mapping[str, FilePlan]) -> dict[str, str]:
    """SHA-256 of files in Hugging Face's cache, which keeps large files under that name."""
    resolved = {name: plan.path.resolve() for name, plan in work.items()}
    return {
        name: path.name
        for name, path in resolved.items()
        if path.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", path.name)
    }


def read_checksums(path: Path) -> Checksums:
    """The record in a file.

    Raises:
        CheckpointError: It is not there, not readable, or not such a record.
    """
    raw = read_bytes(path, limit_bytes=LARGE_FILE_BYTES)
    try:
        return Checksums.model_validate_json(raw)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is no record of checksums that this headrace reads "
            f"({first_complaint(error)}). "
            "Write it again from a copy that you trust: headrace verify MODEL --create --force."
        ) from error


def write_checksums(path: Path, checksums: Checksums) -> None:
    """Put a record into place, whole or not at all.

    Raises:
        OSError: It could not be written.
    """
    write_whole(path, checksums.model_dump_json(indent=1).encode() + b"\n")


def _shard_plan(shard: Path) -> FilePlan:
    header = read_header(shard)
    entries = sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end))
    spans = [Span(name=_HEADER, start=0, end=header.data_start)]
    spans += [Span(name=name, start=entry.start, end=entry.end) for name, entry in entries]
    return FilePlan(path=shard, spans=tuple(spans), whole=True)


def _settings_files(folder: Path) -> list[Path]:
    found = {file for pattern in _SETTINGS for file in folder.glob(pattern)}
    return sorted(
        file
        for file in found
        if not file.name.startswith((".", "headrace.")) and is_regular_file(file)
    )


def _checksums_of(plan: FilePlan, digests: FileDigests, *, is_shard: bool) -> FileChecksums:
    tensors = {name: digest for name, digest in digests.spans.items() if name != _HEADER}
    return FileChecksums(
        size_bytes=plan.size_bytes,
        sha256=digests.whole or "",
        header=digests.spans.get(_HEADER) if is_shard else None,
        tensors=tensors,
    )


def _compare_tensors(recorded: Checksums, found: Checksums) -> Iterator[Finding]:
    wanted, there = recorded.tensors(), found.tensors()
    for tensor, (file, digest) in wanted.items():
        if tensor not in there:
            yield Finding(file=file, tensor=tensor, problem="is missing")
        elif there[tensor][1] != digest:
            place = there[tensor][0]
            yield Finding(file=place, tensor=tensor, problem="differs from its checksum")
    for tensor, (file, _digest) in there.items():
        if tensor not in wanted:
            yield Finding(file=file, tensor=tensor, problem="is not in the checksums")


def _compare_files(recorded: Checksums, found: Checksums, named: set[str]) -> Iterator[Finding]:
    """Files whose difference no tensor has told already."""
    for name, wanted in recorded.files.items():
        there = found.files.get(name)
        if there is None:
            yield Finding(file=name, tensor=None, problem="is missing")
        elif there.sha256 != wanted.sha256 and name not in named:
            what = "has another header around the same tensors" if wanted.tensors else ""
            yield Finding(file=name, tensor=None, problem=what or "differs from its checksum")
    # A file that changes neither tokens nor prompts keeps the fingerprint, and may be added.
    if recorded.fingerprint != found.fingerprint:
        for name in found.files.keys() - recorded.files.keys() - named:
            yield Finding(file=name, tensor=None, problem="is not in the checksums")
