"""Whether what a device gave for a token can come from a device that works.

A device that fails without an error gives NaN, zeros, or old memory. The first two are seen in the
log probabilities of one token. A token that comes again and again is what zeros look like from
outside, but models repeat themselves too: then the log probabilities decide, and where those are
sound a canary should.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_replicas.contract.errors import EngineFaultError

REPEATS: Final = 8
"""The same token so often in a row is looked at closely."""

# Rounding of float32 over a vocabulary of 200,000 stays far below this.
_SUM_TOLERANCE: Final = 0.1


def check_token(token_id: int, row: NDArray[np.float32]) -> None:
    """Look at one token's log probabilities; a microsecond.

    Args:
        token_id: The drawn token.
        row: Shape (vocabulary,).

    Raises:
        EngineFaultError: They are not numbers, or all the same.
    """
    drawn = row[token_id]
    if np.isnan(drawn) or drawn == np.inf:
        raise EngineFaultError(f"non-finite logits: log probability {drawn} of token {token_id}")
    few = (row[0], row[row.size // 2], row[-1])
    if row.size > 1 and all(one == drawn for one in few) and row.min() == row.max():
        raise EngineFaultError(
            f"degenerate output: every token has the same log probability ({drawn})"
        )


def check_repeated(token_id: int, row: NDArray[np.float32]) -> None:
    """Look closely at a token that came `REPEATS` times in a row.

    Args:
        token_id: The token.
        row: Its log probabilities, shape (vocabulary,).

    Raises:
        EngineFaultError: They are no distribution.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.exp(row.astype(np.float64)).sum())
    if not abs(total - 1) < _SUM_TOLERANCE:
        raise EngineFaultError(
            f"degenerate output: token {token_id} came {REPEATS} times in a row, and the "
            f"probabilities sum up to {total:.3g}"
        )
