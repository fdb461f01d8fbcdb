"""Streamed experts give the resident model's bits; `make stream-equality` tries everything."""

import pytest

from tests.streaming.architectures import ARCHITECTURES, by_module, seam_modules
from tests.streaming.comparison import compare, settings
from tests.streaming.equality import main
from tests.streaming.trials import (
    QUICK_MODES,
    QUICK_MODULES,
    REFUSED_LAYOUTS,
    STREAMING_LAYOUTS,
    try_architecture,
    try_layout,
    try_refusal,
    try_scales,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("module", QUICK_MODULES)
def test_a_streamed_model_says_what_the_resident_one_says_bit_for_bit(
    module: str, mode: str
) -> None:
    [verdict] = try_architecture(module, [mode])
    assert verdict.complaints == []
    assert all(outcome.missed > 0 for outcome in verdict.outcomes[1:])
