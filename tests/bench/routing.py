"""What a routing trace says of a cache of experts: spread, locality, and the least that is read.

Pure. A trace holds the experts that each token chose in each layer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_replicas.engine.experts.least_reads import least_misses
from headrace_replicas.engine.experts.slots import SlotTable

Trace = NDArray[np.int64]
"""Chosen experts, shape (tokens, layers, top_k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How a trace spreads over the experts, mean of all layers.

    Attributes:
        entropy: Of the experts' usage, as a share of what equal usage would have.
        kept: Share of a token's experts that the token before used.
        recent: Share that one of the 8 tokens before used.
        by_chance: What `kept` would be if tokens chose independently of each other.
    """

    entropy: float
    kept: float
    recent: float
    by_chance: float


def locality(trace: Trace, experts: int) -> Locality:
    """Measure a trace.

    Args:
        trace: More than 8 tokens.
        experts: Experts of a layer.
    """
    layers = [trace[:, layer] for layer in range(trace.shape[1])]
    usages = [np.bincount(chosen.ravel(), minlength=experts) / chosen.size for chosen in layers]
    return Locality(
        entropy=float(np.mean([_entropy(usage) for usage in usages]) / np.log(experts)),
        kept=float(np.mean([_used_before(chosen, 1) for chosen in layers])),
        recent=float(np.mean([_used_before(chosen, 8) for chosen in layers])),
        by_chance=float(np.mean([(usage**2).sum() * trace.shape[2] for usage in usages])),
    )


def _entropy(usage: NDArray[np.float64]) -> float:
    used = usage[usage > 0]
    return float(-(used * np.log(used)).sum())


def _used_before(chosen: Trace, window: int) -> float:
    shares = [
        np.isin(chosen[now], chosen[now - window : now]).mean()
        for now in range(window, len(chosen))
    ]
    return float(np.mean(shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """What a measured part of a trace needs and misses, all layers together.

    Attributes:
        needed: Experts needed, each token's counted once.
        engine: Misses when who leaves is decided as the engine decides it.
        least: Misses when the one leaves that is needed again last (Belady 1966).
    """

    needed: int
    engine: int
    least: int

    @property
    def hit_ratio(self) -> float:
        """Share of needed experts that the engine has in its slots."""
        return 1 - self.engine / self.needed

    @property
    def best_hit_ratio(self) -> float:
        """Share that the best policy would have, which knows the future."""
        return 1 - self.least / self.needed


def misses(trace: Trace, *, slots: int, settling: int) -> Misses:
    """Replay a trace through slots that are full at the start, and count in its later part.

    Both policies start the counted part with what the engine's has in its slots there.

    Args:
        trace: What was chosen.
        slots: Experts of a layer that fit; at least a token's.
        settling: Tokens at the start that are not counted.
    """
    needed = engine = least = 0
    for layer in range(trace.shape[1]):
        calls = [sorted(set(chosen)) for chosen in trace[:, layer].tolist()]
        table = SlotTable(slots)
        table.refill(range(slots)[::-1])
        for call in calls[:settling]:
            table.place(call)
        counted = calls[settling:]
        held = [expert for expert in range(int(trace.max()) + slots + 1) if expert in table]
        needed += sum(map(len, counted))
        # A first call that needs what is held fills the slots, which does not count.
        least += least_misses([held, *counted], slots)
        engine += sum(len(table.place(call).loads) for call in counted)
    return Misses(needed=needed, engine=engine, least=least)
