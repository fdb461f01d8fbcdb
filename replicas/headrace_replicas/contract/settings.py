"""Every setting, with its unit, what None means, and why the default is what it is.

The models are the reference: `k8s-free-deploy/fleet.example.yaml` is checked against them, and
`headrace config show` prints each value with its origin. Unknown keys are refused.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

MOST_DRAFT_TOKENS: Final = 4
"""Upper end of `engine.draft_tokens`: further guesses are hardly ever right all the way."""


class Section(BaseModel):
    """The base of every settings section: immutable, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelSettings(Section):
    """Which model is served, and how it is read."""

    path: str = Field(
        default="demo",
        min_length=1,
        description="`demo`, a folder with a checkpoint, or a Hugging Face repository id.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a Hugging Face repository; None takes `main`.",
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        description="The id clients use; None takes the last part of `path` (headrace-demo).",
    )
    aliases: tuple[str, ...] = Field(default=(), description="Other ids that mean this model.")
    context_tokens: Count | None = Field(
        default=None,
        description="Prompt and answer together, at most; None takes the checkpoint's own limit.",
    )


class EngineSettings(Section):
    """How one engine computes."""

    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="`auto` takes the GPU where MLX has one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="`auto` computes as shipped on a GPU and in float32 on the CPU, where that is "
        "six times faster (measured on the demo model: 80 tok/s against 13).",
    )
    max_batch: Count = Field(default=16, description="Requests that decode together.")
    prefill_chunk_tokens: Count = Field(
        default=512,
        description="Prompt tokens per prefill step; cancellation and decode steps of the "
        "neighbours happen between two of them.",
    )
    flush_s: Seconds = Field(
        default=0.03,
        description="Tokens wait at most this long to travel together (20 to 50 ms cost a tenth "
        "of the CPU of one message per token).",
    )
    flush_tokens: Count = Field(default=8, description="Tokens that travel together at most.")
    slots: str = Field(
        default="auto",
        pattern=r"^(auto|all|\d+(\.\d+)?(%|MB|GB|MiB|GiB))$",
        description="Experts in memory: `all` (resident), a share of them (`25%`), a budget in "
        "bytes (`8GiB`), or `auto`: all if they fit into this host's memory, else what does.",
    )
    schedule: Literal["auto", "layers", "overlap", "speculate"] = Field(
        default="auto",
        description="How decode steps fetch missing experts: layer by layer, the same while those "
        "that are there are computed, or whole tokens until none is missing. `auto` measures all "
        "at the start; the tokens are the same.",
    )
    read_workers: Count = Field(
        default=12, description="Expert reads under way at a time; 8 to 16 keep an SSD busy."
    )
    warm_up_bytes_per_s: int | None = Field(
        default=500_000_000,
        ge=0,
        description="While no request runs, experts without a slot are read into the memory that "
        "the plan leaves to the page cache, at most this fast; None or 0 turns that off. The "
        "default takes a tenth to a third of an SSD, so that other programs hardly notice, and "
        "fills 30 GB in a minute.",
    )
    draft_model: str | None = Field(
        default=None,
        min_length=1,
        description="A small model with the same tokenizer, whose guesses the model verifies "
        "several at a time (`demo`, a folder, or a Hugging Face repository id); None does without.",
    )
    draft_tokens: int = Field(
        default=2,
        ge=1,
        le=MOST_DRAFT_TOKENS,
        description="Guesses in one pass; with streaming experts fewer, as many as the slots allow "
        "(2, because each needs experts of its own and the later ones are seldom right).",
    )
    cache_limit_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=0,
        description="Freed memory that MLX's allocator keeps; a limit replaces clearing it.",
    )
    memory_check_s: Seconds = Field(
        default=1.0,
        description="While experts stream, the host's memory is looked at this often, and they get "
        "fewer slots when others need it. A look takes a millisecond; half of the headroom, half a "
        "GiB or more, lasts most programs longer than a second.",
    )


