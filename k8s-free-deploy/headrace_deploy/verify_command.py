"""`headrace verify`: find the byte that changed."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from headrace_deploy.byte_bar import ByteBars
from headrace_replicas.contract.errors import CheckpointError, SettingsError
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint, resolve
from headrace_replicas.engine.checksums import (
    CHECKSUMS_FILE,
    Finding,
    Scan,
    compare,
    compare_published,
    plans,
    published_digests,
    read_checksums,
    scan,
    write_checksums,
)
from headrace_replicas.engine.experts.pack_index import (
    INDEX_FILE,
    LayerDamage,
    damages,
    read_index,
    state_folder,
)
from headrace_replicas.engine.json_files import is_regular_file, some_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        model: `demo`, a folder, or a repository of the hub.
        revision: Of a repository.
        create: Record instead of compare.
        force: Replace an older record.
        output: File of the record; None takes the one in the model's folder.
        state_dir: Where a pack may be.
        workers: Files read at a time.
        as_json: Print JSON.
    """

    model: str
    revision: str | None
    create: bool
    force: bool
    output: Path | None
    state_dir: Path
    workers: int
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found.

    Attributes:
        checkpoint: The folder.
        fingerprint: Of the checkpoint.
        compared_with: What there was to compare with.
        files: Number of files read.
        tensors: Number of tensors read.
        read_bytes: Bytes read.
        findings: Everything that is not as it should be.
    """

    checkpoint: str
    fingerprint: str
    compared_with: tuple[str, ...]
    files: int
    tensors: int
    read_bytes: int
    findings: tuple[Finding, ...]


def run(request: Request, console: Console, bars: ByteBars) -> int:
    """Record or compare.

    Returns:
        0 when everything is as it should be, 1 otherwise.

    Raises:
        CheckpointError: The checkpoint is broken in a way that its headers tell, or a record may
            not be made of it.
        SettingsError: There is a record already, or nothing to compare with.
    """
    checkpoint = read_checkpoint(resolve(request.model, request.revision))
    record = request.output or checkpoint.path / CHECKSUMS_FILE
    if request.create:
        verdict = _create(request, checkpoint, record, bars)
    else:
        verdict = _compare(request, checkpoint, record, bars)
    if request.as_json:
        console.print(json.dumps(asdict(verdict), indent=2))
    else:
        _tell(verdict, console, wrote=record if request.create else None)
    return 1 if verdict.findings else 0


def _create(request: Request, checkpoint: Checkpoint, record: Path, bars: ByteBars) -> Verdict:
    if is_regular_file(record) and not request.force:
        raise SettingsError(
            f"{record} exists. Leave out --create to compare with it, or replace it with "
            "--create --force.",
            "output",
        )
    if not record.parent.is_dir():
        raise SettingsError(f"no such folder: {record.parent}.", "output")
    work = plans(checkpoint)
    found = _scan(request, checkpoint, bars)
    published = published_digests(work)
    wrong = (*found.unreadable, *compare_published(published, found))
    if wrong:
        raise CheckpointError(
            f"no checksums were recorded, because this copy is damaged: "
            f"{some_of(map(str, wrong))}. Download the checkpoint again."
        )
    try:
        write_checksums(record, found.checksums)
    except OSError as error:
        raise SettingsError(
            f"{record} cannot be written: {error.strerror}. Give another place with --output PATH.",
            "output",
        ) from error
    return _verdict(checkpoint, found, ("the hub's checksums",) if published else (), ())


def _compare(request: Request, checkpoint: Checkpoint, record: Path, bars: ByteBars) -> Verdict:
    recorded = read_checksums(record) if is_regular_file(record) else None
    published = published_digests(plans(checkpoint))
    packs = _packs(request, checkpoint)
    if recorded is None and not published and not packs:
        raise SettingsError(
            f"there are no checksums of {checkpoint.path}: record them with --create while you "
            f"trust this copy (or give the file that holds them with --output).",
            "output",
        )
    compared: list[str] = []
    findings: list[Finding] = []
    found = None
    if recorded is not None or published:
        found = _scan(request, checkpoint, bars)
        findings += found.unreadable if recorded is None else compare(recorded, found)
        findings += compare_published(published, found)
        compared += [str(record)] if recorded is not None else []
        compared += [f"the hub's checksums of {len(published)} files"] if published else []
    for pack in packs:
        findings += _check_pack(pack, checkpoint, request.workers, bars)
        compared.append(f"the checksums in {pack / INDEX_FILE}")
    return _verdict(checkpoint, found, tuple(compared), tuple(findings))


def _scan(request: Request, checkpoint: Checkpoint, bars: ByteBars) -> Scan:
    work = plans(checkpoint)
    with bars("reading", sum(plan.size_bytes for plan in work.values())) as on_bytes:
        return scan(checkpoint, work, workers=request.workers, on_bytes=on_bytes)


def _verdict(
    checkpoint: Checkpoint,
    found: Scan | None,
    compared_with: tuple[str, ...],
    findings: tuple[Finding, ...],
) -> Verdict:
    files = {} if found is None else found.checksums.files
    return Verdict(
        checkpoint=str(checkpoint.path),
        fingerprint=checkpoint.fingerprint,
        compared_with=compared_with,
        files=len(files),
        tensors=sum(len(file.tensors) for file in files.values()),
        read_bytes=sum(file.size_bytes for file in files.values()),
        findings=findings,
    )


def _packs(request: Request, checkpoint: Checkpoint) -> list[Path]:
    """Folders with a pack, each once."""
    places = (checkpoint.path, state_folder(request.state_dir, checkpoint.fingerprint))
    return list({place.resolve(): place for place in places if (place / INDEX_FILE).exists()})


def _check_pack(
    folder: Path, checkpoint: Checkpoint, workers: int, bars: ByteBars
) -> Iterator[Finding]:
    path = str(folder / INDEX_FILE)
    try:
        index = read_index(folder / INDEX_FILE)
    except CheckpointError as error:
        yield Finding(file=path, tensor=None, problem=f"is refused: {error}")
        return
    if index.fingerprint != checkpoint.fingerprint:
        problem = "belongs to another checkpoint. Write it again with headrace pack"
        yield Finding(file=path, tensor=None, problem=problem)
        return
    total = sum(layer.layout.size_bytes for layer in index.layers)
    with bars("reading the pack", total) as on_bytes:
        found = damages(folder, index.layers, workers=workers, on_bytes=on_bytes)
    for damage in found:
        yield _pack_finding(folder, damage)


def _pack_finding(folder: Path, damage: LayerDamage) -> Finding:
    numbers = ", ".join(map(str, damage.experts[:5]))
    rest = len(damage.experts) - 5
    numbers += f" and {rest} more" if rest > 0 else ""
    problem = damage.problem or "differs from what was written"
    where = f"experts {numbers} of {damage.layer.layout.path}"
    return Finding(
        file=str(folder / damage.layer.file),
        tensor=None,
        problem=f"{problem}: {where}. headrace pack writes them again",
    )


def _tell(verdict: Verdict, console: Console, *, wrote: Path | None) -> None:
    for finding in verdict.findings:
        console.print(str(finding))
    if verdict.files:
        console.print(
            f"{verdict.files} files, {verdict.tensors} tensors, {verdict.read_bytes / 1e9:.2f} GB"
        )
    for source in verdict.compared_with:
        console.print(f"compared with {source}")
    if wrote is not None:
        console.print(f"recorded in {wrote}")
    elif verdict.findings:
        count = len(verdict.findings)
        console.print(f"{count} finding{'s' * (count > 1)}: do not serve this copy")
    else:
        console.print("everything is as recorded")
