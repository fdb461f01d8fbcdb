"""Faulty storage under one of two engines, over HTTP: what clients get, and what the incident says.

    python -m tests.e2e.storage [--stall-s 60]

The second half of `make seed1`: the item prompts go to a fleet of two engines that stream the demo
model's experts. One of them reads at 50 MB/s and then has a read that does not come back; later the
other one's volume is unplugged. Exits non-zero when an answer is not the right one, when nothing
had to move, or when no incident names a file.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.engines import DEMO_FOLDER
from tests.support.item_prompts import item_prompts
from tests.support.stack import READY_S, Stack, StreamedAnswer
from tests.support.waiting import must_come_true

STALLED, UNPLUGGED = 0, 1
"""The devices of the two engines."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of the item prompts.

    Attributes:
        what: What was done to the storage.
        good: Requests that ended whole with the right text.
        total: Requests sent.
        moved: Those that needed a second engine.
        incident: The incident of the engine with the fault.
    """

    what: str
    good: int
    total: int
    moved: int
    incident: dict[str, Any]

    @property
    def names_a_file(self) -> bool:
        """Whether somebody who reads the incident knows where to look."""
        return any(".safetensors" in text for text in self.incident["evidence"])


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyFleet:
    """A running fleet whose storage faults wait for a word.

    Attributes:
        stack: The fleet.
        folder: Where the files are made that let the faults loose.
    """

    stack: Stack
    folder: Path

    @classmethod
    @contextmanager
    def running(cls, folder: Path, *, stall_s: float) -> Iterator[Self]:
        """Two engines with a quarter of the experts in memory."""
        plan = folder / "faults.yaml"
        first = {"generation": 1}  # the engine that takes its place finds the storage mended
        faults = [
            {"kind": "slow_read", "bytes_per_s": 50e6, "device": STALLED},
            {
                "kind": "stalled_read",
                "stall_s": stall_s,
                "times": 1,
                "device": STALLED,
                "once_exists": str(folder / "stall"),
                **first,
            },
            {
                "kind": "read_error",
                "errno": "ENODEV",
                "device": UNPLUGGED,
                "once_exists": str(folder / "unplug"),
                **first,
            },
        ]
        plan.write_text(yaml.safe_dump({"faults": faults}))
        sections: dict[str, dict[str, Any]] = {
            "engine": {"slots": "25%", "schedule": "layers"},
            "injection": {"armed": True, "plan": plan},
        }
        with Stack.running(folder / "state", **sections) as stack:
            yield cls(stack=stack, folder=folder)

    def stall(self) -> Row:
        """One read of one engine does not come back while it works on some of the prompts."""
        return self._under_prompts("one read stalls", STALLED, "stall")

    def unplug(self) -> Row:
        """No read of one engine's volume works any more; it is replaced by one that can read."""
        old = self._replica_on(UNPLUGGED)
        row = self._under_prompts("a volume is unplugged", UNPLUGGED, "unplug")
        self.stack.wait_for_ready(2, without=frozenset({old["replica_id"]}))
        return row

    def _under_prompts(self, what: str, device: int, word: str) -> Row:
        self.stack.wait_for_ready(2)
        victim = self._replica_on(device)
        prompts = item_prompts(TextTokenizer.from_folder(DEMO_FOLDER))
        bodies = [self.stack.body(prompt.text, temperature=0.0) for prompt in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            pending = [pool.submit(self.stack.stream, body) for body in bodies]
            self._until(lambda: self._replica_on(device)["in_flight"])
            (self.folder / word).touch()
            answers: list[StreamedAnswer] = [future.result() for future in pending]
        good = sum(
            answer.whole and answer.text == prompt.summary
            for answer, prompt in zip(answers, prompts, strict=True)
        )
        return Row(
            what=what,
            good=good,
            total=len(answers),
            moved=sum(answer.attempts > 1 for answer in answers),
            incident=self._incident_of(victim["replica_id"]),
        )

    def _replica_on(self, device: int) -> dict[str, Any]:
        [found] = [
            one
            for one in self.stack.replicas()
            if one.get("snapshot", {}).get("device") == device and one["state"] != "lost"
        ]
        return found

    def _incident_of(self, replica_id: str) -> dict[str, Any]:
        """The newest incident of a replica, once it names a file, or as it is after a while."""
        found: list[dict[str, Any]] = []

        def names_a_file() -> bool:
            incidents = self.stack.get("/fleet/v1/incidents")["incidents"]
            found[:] = [one for one in incidents if one["replica"] == replica_id]
            return bool(found) and ".safetensors" in " ".join(found[-1]["evidence"])

        self._until(names_a_file)
        return found[-1]

    @staticmethod
    def _until(condition: Any) -> None:
        must_come_true(condition, "it did not come to that", patience_s=READY_S, every_s=_POLL_S)


def main() -> int:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stall-s", type=float, default=60.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-storage-"))
    write = sys.stdout.write
    write(f"{'storage of one of two engines':<30} {'right text':>10} {'moved':>6}  incident\n")
    with FaultyFleet.running(folder, stall_s=options.stall_s) as fleet:
        rows = [fleet.stall(), fleet.unplug()]
    for row in rows:
        cause = row.incident["cause"]
        write(f"{row.what:<30} {row.good:>5} of {row.total:<2} {row.moved:>6}  {cause}\n")
        for text in row.incident["evidence"][:3]:
            write(f"    {text}\n")
    good, total = sum(row.good for row in rows), sum(row.total for row in rows)
    write(f"storage: {good} of {total} requests whole and right\n")
    sound = all(row.moved and row.names_a_file for row in rows)
    return 0 if good == total and sound else 1


if __name__ == "__main__":
    sys.exit(main())