class ReplicaSettings(Section):
    """The Ray Serve deployment of engines."""

    count: Count = Field(default=1, description="Engines in the fleet.")
    max_ongoing_requests: Count = Field(
        default=64, description="Requests inside one replica, running or waiting."
    )
    health_check_period_s: Seconds = Field(
        default=1.0, description="Ray Serve asks for the last verdict this often."
    )
    health_check_timeout_s: Seconds = Field(
        default=3.0,
        description="Three unanswered checks in a row end a frozen process; the gateways have "
        "moved its streams long before.",
    )
    graceful_shutdown_timeout_s: Seconds = Field(
        default=5.0, description="After this a stopping process is killed."
    )


class GatewaySettings(Section):
    """The HTTP side."""

    host: str = Field(default="127.0.0.1", description="Address that the HTTP proxies bind.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP proxies.")
    replicas: Count = Field(default=1, description="Gateway processes.")
    max_ongoing_requests: Count = Field(default=512, description="Requests inside one gateway.")
    max_body_bytes: Count = Field(
        default=8 * 1024 * 1024, description="A larger request body is refused with 413."
    )
    keepalive_s: Seconds = Field(
        default=5.0,
        description="A stream that has nothing to say sends a comment line this often, by the "
        "clock; proxies and clients give up after 10 to 300 s of silence.",
    )
    request_timeout_s: Seconds = Field(
        default=3600.0, description="Deadline of a request that names none."
    )
    api_keys: tuple[str, ...] = Field(
        default=(),
        description="SHA-256 digests (hex) of the accepted API keys; empty lets everybody in.",
    )


class FleetSettings(Section):
    """How the controller watches the replicas."""

    probe_period_s: Seconds = Field(
        default=10.0, description="An idle replica is probed this often."
    )
    probe_timeout_s: Seconds = Field(
        default=10.0,
        description="A canary without a verdict after this has failed, unless the engine "
        "progressed meanwhile.",
    )
    snapshot_stale_s: Seconds = Field(
        default=5.0, description="A replica whose snapshot is older is suspect."
    )
    ready_window_s: Seconds = Field(
        default=60.0, description="/readyz wants a passed generation probe not older than this."
    )
    canary_failures: Count = Field(
        default=2, description="Failed canaries in a row after which a replica is replaced."
    )
    read_failures: Count = Field(
        default=3,
        description="Failed reads of one file of experts, within a quarter of an hour, after which "
        "a replica is replaced. One whose file was changed is replaced at once.",
    )
    max_unavailable: Count = Field(
        default=1, description="Replicas that may be out by choice at a time."
    )
    min_ready: int = Field(
        default=1,
        ge=0,
        description="A replica that can still serve is not replaced while fewer others than this "
        "are ready; its replacement stays owed.",
    )
    canary_period_s: Seconds = Field(
        default=30.0,
        description="Real tokens prove that a busy replica lives, not that they are right: a known "
        "answer is asked for this often all the same.",
    )
    slow_ratio: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="A replica slower than this share of its own usual rate for `slow_for_s` opens "
        "an incident; it is routed less, not replaced.",
    )
    slow_for_s: Seconds = Field(default=30.0, description="See `slow_ratio`.")
    load_slow_s: Seconds = Field(
        default=1800.0,
        description="A load that would take longer than this at the pace of its bytes so far opens "
        "an incident; nothing is killed. Half an hour is 200 GB at 110 MB/s, far below any SSD.",
    )
    poison_for_s: Seconds = Field(
        default=3600.0,
        description="A request that was there at two deaths or Metal errors is refused for this "
        "long.",
    )


