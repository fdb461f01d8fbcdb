"""The known prompt and its expected answer, by which an engine proves that it still computes.

The expected ids of the demo model are shipped. Those of any other checkpoint are recorded at the
first load on this host, after two runs agreed, for each checkpoint, compute type and engine
version; from then on every start and every probe is compared with them, token by token.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Final

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.contract.requests import (
    CheckpointIdentity,
    GenerateRequest,
    SamplingParams,
)

QUESTION: Final = "Count from 1 to 20."
# The repeat tripwire of a broken engine shows within 8 tokens; a few more cost milliseconds.
CANARY_TOKENS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A prompt and the ids that a sound engine answers with, greedily.

    Attributes:
        prompt_ids: What is asked.
        expected_ids: What must come back: `CANARY_TOKENS` ids.
    """

    prompt_ids: tuple[int, ...]
    expected_ids: tuple[int, ...]


def canary_request(
    request_id: str, prompt_ids: Sequence[int], identity: CheckpointIdentity
) -> GenerateRequest:
    """The request that a canary sends to its own engine.

    It has no stop ids: an answer that ended at once would prove nothing. It wants the bits of
    single decode steps, so that drafts, which come and go, cannot change its answer on any device.
    """
    return GenerateRequest(
        request_id=request_id,
        attempt=1,
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=CANARY_TOKENS,
        stop_ids=frozenset(),
        model="canary",
        fingerprint=identity.fingerprint,
        is_probe=True,
        resume_mode="exact",
    )


def difference(canary: Canary, got: Sequence[int]) -> str:
    """Where an answer leaves the expected one, for a person; empty when it does not."""
    if tuple(got) == canary.expected_ids:
        return ""
    pairs = zip(canary.expected_ids, got, strict=False)
    first = next((i for i, (want, have) in enumerate(pairs) if want != have), None)
    if first is None:
        return f"expected {len(canary.expected_ids)} tokens, got {len(got)}"
    return f"token {first}: expected id {canary.expected_ids[first]}, got {got[first]}"


def load_or_record(
    state_dir: Path,
    identity: CheckpointIdentity,
    prompt_ids: Callable[[], Sequence[int]],
    answer: Callable[[Sequence[int]], tuple[int, ...]],
) -> Canary:
    """The canary of a checkpoint, recorded now if this is its first load here.

    Args:
        state_dir: Where recorded canaries are kept.
        identity: The checkpoint, its compute type and the engine's version.
        prompt_ids: Gives the tokens of `QUESTION`; called only to record.
        answer: Runs a prompt on the engine; called twice to record.

    Raises:
        CheckpointError: Two runs of the same prompt disagree.
    """
    shipped = _shipped(identity)
    if shipped is not None:
        return shipped
    path = canary_path(state_dir, identity)
    if path.exists():
        return _read(path)
    prompt = tuple(prompt_ids())
    first, second = answer(prompt), answer(prompt)
    if first != second:
        raise CheckpointError(
            f"two runs of the same prompt gave {list(first)} and {list(second)}: this device does "
            "not compute reliably; run the host's memory test and try another device"
        )
    canary = Canary(prompt_ids=prompt, expected_ids=first)
    _write(path, canary)
    return canary


def canary_path(state_dir: Path, identity: CheckpointIdentity) -> Path:
    """Where the recorded canary of a checkpoint lies."""
    key = f"{identity.fingerprint}/{identity.compute_dtype}/{identity.engine}"
    return state_dir / "canaries" / f"{sha256(key.encode()).hexdigest()[:32]}.json"


def _shipped(identity: CheckpointIdentity) -> Canary | None:
    packaged = resources.files("headrace_replicas") / "demo_model" / "canary.json"
    shipped = json.loads(packaged.read_text())
    if shipped["fingerprint"] != identity.fingerprint:
        return None
    if identity.compute_dtype not in shipped["compute_dtypes"]:
        return None
    return Canary(
        prompt_ids=tuple(shipped["prompt_ids"]), expected_ids=tuple(shipped["expected_ids"])
    )


def _read(path: Path) -> Canary:
    try:
        held = json.loads(path.read_text())
        return Canary(
            prompt_ids=tuple(map(int, held["prompt_ids"])),
            expected_ids=tuple(map(int, held["expected_ids"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the recorded canary {path} cannot be read ({error}); delete it to record a new one"
        ) from error


def _write(path: Path, canary: Canary) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(canary)))
    fresh.replace(path)
