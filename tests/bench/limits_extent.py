"""How much `make bench` measures: which slots, how many tokens, which prompts."""

from dataclasses import dataclass
from typing import Final

from tests.bench.limits_models import Model

SHARES: Final = (0.5, 0.25, 0.125)
TARGET_SHARE: Final = 0.25


def slots_for(model: Model, share: float) -> int:
    """A share of the experts, but at least a token's."""
    return max(model.top_k, int(model.experts * share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured.

    Attributes:
        settling: Tokens before the first round: slots come to hold what the text needs.
        warm: Rounds with all files in the page cache, and tokens of each.
        cold: Rounds with the page cache dropped before each token, and tokens of each.
        loader: Rounds of our loader against mlx-lm's, and tokens of each.
        prompts: Lengths of prompts.
    """

    settling: int
    warm: tuple[int, int]
    cold: tuple[int, int]
    loader: tuple[int, int]
    prompts: tuple[int, ...]

    @property
    def windows(self) -> list[tuple[int, int, bool]]:
        """(first token, end, cold) of each round."""
        found: list[tuple[int, int, bool]] = []
        begin = self.settling
        for (rounds, tokens), cold in ((self.warm, False), (self.cold, True)):
            for _ in range(rounds):
                found.append((begin, begin + tokens, cold))
                begin += tokens
        return found

    @property
    def tokens(self) -> int:
        """Of the text that is decoded."""
        return self.windows[-1][1]

    def longest_tokens(self, context_tokens: int) -> int:
        """Of the texts that a context takes."""
        return max(self.tokens, *self.prompts_within(context_tokens))

    def prompts_within(self, context_tokens: int) -> list[int]:
        """The prompts that a context takes, with their first token."""
        return [length for length in self.prompts if length < context_tokens]


# Many short rounds: their median is little disturbed by what else the machine does.
FULL: Final = Extent(
    settling=128, warm=(24, 4), cold=(8, 4), loader=(48, 3), prompts=(128, 1024, 4096)
)
SHORT: Final = Extent(settling=32, warm=(6, 4), cold=(4, 2), loader=(12, 2), prompts=(64, 600))
