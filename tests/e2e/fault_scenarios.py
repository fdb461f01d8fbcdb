"""The scenarios of `make faults`: what is injected, what must become of it, and how soon.

Each is named as in docs/faults.md. The bounds are those of the table there; on a real stack, whose
machine others may use, a run fails only beyond three times the bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

NEIGHBOUR: Final = "Final Cut Pro (pid 533) used 61 % of the GPU in the last 5 s"

Fate = Literal["stays", "replaced", "exits"]
"""What must become of the engine with the fault: its process lives on and works; another takes its
place in order; its process is gone within the bound."""

SLACK: Final = 3.0
"""A real-stack run fails beyond so many times a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row.

    Attributes:
        name: As in docs/faults.md.
        what: What is injected, for a person.
        faults: Entries of an injection plan; they wait for the scenario's own file.
        fate: Of the engine that has the fault.
        causes: Causes that its incident may have; empty when there must be none.
        evidence: Words of which the incident must hold all.
        pause_s: Longest pause of a client.
        exit_s: For `exits`, until the process is gone; for `stays`, until it is ready again.
        detect_s: Until the incident is opened.
        idle: Nothing is asked meanwhile: the fault must be found by a probe.
        moves: Whether requests must have moved.
    """

    name: str
    what: str
    faults: tuple[Mapping[str, Any], ...]
    fate: Fate
    causes: tuple[str, ...] = ("metal_fault",)
    evidence: tuple[str, ...] = ()
    pause_s: float = 2.0
    exit_s: float = 10.0
    detect_s: float = 2.0
    idle: bool = False
    moves: bool = True


def _error(error: str, **more: Any) -> dict[str, Any]:
    return {"kind": "device_error", "error": error, **more}


_IGNORED = _error("submissions_ignored")
_WRONG = ("wrong_output", "canary_failed")
# A gateway that hears first calls a loss as it looks from outside.
_GONE = ("metal_fault", "replica_died", "replica_stalled", "engine_fault")

SCENARIOS: Final = (
    Scenario(
        name="E1a",
        what="one Timeout after a stall of 5 s",
        faults=(_error("timeout", stall_s=5, times=1),),
        fate="replaced",
        causes=("metal_fault", "replica_stalled"),
        evidence=("kIOGPUCommandBufferCallbackErrorTimeout",),
        detect_s=5.0,
    ),
    Scenario(
        name="E2",
        what="a call returns zeros, the next one raises Timeout",
        faults=(_error("timeout", late=True, times=1),),
        fate="replaced",
        causes=("metal_fault", "wrong_output"),
    ),
    Scenario(
        name="E3",
        what="Timeout three times, then ignored for ever",
        faults=(_error("timeout", times=3), {**_IGNORED, "from_call": 4}),
        fate="exits",
        causes=_GONE,
    ),
    Scenario(
        name="E4",
        what="Timeout, then ignored in the same second",
        faults=(_error("timeout", times=1), {**_IGNORED, "from_call": 2}),
        fate="exits",
        causes=_GONE,
    ),
    Scenario(
        name="E7",
        what="an idle engine is ignored: the probe finds it",
        faults=(_IGNORED,),
        fate="exits",
        causes=_GONE,
        detect_s=6.0,
        exit_s=6.0,
        idle=True,
        moves=False,
    ),
    Scenario(
        name="A1",
        what="abort with libc++abi's line",
        faults=({"kind": "abort"},),
        fate="exits",
        causes=("metal_fault",),
        evidence=("libc++abi: terminating", "kIOGPUCommandBufferCallbackErrorTimeout"),
        detect_s=1.0,
        exit_s=1.0,
    ),
    Scenario(
        name="A2",
        what="exit with status 0 in the middle of work",
        faults=({"kind": "exit", "status": 0},),
        fate="exits",
        causes=_GONE,
        detect_s=1.0,
        exit_s=1.0,
    ),
    Scenario(
        name="H1",
        what="a step never returns, other threads run",
        faults=({"kind": "hang"},),
        fate="exits",
        causes=_GONE,
        detect_s=5.0,
        exit_s=8.0,
    ),
    Scenario(
        name="H2",
        what="a step never returns and holds Python's lock",
        faults=({"kind": "hang", "holds_gil": True},),
        fate="exits",
        causes=_GONE,
        detect_s=5.0,
        exit_s=8.0,
    ),
    Scenario(
        name="H4",
        what="a stall of 4 s (125 to 350 s in the field), then an abort",
        faults=({"kind": "abort", "stall_s": 4},),
        fate="exits",
        causes=_GONE,
        detect_s=5.0,
        exit_s=6.0,
    ),
    Scenario(
        name="W1",
        what="logits that are not numbers",
        faults=({"kind": "wrong_output", "form": "nan"},),
        fate="replaced",
        causes=_WRONG,
    ),
    Scenario(
        name="W2",
        what="zeros",
        faults=({"kind": "wrong_output", "form": "zeros"},),
        fate="replaced",
        causes=_WRONG,
    ),
    Scenario(
        name="W3",
        what="plausible garbage: the next known answer finds it",
        faults=({"kind": "wrong_output", "form": "garbage"},),
        fate="replaced",
        causes=_WRONG,
        detect_s=10.0,
        exit_s=12.0,
        idle=True,
        moves=False,
    ),
    Scenario(
        name="M4",
        what="out of memory once",
        faults=(_error("out_of_memory", times=1),),
        fate="stays",
        evidence=("kIOGPUCommandBufferCallbackErrorOutOfMemory",),
        exit_s=5.0,
    ),
    Scenario(
        name="V1",
        what="an innocent victim once",
        faults=(_error("innocent_victim", times=1),),
        fate="stays",
        evidence=("victim of GPU error/recovery",),
    ),
    Scenario(
        name="V2a",
        what="Hang error",
        faults=(_error("hang"),),
        fate="exits",
        causes=_GONE,
        exit_s=1.0,
    ),
    Scenario(
        name="V2b",
        what="page fault",
        faults=(_error("page_fault"),),
        fate="exits",
        causes=_GONE,
        exit_s=1.0,
    ),
    Scenario(
        name="V2c",
        what="invalid resource",
        faults=(_error("invalid_resource"),),
        fate="exits",
        causes=_GONE,
        exit_s=1.0,
    ),
    Scenario(
        name="V3a",
        what="an old system's words (IOAF code 2)",
        faults=(
            _error(
                "timeout",
                text="Execution of the command buffer was aborted due to an error during execution."
                " Caused GPU Timeout Error (IOAF code 2)",
                times=1,
            ),
        ),
        fate="replaced",
        evidence=("(IOAF code 2)",),
    ),
    Scenario(
        name="V3b",
        what="a code that nobody knows (0000010c)",
        faults=(
            _error(
                "timeout",
                text="[METAL] Command buffer execution failed: Unheard Of "
                "(0000010c:kIOGPUCommandBufferCallbackErrorUnheardOf).",
            ),
        ),
        fate="exits",
        causes=_GONE,
        exit_s=1.0,
    ),
)


def plan_of(scenarios: tuple[Scenario, ...], folder: str) -> dict[str, Any]:
    """The injection plan in which each scenario waits for a file of its own, for each engine.

    Args:
        scenarios: Which.
        folder: Where the files are made.
    """
    faults = [
        {**fault, "once_exists": trigger(folder, one.name, "{device}", "{generation}")}
        for one in scenarios
        for fault in one.faults
    ]
    # One that is there all the time, as people's own programs are.
    return {"faults": [*faults, {"kind": "gpu_neighbour", "says": NEIGHBOUR}]}


def trigger(folder: str, name: str, device: object, generation: object) -> str:
    """The file that lets a scenario begin in one engine."""
    return f"{folder}/{name}-{device}-{generation}"
