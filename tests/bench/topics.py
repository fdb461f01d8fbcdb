"""Token streams with the locality of text: runs of one topic, common words in between.

A trained gate picks experts by what a text is about, so that neighbouring tokens share experts and
a cache of experts hits. Random weights have no topics; a generated model is given some, in its
embedding, and its prompts are drawn from here. Pure: same arguments, same tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """How the vocabulary falls into topics, and how a text moves between them.

    Token 0 ends a text and is never drawn. The next `common` tokens belong to all topics; the
    others belong to one topic each, in turns.

    Attributes:
        count: Number of topics.
        common: Tokens that every topic uses.
        common_ratio: Share of a text that is common tokens.
        run_tokens: Mean length of a run of one topic.
        exponent: Of Zipf's law, by which some tokens of a topic are more frequent than others.
        strength: Length of a topic's direction in an embedding, in lengths of a token's own part.
    """

    count: int
    common: int
    common_ratio: float
    run_tokens: float
    exponent: float
    strength: float

    def topic_of(self, vocabulary: int) -> NDArray[np.int64]:
        """The topic of each token, -1 for those that belong to all."""
        numbers = np.arange(vocabulary) - 1 - self.common
        return np.where(numbers < 0, -1, numbers % self.count)

    def text(self, vocabulary: int, length: int, *, seed: int) -> list[int]:
        """Draw a text.

        Args:
            vocabulary: Number of tokens.
            length: Tokens wanted.
            seed: Another seed gives another text.
        """
        draw = np.random.default_rng(seed)
        own = (vocabulary - 1 - self.common) // self.count
        ranks_common = draw.choice(self.common, length, p=_zipf(self.common, self.exponent))
        ranks_own = draw.choice(own, length, p=_zipf(own, self.exponent))
        changes = draw.random(length) < 1 / self.run_tokens
        topic = draw.integers(self.count, size=length)[
            np.maximum.accumulate(np.where(changes, np.arange(length), 0))
        ]
        is_common = draw.random(length) < self.common_ratio
        tokens = np.where(
            is_common, 1 + ranks_common, 1 + self.common + topic + self.count * ranks_own
        )
        drawn: list[int] = tokens.tolist()
        return drawn


def _zipf(count: int, exponent: float) -> NDArray[np.float64]:
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())
