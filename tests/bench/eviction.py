"""Which expert should leave its slot: policies side by side on the demo model's own routing.

    python -m tests.bench.eviction [--tokens 300]

Records which experts each call of each layer needs while the demo model answers 26 prompts of its
skills, greedily, and replays that trace through LRU, CLOCK, LFU with decay and Belady's bound
(whoever is used again last leaves first, which needs the future), at 50, 25 and 12.5 % slots. A
prompt needs more experts than there are slots, and goes through them in groups as the engine's
layers do. Then it replays every other prompt with slots shared out between the layers by what the
other prompts would have gained from them. Fails only when a policy beats the bound.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Protocol

from headrace_replicas.engine.experts.slots import HALF_LIFE_CALLS, SlotTable
from tests.bench.demo_trace import Conversation, record

EXPERTS = 32
TOP_K = 4
SHARES = (0.5, 0.25, 0.125)

Calls = Sequence[Sequence[int]]
"""The experts that each call of one layer needed."""


class Placed(Protocol):
    """What a policy says of a call."""

    @property
    def hits(self) -> int:
        """Needed experts that were there."""


class Policy(Protocol):
    """The part of `SlotTable` that a replay needs."""

    def __contains__(self, expert: int) -> bool: ...

    def place(self, needed: Iterable[int], earlier: Collection[int] = ()) -> Placed:
        """Bring what a call needs, or a group of it and the one before."""


@dataclass(frozen=True, slots=True)
class Hits:
    """How many of the needed experts were there."""

    hits: int


class ClockTable:
    """CLOCK: a hand goes round the slots and takes the first that was not used since it last came.

    Args:
        slots: How many there are.
    """

    def __init__(self, slots: int) -> None:
        self._held: list[int | None] = [None] * slots
        self._is_used = [False] * slots
        self._slot_of: dict[int, int] = {}
        self._hand = 0

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    def place(self, needed: Iterable[int], earlier: Collection[int] = ()) -> Hits:  # noqa: ARG002
        """Bring what a call needs; the group before it was used since the hand came by."""
        wanted = set(needed)
        there = wanted & self._slot_of.keys()
        for expert in there:
            self._is_used[self._slot_of[expert]] = True
        for expert in wanted - there:
            slot = self._next(wanted)
            if (leaving := self._held[slot]) is not None:
                del self._slot_of[leaving]
            self._held[slot], self._slot_of[expert], self._is_used[slot] = expert, slot, True
        return Hits(len(there))

    def _next(self, wanted: set[int]) -> int:
        while True:
            slot, self._hand = self._hand, (self._hand + 1) % len(self._held)
            if self._held[slot] in wanted:
                continue
            if not self._is_used[slot]:
                return slot
            self._is_used[slot] = False


def replayed(calls: Calls, slots: int, table: Policy) -> int:
    """Hits of one layer.

    A call that needs more than the slots goes in groups as the engine's layers have it: what is
    there first, and then half of the slots at a time.
    """
    hits = 0
    for needed in calls:
        groups = [needed]
        if len(needed) > slots:
            missing = [expert for expert in needed if expert not in table]
            size = max(1, slots // 2)
            groups = [missing[begin : begin + size] for begin in range(0, len(missing), size)]
            if there := [expert for expert in needed if expert in table]:
                groups.insert(0, there)
        for earlier, group in pairwise(([], *groups)):
            hits += table.place(group, earlier).hits
    return hits


def bound(calls: Calls, slots: int) -> int:
    """Hits of one layer that no policy exceeds (Belady).

    After a call that needs more experts than there are slots, any of those that it saw may stay:
    more than a policy could have, so that this stays a bound.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for number, needed in reversed(list(enumerate(calls))):
        for expert in needed:
            uses[expert].append(number)
    there: set[int] = set()
    hits = 0
    for needed in calls:
        hits += len(there & set(needed))
        for expert in needed:
            uses[expert].pop()
        must = set(needed) if len(needed) <= slots else set()
        rest = sorted((there | set(needed)) - must, key=lambda e: uses[e][-1] if uses[e] else inf)
        there = must | set(rest[: slots - len(must)])
    return hits


Replay = Callable[[Calls, int], int]
"""Hits of one layer's calls with so many slots."""


def lrfu(half_life_calls: float) -> Replay:
    """A replay by the engine's own bookkeeping."""
    return lambda calls, slots: replayed(calls, slots, SlotTable(slots, half_life_calls))


POLICIES: dict[str, Replay] = {
    "LRU": lrfu(1.0),
    "CLOCK": lambda calls, slots: replayed(calls, slots, ClockTable(slots)),
    "LFU, never decaying": lrfu(inf),
    **{
        f"LFU, half-life {half_life} calls": lrfu(half_life)
        for half_life in (4, 8, int(HALF_LIFE_CALLS), 32, 64)
    },
    "Belady's bound": bound,
}


def layers_of(trace: Iterable[Conversation]) -> list[Calls]:
    """The calls of each layer, over all conversations."""
    calls = [call for one in trace for call in (one.prefill, *one.decode)]
    return list(zip(*calls, strict=True))


def ratio(layers: Sequence[Calls], slots: Sequence[int], replay: Replay) -> float:
    """Share of needed experts that were there, over all layers."""
    hits = sum(replay(calls, count) for calls, count in zip(layers, slots, strict=True))
    return hits / sum(len(needed) for calls in layers for needed in calls)


def shared_out(layers: Sequence[Calls], slots: int, replay: Replay) -> list[int]:
    """Slots of each layer, as many in all, each given where it brings the most hits."""
    gains = []
    for calls in layers:
        hits = [replay(calls, count) for count in range(TOP_K, EXPERTS + 1)]
        gains.append([more - fewer for fewer, more in pairwise(hits)])
    given = [TOP_K] * len(layers)
    for _ in range((slots - TOP_K) * len(layers)):
        open_layers = [number for number, count in enumerate(given) if count < EXPERTS]
        best = max(open_layers, key=lambda number: gains[number][given[number] - TOP_K])
        given[best] += 1
    return given


def main() -> int:
    """Record, replay, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer at most")
    trace = record(parser.parse_args().tokens)
    layers = layers_of(trace)
    print(f"{len(trace)} prompts, {len(layers[0])} calls of each of {len(layers)} layers")
    print(f"{'hit ratio with slots for':26}" + "".join(f"{share:>8.1%}" for share in SHARES))
    above_bound = 0
    counts = [int(EXPERTS * share) for share in SHARES]
    limits = [ratio(layers, [count] * len(layers), bound) for count in counts]
    for name, replay in POLICIES.items():
        ratios = [ratio(layers, [count] * len(layers), replay) for count in counts]
        above_bound += sum(got > limit for got, limit in zip(ratios, limits, strict=True))
        print(f"{name:26}" + "".join(f"{got:>8.3f}" for got in ratios))
    _print_allotment(layers_of(trace[0::2]), layers_of(trace[1::2]), counts)
    print(f"eviction: {above_bound} policies above the bound")
    return 1 if above_bound else 0


def _print_allotment(seen: Sequence[Calls], new: Sequence[Calls], counts: Sequence[int]) -> None:
    print("every other prompt, LFU as the engine has it:")
    replay = lrfu(HALF_LIFE_CALLS)
    even = partial(ratio, new, replay=replay)
    for count in counts:
        given = shared_out(seen, count, replay)
        print(
            f"  {count} slots for each layer {even([count] * len(new)):.3f}, shared out by the "
            f"other prompts {even(given):.3f} ({', '.join(map(str, given))})"
        )


if __name__ == "__main__":
    sys.exit(main())
