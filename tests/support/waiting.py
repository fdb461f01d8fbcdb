"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def comes_true(
    holds: Callable[[], object], *, patience_s: float = 60, every_s: float = 0.01
) -> bool:
    """Whether something holds soon.

    Args:
        holds: Looks whether it does.
        patience_s: Who waits longer has found a hang.
        every_s: Time between two looks.
    """
    give_up_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(every_s)
    return True


def must_come_true(
    holds: Callable[[], object], complaint: str, *, patience_s: float, every_s: float
) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: It does not; says the complaint.
    """
    if not comes_true(holds, patience_s=patience_s, every_s=every_s):
        raise AssertionError(complaint)
