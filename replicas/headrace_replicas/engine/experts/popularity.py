"""Which experts of a model are asked for most: counts of uses that fade as newer ones come in.

Pure. Laws: an expert that is used never loses rank to one that is not; the order in which layers or
experts are listed decides nothing but ties, where the lower number goes first; no count is negative
or grows without bound (a layer's counts together stay below `experts * (half_life_uses / ln 2 + 1)`
as long as uses come in small portions).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# A layer's counts have halved when its experts were used this often on average. A count of a
# thousand is right to some 3 percent (1 / sqrt), which is enough to rank by; with 8 of 128 experts
# a token it is 16,000 tokens, so that a new kind of work shows within hours.
HALF_LIFE_USES: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """Decayed counts of uses.

    Attributes:
        layers: For each expert layer, by its path in the model: the count of each expert.
    """

    layers: Mapping[str, tuple[float, ...]]


def unknown(shapes: Mapping[str, int]) -> Popularity:
    """Nothing is known yet.

    Args:
        shapes: The number of experts of each layer.
    """
    return Popularity(layers={path: (0.0,) * experts for path, experts in shapes.items()})


def with_uses(
    known: Popularity,
    fresh: Mapping[str, Sequence[int]],
    *,
    half_life_uses: float = HALF_LIFE_USES,
) -> Popularity:
    """What is known once more uses have been counted.

    Args:
        known: Before; layers that `fresh` does not have stay as they are.
        fresh: Uses since then, by layer and expert.
        half_life_uses: Uses of a layer's experts, on average, that halve older counts.
    """
    layers = dict(known.layers)
    for path, uses in fresh.items():
        before = layers.get(path, (0.0,) * len(uses))
        kept = 0.5 ** (sum(uses) / (len(uses) * half_life_uses))
        layers[path] = tuple(old * kept + new for old, new in zip(before, uses, strict=True))
    return Popularity(layers=layers)


def hottest(uses: Sequence[float], count: int) -> tuple[int, ...]:
    """The experts of a layer with the highest counts, highest first; none that was never used.

    Args:
        uses: The layer's counts.
        count: How many at most.
    """
    order = sorted(range(len(uses)), key=lambda expert: -uses[expert])
    return tuple(expert for expert in order[:count] if uses[expert] > 0)


def ranked(popularity: Popularity) -> list[tuple[str, int]]:
    """(layer, expert) of all layers, the most wanted first.

    Layers are compared by each expert's share of its layer's uses: one that has streamed only for
    a while, because it was resident before, is not behind for that.
    """
    shares = [
        (-count / (sum(uses) or 1.0), path, expert)
        for path, uses in popularity.layers.items()
        for expert, count in enumerate(uses)
    ]
    # Stable, and by the share alone: ties stay in the order of layers and experts.
    return [(path, expert) for _share, path, expert in sorted(shares, key=lambda one: one[0])]


def misfit(popularity: Popularity, shapes: Mapping[str, int]) -> str | None:
    """Why counts cannot be those of a model, or None.

    Args:
        popularity: The counts; layers that do not stream now may be missing, or there.
        shapes: The number of experts of each layer.
    """
    for path, experts in shapes.items():
        counted = len(popularity.layers.get(path, (0.0,) * experts))
        if counted != experts:
            return f"it has {counted} experts in {path}, and the model has {experts}"
    return None
