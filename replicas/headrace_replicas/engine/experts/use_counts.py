"""How often each expert was needed since the engine started.

Counted where a gate's choice is read anyway: a list of integers and one addition for each expert
costs 0.2 to 0.7 us for a layer of one token (4 to 8 experts), where a NumPy addition by index costs
4 to 5 and finding the distinct experts of the choice costs 6 to 9.
"""

from collections.abc import Iterable, Sequence


class UseCounts:
    """Calls that needed each expert; the engine thread writes, anybody reads copies.

    A call needs an expert once, whatever the number of its tokens that chose it: what counts is how
    often the expert had to be there.

    Args:
        experts: Experts of each layer, in the model's order.

    Attributes:
        is_counting: Whether uses count now. A probe asks for the same experts again and again, and
            says nothing about what requests will ask for.
    """

    def __init__(self, experts: Sequence[int]) -> None:
        self.is_counting = True
        self._rows = [[0] * count for count in experts]

    def note(self, layer: int, experts: Iterable[int]) -> None:
        """Count one call of a layer.

        Args:
            layer: Its index.
            experts: Distinct experts that the call needed.
        """
        if self.is_counting:
            row = self._rows[layer]
            for expert in experts:
                row[expert] += 1

    def read(self) -> tuple[tuple[int, ...], ...]:
        """The counts of each layer, by expert; each layer's are of one moment."""
        return tuple(tuple(row) for row in self._rows)
