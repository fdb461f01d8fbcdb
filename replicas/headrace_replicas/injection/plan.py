"""What faults are to be injected: a plan that people write and tests build.

Each fault says where it strikes (which engines, which files) and when (from which read on, how
often). Whatever kinds there are, a plan with a word that nobody knows is refused: a fault that is
silently left out makes a test pass for nothing.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_replicas.contract.errors import SettingsError

Errno = Literal["EIO", "ENXIO", "ENODEV", "ENOTCONN", "ESTALE", "ETIMEDOUT"]


class Fault(BaseModel):
    """The base of all faults: which engines it strikes.

    Attributes:
        host: Pattern of the hosts' labels.
        device: Index of the device on its host; None means every one.
        generation: Which start of an engine on its device, counted from 1; None means every one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="*", min_length=1)
    device: int | None = Field(default=None, ge=0)
    generation: int | None = Field(default=None, ge=1)

    def strikes_engine(self, host: str, device: int, generation: int) -> bool:
        """Whether it is meant for this engine."""
        return (
            fnmatchcase(host, self.host)
            and self.device in (None, device)
            and self.generation in (None, generation)
        )

    def __str__(self) -> str:
        said = self.model_dump(mode="json", exclude_defaults=True, exclude={"kind"})
        kind = str(getattr(self, "kind", type(self).__name__))
        return " ".join([kind, *(f"{name}={value}" for name, value in said.items())])


class StorageFault(Fault):
    """The base of faults of reading experts.

    Attributes:
        file: Pattern of the files' names, without their folder.
        from_read: The first read of these bytes that it strikes, counted from 1 in each engine.
        times: How many reads it strikes; None means all from then on.
        ratio: Share of those reads that it strikes, drawn from the plan's seed.
        once_exists: It waits until this file is there, so that a test can say when; None does not.
        from_byte: First byte of the part of the file that it strikes, as of a bad sector.
        to_byte: First byte after that part; None means the file's end.
    """

    file: str = Field(default="*", min_length=1)
    from_read: int = Field(default=1, ge=1)
    times: int | None = Field(default=None, ge=1)
    ratio: float = Field(default=1.0, gt=0, le=1)
    once_exists: Path | None = None
    from_byte: int = Field(default=0, ge=0)
    to_byte: int | None = Field(default=None, ge=1)

    def strikes_part(self, path: Path, offset: int, length: int) -> bool:
        """Whether it is meant for reads of this part of this file."""
        behind = self.to_byte is not None and offset >= self.to_byte
        return fnmatchcase(path.name, self.file) and offset + length > self.from_byte and not behind


class SlowRead(StorageFault):
    """All reads share a link of so many bytes a second, as on a network volume."""

    kind: Literal["slow_read"] = "slow_read"
    bytes_per_s: float = Field(gt=0, allow_inf_nan=False)


class StalledRead(StorageFault):
    """A read does not come back for a while, and then does."""

    kind: Literal["stalled_read"] = "stalled_read"
    stall_s: float = Field(gt=0, allow_inf_nan=False)


class ReadError(StorageFault):
    """The system refuses a read, as when a disk fails or a volume is unplugged."""

    kind: Literal["read_error"] = "read_error"
    errno: Errno = "EIO"


class ShortRead(StorageFault):
    """A read brings fewer bytes than were asked for; whoever reads must ask for the rest."""

    kind: Literal["short_read"] = "short_read"


class TruncatedFile(StorageFault):
    """The file seems to end before some byte.

    Attributes:
        size_bytes: Its length, as reads find it.
    """

    kind: Literal["truncated_file"] = "truncated_file"
    size_bytes: int = Field(ge=0)


AnyStorageFault = SlowRead | StalledRead | ReadError | ShortRead | TruncatedFile
# Other kinds of faults are added here; `arming` hands each to what injects it.
AnyFault = Annotated[AnyStorageFault, Field(discriminator="kind")]


class InjectionPlan(BaseModel):
    """A plan file.

    Attributes:
        seed: Of all draws.
        faults: At least one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    faults: tuple[AnyFault, ...] = Field(min_length=1)


_LARGEST_BYTES: Final = 1024 * 1024


def read_plan(path: Path) -> InjectionPlan:
    """A plan from a YAML file.

    Raises:
        SettingsError: It cannot be read, or is no plan; the message says where.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    if len(raw) > _LARGEST_BYTES:
        raise _refused(path, "is longer than 1 MiB and no plan")
    try:
        return InjectionPlan.model_validate(yaml.safe_load(raw))
    except yaml.YAMLError as error:
        raise _refused(path, f"is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise _refused(path, f"is no plan: {place}: {first['msg']}") from error


def _refused(path: Path, why: str) -> SettingsError:
    return SettingsError(
        f"injection.plan: {path} {why}. docs/streaming.md shows a plan; remove injection.plan to "
        "inject nothing.",
        "injection.plan",
    )
