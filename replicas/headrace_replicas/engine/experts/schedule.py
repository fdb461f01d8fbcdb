"""Which decode schedule a host uses. All give the same bits.

`layers` goes layer by layer. `overlap` does too, and computes a layer's experts that are there
while it reads the others: that hides reads, and costs more and smaller kernels. `speculate` runs
whole tokens until no expert was missing.
"""

from typing import Any, Final, Literal, get_args

from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.speculation import SpeculativeModel

Schedule = Literal["layers", "overlap", "speculate"]

SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)

_PROMPT_TOKENS: Final = 16
# Tokens of each round; the first round only warms up (kernels, slots, page cache).
_ROUND_TOKENS: Final = 8
_ROUNDS: Final = 3


def with_schedule(model: Any, streamed: StreamedModel, schedule: Schedule) -> Any:
    """The model as it decodes by a schedule.

    Args:
        model: mlx-lm's model, with streaming experts.
        streamed: What streams them.
        schedule: Which one.
    """
    for stream in streamed.streams:
        stream.overlap = schedule == "overlap"
    return SpeculativeModel(model, streamed) if schedule == "speculate" else model


def measured(model: Any, streamed: StreamedModel, clock: Clock) -> Schedule:
    """The schedule with which this host decodes fastest: a few tokens with each, taking turns."""
    spent_s = dict.fromkeys(SCHEDULES, 0.0)
    for number in range(_ROUNDS):
        for schedule in SCHEDULES:
            round_s = _decode_s(with_schedule(model, streamed, schedule), number, clock)
            if number:
                spent_s[schedule] += round_s
    return min(SCHEDULES, key=spent_s.__getitem__)


def _decode_s(model: Any, number: int, clock: Clock) -> float:
    """Seconds that a few greedy tokens take after a short prompt of its own."""
    cache = make_prompt_cache(model)
    prompt = [1 + (7 * number + 13 * token) % 97 for token in range(_PROMPT_TOKENS)]
    token = mx.argmax(model(mx.array([prompt]), cache=cache)[:, -1, :], axis=-1)
    mx.eval(token)
    began_s = clock.monotonic_s()
    for _ in range(_ROUND_TOKENS):
        token = mx.argmax(model(token[:, None], cache=cache)[:, -1, :], axis=-1)
        mx.eval(token)
    return clock.monotonic_s() - began_s
