"""One process that serves a streamed model while others take its host's memory and give it back.

    python -m tests.engine.sharing_process FOLDER

Prints one JSON object: what each phase has left in memory, and what was answered. A process of its
own, because memory that other tests have freed would blur what this one gives back.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from headrace_replicas.engine.checkpoint import read_checkpoint
from tests.support.engines import ask, request_for
from tests.support.shared_host import SharingEngine

PLANNED, HALF, TOP_K = 24, 12, 4
_PROMPTS = ((5, 900, 17, 333), tuple(range(1, 33)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The process after a resize, before and after it has answered.

    Attributes:
        slots: Of each layer.
        resized_bytes: Resident memory right after the resize.
        answered_bytes: Resident memory after the answers.
        answers: Token ids of each.
    """

    slots: int
    resized_bytes: int
    answered_bytes: int
    answers: list[list[int]]


def main() -> None:
    """Go through the phases, and print them."""
    checkpoint = read_checkpoint(Path(sys.argv[1]))
    sharing = SharingEngine(checkpoint, slots=PLANNED, top_k=TOP_K)
    process = psutil.Process()

    def phase() -> Phase:
        resized_bytes = process.memory_info().rss
        answers = [
            ask(sharing.engine, request_for(checkpoint, prompt, max_tokens=6)).wait()
            for prompt in _PROMPTS
        ]
        return Phase(
            slots=sharing.keeper.report.slots,
            resized_bytes=resized_bytes,
            answered_bytes=process.memory_info().rss,
            answers=[list(answer.ids) for answer in answers],
        )

    phases = [phase()]
    for slots in (TOP_K, PLANNED, HALF, TOP_K, PLANNED):
        sharing.others_take(1000 if slots == TOP_K else PLANNED - slots)
        if slots > phases[-1].slots:
            sharing.quiet_time()
        sharing.wait_for_slots(slots)
        phases.append(phase())
    sharing.engine.stop()
    shown = [asdict(one) for one in phases]
    print(json.dumps({"slot_bytes": sharing.limits.slot_bytes, "phases": shown}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
    os._exit(0)  # as an engine's process ends: Python's own end under MLX's threads may abort