class FaultSettings(Section):
    """What is done about faults of a GPU and about processes that die."""

    on_timeout: Literal["replace", "canary"] = Field(
        default="replace",
        description="After a GPU timeout: `replace` the engine at the first, because any may be "
        "the last that Metal forgives; `canary` lets a known answer decide about the first of a "
        "window, for models that load for many minutes.",
    )
    timeout_window_s: Seconds = Field(
        default=21_600.0,
        description="Faults of a host count together for this long, over restarts too: public "
        "traces show them 36 and 85 minutes apart.",
    )
    hang_floor_s: Seconds = Field(
        default=30.0,
        description="A busy engine without progress for this long, or for five times the longest "
        "pause it is known for if that is longer, is killed by its watchdog. Its requests have "
        "moved long before; a prefill chunk of a large model may take ten seconds.",
    )
    hang_first_s: Seconds = Field(
        default=120.0,
        description="The same before any progress was seen, and in all of a load: first steps "
        "compile kernels.",
    )
    hang_reading_s: Seconds = Field(
        default=300.0,
        description="The same while it waits for storage, where nothing on the GPU can hang.",
    )
    hang_grace_s: Seconds = Field(
        default=2.0,
        description="Between the stack dump and the kill; progress meanwhile calls it off.",
    )
    back_off_s: Seconds = Field(
        default=1.0,
        description="Pause before an engine is started again on a device where one died; it "
        "doubles with each death in a row.",
    )
    back_off_max_s: Seconds = Field(default=300.0, description="The longest such pause.")
    breaker_deaths: Count = Field(
        default=3,
        description="So many deaths on one device within `breaker_window_s` hold it: no start for "
        "`breaker_hold_s`.",
    )
    breaker_window_s: Seconds = Field(default=900.0, description="See `breaker_deaths`.")
    breaker_hold_s: Seconds = Field(
        default=900.0, description="See `breaker_deaths`; after it one start is tried."
    )
    memory_wait_s: Seconds = Field(
        default=120.0,
        description="How long a start waits for the memory of the process before it; then the "
        "host is quarantined, because a driver that keeps it needs a reboot.",
    )


class FailoverSettings(Section):
    """When a request leaves a replica, and how often it may."""

    max_moves: int = Field(default=2, ge=0, description="Moves of one request at most.")
    stall_floor_s: Seconds = Field(
        default=0.5, description="Added to three expected gaps to give the stall deadline."
    )
    first_gap_s: Seconds = Field(
        default=2.0, description="Expected gap between signs of life before any was measured."
    )
    no_replica_wait_s: Seconds = Field(
        default=30.0,
        description="A request waits this long for a replica to come back before it gets a 503.",
    )


class RaySettings(Section):
    """The local Ray node that `headrace serve` and `headrace demo` start."""

    port: int = Field(default=6379, ge=0, le=65535, description="Port of Ray's head.")
    dashboard_port: int = Field(default=8265, ge=0, le=65535, description="Ray's dashboard.")
    temp_dir: Path | None = Field(
        default=None,
        description="Ray's session folder; None makes a short one (socket paths end at 103 bytes).",
    )
    object_store_bytes: int = Field(
        default=150_000_000, ge=80_000_000, description="Headrace puts no tensors there."
    )


class InjectionSettings(Section):
    """Faults on purpose, to see what a fleet does; never by accident."""

    armed: bool = Field(
        default=False,
        description="Must be true for a plan to be taken; only the environment can set it "
        "(HEADRACE_INJECTION__ARMED=true), so that no file left behind injects faults.",
    )
    plan: Path | None = Field(
        default=None,
        description="YAML file that says which faults; None injects none. Read where the engine "
        "runs.",
    )

    @field_validator("plan")
    @classmethod
    def _only_when_armed(cls, plan: Path | None, info: ValidationInfo) -> Path | None:
        if plan is not None and not info.data.get("armed"):
            raise ValueError(
                "injects faults, and injection.armed is false; set HEADRACE_INJECTION__ARMED=true "
                "in the environment if that is meant, else remove injection.plan"
            )
        return plan


class Settings(Section):
    """All settings of one headrace deployment."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    replica: ReplicaSettings = ReplicaSettings()
    gateway: GatewaySettings = GatewaySettings()
    fleet: FleetSettings = FleetSettings()
    faults: FaultSettings = FaultSettings()
    failover: FailoverSettings = FailoverSettings()
    ray: RaySettings = RaySettings()
    injection: InjectionSettings = InjectionSettings()
    state_dir: Path = Field(
        default=Path("~/.headrace"),
        description="Incidents, canaries and device locks; `HEADRACE_STATE_DIR` sets it too.",
    )
