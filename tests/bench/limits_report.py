"""What `make bench` prints, and what makes it fail: counts and equality, never a speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median

from headrace_replicas.engine.decode_bench import Work
from tests.bench.decoding import Disk, Fed, MemoryUse
from tests.bench.first_tokens import First
from tests.bench.routing import Misses

DECODE_HEAD = (
    f"{'slots':>6} {'pages':<5} {'tok/s':>7} {'resident':>8} {'share':>6} {'clock':>6} "
    f"{'of bound':>8} {'hits':>6} {'best':>6} {'MB/token':>8} {'least':>6} {'active':>6} "
    f"{'reads ms':>8} {'gates ms':>8}  logits equal"
)
FIRST_HEAD = (
    f"{'prompt':>6} {'chunk':>5} {'resident s':>10} {'warm s':>8} {'share':>6} {'cold s':>8} "
    f"{'share':>6} {'read GB':>8} {'touched GB':>10} {'ratio':>6} {'waits s':>7}  token equal"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same tokens, resident and streamed, one after the other.

    Attributes:
        resident: With all experts in memory.
        streamed: With some.
    """

    resident: Fed
    streamed: Fed

    @property
    def share(self) -> float:
        """Speed as a share of the resident model's, as if no other program ran."""
        return self.resident.work_s / self.streamed.work_s

    @property
    def wall_share(self) -> float:
        """The same by the wall clock."""
        return self.resident.wall_s / self.streamed.wall_s

    @property
    def same(self) -> int:
        """Tokens whose logits are equal bit for bit."""
        both = zip(self.resident.logits, self.streamed.logits, strict=True)
        return sum(a == b for a, b in both)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Some rounds of decode steps with some slots.

    Attributes:
        share: Of the experts that have slots.
        cold: Whether the page cache was dropped before each token.
        settling: The tokens before the rounds.
        pairs: The rounds.
        misses: What the routing trace says of the same tokens.
        disk: What reading experts takes.
    """

    share: float
    cold: bool
    settling: Pair
    pairs: Sequence[Pair]
    misses: Misses
    disk: Disk

    @property
    def tokens(self) -> int:
        """How many were fed."""
        return sum(len(pair.streamed.logits) for pair in self.pairs)

    @property
    def work(self) -> Work:
        """What streaming did in all rounds."""
        names = [entry.name for entry in fields(Work)]
        works = [pair.streamed.work for pair in self.pairs]
        return Work(**{name: sum(getattr(work, name) for work in works) for name in names})

    @property
    def speed_share(self) -> float:
        """Speed as a share of the resident model's, median of the rounds."""
        return median(pair.share for pair in self.pairs)

    @property
    def bound_share(self) -> float:
        """Speed as a share of the smaller of the resident model's and what the disk allows."""
        token_bytes = self.work.read_bytes / self.tokens
        from_disk_s = token_bytes / self.disk.bytes_per_s if self.cold else 0.0
        return median(
            max(pair.resident.work_s, from_disk_s * len(pair.resident.logits))
            / pair.streamed.work_s
            for pair in self.pairs
        )

    def __str__(self) -> str:
        done = self.work
        used = self.misses
        size = self.disk.expert_bytes / self.tokens / 1e6
        speeds = [
            median(len(fed.logits) / fed.work_s for fed in feds)
            for feds in ([p.streamed for p in self.pairs], [p.resident for p in self.pairs])
        ]
        return (
            f"{self.share:>6.1%} {'cold' if self.cold else 'warm':<5} {speeds[0]:>7.2f} "
            f"{speeds[1]:>8.2f} {self.speed_share:>6.3f} "
            f"{median(pair.wall_share for pair in self.pairs):>6.3f} {self.bound_share:>8.3f} "
            f"{used.hit_ratio:>6.3f} {used.best_hit_ratio:>6.3f} "
            f"{done.misses * size:>8.2f} {used.least * size:>6.2f} {used.needed * size:>6.2f} "
            f"{done.read_s / self.tokens * 1e3:>8.2f} {done.gate_s / self.tokens * 1e3:>8.2f}  "
            f"{sum(pair.same for pair in self.pairs)} of {self.tokens}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """One prompt, resident and with a quarter of the experts, from empty slots.

    Attributes:
        prompt_tokens: Its length.
        chunk_tokens: Prompt tokens for each prefill step.
        resident: With all experts in memory.
        warm: Streamed from the page cache.
        cold: Streamed from the disk.
    """

    prompt_tokens: int
    chunk_tokens: int
    resident: First
    warm: First
    cold: First

    @property
    def read_ratio(self) -> float:
        """Expert bytes read, by the bytes of the experts that the prompt chose."""
        return self.warm.work.misses / self.warm.touched

    @property
    def same(self) -> bool:
        """Whether the token and the log probabilities are the resident model's, bit for bit."""
        wanted = (self.resident.ids, self.resident.logprobs)
        return all((first.ids, first.logprobs) == wanted for first in (self.warm, self.cold))

    def __str__(self) -> str:
        size = self.warm.expert_bytes / 1e9
        return (
            f"{self.prompt_tokens:>6} {self.chunk_tokens:>5} {self.resident.work_s:>10.2f} "
            f"{self.warm.work_s:>8.2f} {self.resident.work_s / self.warm.work_s:>6.3f} "
            f"{self.cold.work_s:>8.2f} {self.resident.work_s / self.cold.work_s:>6.3f} "
            f"{self.warm.work.read_bytes / 1e9:>8.3f} {self.warm.touched * size:>10.3f} "
            f"{self.read_ratio:>6.3f} {self.cold.work.read_s:>7.2f}  {self.same}"
        )


def memory_line(name: str, use: MemoryUse, planned_bytes: int) -> str:
    """What a process took beside what was planned for it."""
    rest_bytes = use.grown_bytes - use.freed_bytes
    return (
        f"{name:>8} {planned_bytes / 1e6:>10.1f} {use.arrays_bytes / 1e6:>10.1f} "
        f"{use.arrays_bytes / planned_bytes:>6.3f} {rest_bytes / 1e6:>10.1f} "
        f"{rest_bytes / planned_bytes:>6.3f} {use.freed_bytes / 1e6:>9.1f} "
        f"{use.peak_arrays_bytes / 1e6:>10.1f}"
    )


MEMORY_HEAD = (
    f"{'slots':>8} {'planned MB':>10} {'arrays MB':>10} {'ratio':>6} {'process MB':>10} "
    f"{'ratio':>6} {'freed MB':>9} {'peak MB':>10}"
)


@dataclass(slots=True)
class Verdicts:
    """What has been found to hold, and what has not.

    Attributes:
        broken: Counts and equalities that do not hold; the bench fails with any.
        held: How many hold.
        targets: Lines that say what was aimed at and what came out.
        met: How many of them were met.
    """

    broken: list[str] = field(default_factory=list)
    held: int = 0
    targets: list[str] = field(default_factory=list)
    met: int = 0

    def check(self, holds: bool, claim: str) -> None:
        """Note whether a claim holds; one that does not is printed at once."""
        if holds:
            self.held += 1
        else:
            self.broken.append(claim)
            print(f"DOES NOT HOLD: {claim}", flush=True)

    def target(self, met: bool, aim: str, figure: str) -> None:
        """Note whether a target is met; it is no reason to fail."""
        self.met += met
        self.targets.append(f"{'met    ' if met else 'NOT MET'}  {aim}: {figure}")

    def print_all(self) -> int:
        """Print what was found; the exit status."""
        print("\ntargets")
        for line in self.targets:
            print(f"  {line}")
        for claim in self.broken:
            print(f"does not hold: {claim}")
        print(
            f"bench: {self.held} of {self.held + len(self.broken)} counts and equalities hold, "
            f"{self.met} of {len(self.targets)} targets met"
        )
        return 1 if self.broken else 0
