"""What faults are to be injected: a plan that people write and tests build.

Each fault says where it strikes (which engines, which files) and when (from which read on, how
often). Whatever kinds there are, a plan with a word that nobody knows is refused: a fault that is
silently left out makes a test pass for nothing.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_replicas.contract.errors import SettingsError

MetalError = Literal[
    "timeout",
    "impacting_interactivity",
    "hang",
    "submissions_ignored",
    "innocent_victim",
    "out_of_memory",
    "invalid_resource",
    "invalid_input",
    "page_fault",
    "protection_violation",
    "stack_overflow",
]
Errno = Literal["EIO", "ENXIO", "ENODEV", "ENOTCONN", "ESTALE", "ETIMEDOUT"]

# A path may name the engine, so that one plan serves many and each is struck on its own.
_PLACEHOLDERS: Final = ("host", "device", "generation")


class Fault(BaseModel):
    """The base of all faults: which engines it strikes, and when.

    Attributes:
        host: Pattern of the hosts' labels.
        device: Index of the device on its host; None means every one.
        generation: Which start of an engine on its device, counted from 1; None means every one.
        times: How many occasions it strikes; None means all from the first on.
        ratio: Share of those occasions that it strikes, drawn from the plan's seed.
        once_exists: It waits until this file is there, so that a test can say when; None does not.
            `{host}`, `{device}` and `{generation}` in it are the engine's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="*", min_length=1)
    device: int | None = Field(default=None, ge=0)
    generation: int | None = Field(default=None, ge=1)
    times: int | None = Field(default=None, ge=1)
    ratio: float = Field(default=1.0, gt=0, le=1)
    once_exists: Path | None = None

    @property
    def first(self) -> int:
        """The first occasion that it strikes, counted from 1 in each engine."""
        return 1

    @property
    def is_there(self) -> bool:
        """Whether it need not wait any more for the file that it waits for."""
        return self.once_exists is None or self.once_exists.exists()

    def meant_for(self, **engine: object) -> Self:
        """The fault with its placeholders filled.

        Args:
            engine: `host`, `device` and `generation`.
        """
        if self.once_exists is None:
            return self
        path = str(self.once_exists)
        for name in _PLACEHOLDERS:
            path = path.replace(f"{{{name}}}", str(engine[name]))
        return self.model_copy(update={"once_exists": Path(path)})

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
        from_byte: First byte of the part of the file that it strikes, as of a bad sector.
        to_byte: First byte after that part; None means the file's end.
    """

    file: str = Field(default="*", min_length=1)
    from_read: int = Field(default=1, ge=1)
    from_byte: int = Field(default=0, ge=0)
    to_byte: int | None = Field(default=None, ge=1)

    @property
    def first(self) -> int:
        """See `Fault.first`."""
        return self.from_read

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


class DeviceFault(Fault):
    """The base of faults of the device: they strike when MLX is asked to compute or to wait.

    Attributes:
        from_call: The first such call that it strikes, counted from 1 in each engine.
    """

    from_call: int = Field(default=1, ge=1)

    @property
    def first(self) -> int:
        """See `Fault.first`."""
        return self.from_call


class DeviceError(DeviceFault):
    """A command buffer fails.

    Attributes:
        error: Which of Metal's errors. After `submissions_ignored` every later call of this
            process fails with it too.
        text: Other words than the usual ones, for forms that drift between systems.
        stall_s: Seconds for which the call hangs first.
        late: The call itself returns zeros, and the next call raises.
    """

    kind: Literal["device_error"] = "device_error"
    error: MetalError = "timeout"
    text: str = ""
    stall_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    late: bool = False


class Abort(DeviceFault):
    """The process aborts with an error's text on stderr, as MLX before 0.32 did."""

    kind: Literal["abort"] = "abort"
    error: MetalError = "timeout"
    stall_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Exit(DeviceFault):
    """The process ends by itself.

    Attributes:
        status: With which status.
    """

    kind: Literal["exit"] = "exit"
    status: int = Field(default=0, ge=0, le=255)


class Hang(DeviceFault):
    """A call does not come back.

    Attributes:
        holds_gil: Whether no other thread of Python runs meanwhile.
        for_s: Seconds after which it does come back; None is never.
    """

    kind: Literal["hang"] = "hang"
    holds_gil: bool = False
    for_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class SlowDevice(DeviceFault):
    """Every call takes longer.

    Attributes:
        delay_s: Seconds by which.
    """

    kind: Literal["slow_device"] = "slow_device"
    delay_s: float = Field(gt=0, allow_inf_nan=False)


class WrongOutput(DeviceFault):
    """What a call computes is wrong, and nothing says so.

    Attributes:
        form: `nan`, `zeros`, or `garbage`: other tokens than the right ones.
    """

    kind: Literal["wrong_output"] = "wrong_output"
    form: Literal["nan", "zeros", "garbage"] = "nan"


class StrandedMemory(Fault):
    """The memory of an engine that ended does not come back.

    Attributes:
        stranded_bytes: How much of it.
    """

    kind: Literal["stranded_memory"] = "stranded_memory"
    stranded_bytes: int = Field(gt=0)


class SlowTeardown(Fault):
    """An engine that leaves in order takes its time.

    Attributes:
        takes_s: Seconds.
    """

    kind: Literal["slow_teardown"] = "slow_teardown"
    takes_s: float = Field(gt=0, allow_inf_nan=False)


class GpuNeighbour(Fault):
    """Another process seems to use the GPU.

    Attributes:
        says: What is told of it, as a host's own reader would.
    """

    kind: Literal["gpu_neighbour"] = "gpu_neighbour"
    says: str = Field(min_length=1)


AnyStorageFault = SlowRead | StalledRead | ReadError | ShortRead | TruncatedFile
AnyDeviceFault = DeviceError | Abort | Exit | Hang | SlowDevice | WrongOutput
AnyFault = Annotated[
    AnyStorageFault | AnyDeviceFault | StrandedMemory | SlowTeardown | GpuNeighbour,
    Field(discriminator="kind"),
]


class InjectionPlan(BaseModel):
    """A plan file.

    Attributes:
        seed: Of all draws.
        forgiven_timeouts: After so many injected timeouts of one host the driver ignores every
            further call of the process that had the last one, and of each later process from its
            first timeout on; a restart forgives nothing. None forgives all.
        faults: At least one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    forgiven_timeouts: int | None = Field(default=None, ge=0)
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
