"""Reads `engine.slots`: how many experts of a layer are wanted in memory.

Pure. Law: `percentage` names a share that is read back as the same number of slots.
"""

import re
from fractions import Fraction
from typing import Final

from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.engine.footprint import ModelSizes

AUTO: Final = "auto"
ALL: Final = "all"
SETTING: Final = "engine.slots"
_AMOUNT: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>%|MB|GB|MiB|GiB)")
_UNIT_BYTES: Final = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def slots_wanted(setting: str, sizes: ModelSizes) -> int | None:
    """Slots for each layer that a setting asks for, at most all experts.

    Args:
        setting: `auto`, `all`, a share (`25%`) or a budget for all layers together (`8GiB`).
        sizes: What the model takes.

    Returns:
        None for `auto`: whatever fits.

    Raises:
        SettingsError: It is none of these.
    """
    if setting == AUTO:
        return None
    if setting == ALL:
        return sizes.experts
    match = _AMOUNT.fullmatch(setting)
    if match is None:
        raise SettingsError(
            f"{SETTING} = {setting}: write auto, all, a share like 25%, or a budget like 8GiB",
            SETTING,
        )
    number, unit = Fraction(match["number"]), match["unit"]
    if unit == "%":
        return min(int(sizes.experts * number / 100), sizes.experts)
    return sizes.slots_within(int(number * _UNIT_BYTES[unit]))


def percentage(slots: int, experts: int) -> str:
    """The smallest share that means so many slots; exact up to a thousand experts."""
    tenths = -(-slots * 1000 // experts)
    return f"{tenths // 10}%" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}%"
