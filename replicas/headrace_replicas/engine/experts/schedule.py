"""Which decode schedule a host uses. All give the same bits.

`layers` goes layer by layer. `overlap` does too, and computes a layer's experts that are there
while it reads the others: that hides reads, and costs more and smaller kernels. `speculate` runs
whole tokens until no expert was missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from mlx_lm.models.cache import make_prompt_cache

from headrace_replicas.contract.clock import Clock
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.experts.install import StreamedModel
from headrace_replicas.engine.experts.speculation import SpeculativeModel

Schedule = Literal["layers", "overlap", "speculate"]

SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)

_PROMPT_TOKENS: Final = 16
# Steps of each round; the first round only warms up (kernels, slots, page cache).
_ROUND_STEPS: Final = 8
_ROUNDS: Final = 3


def with_schedule(
    model: Any, streamed: StreamedModel, schedule: Schedule, step_tokens: int = 1
) -> Any:
    """The model as it decodes by a schedule.

    Args:
        model: mlx-lm's model, with streaming experts.
        streamed: What streams them.
        schedule: Which one.
        step_tokens: Tokens of a sequence that a step may have and still go by it.
    """
    for stream in streamed.streams:
        stream.overlap = schedule == "overlap"
    return SpeculativeModel(model, streamed, step_tokens) if schedule == "speculate" else model


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How an engine decodes.

    Attributes:
        schedule: Of steps of one token.
        step_tokens: Tokens of a sequence that a step may have and still go by it.
    """

    schedule: Schedule
    step_tokens: int


def decide_decoding(
    model: Any,
    streamed: StreamedModel,
    setting: Literal["auto"] | Schedule,
    *,
    most_tokens: int,
    clock: Clock,
) -> Decoding:
    """How this host decodes fastest, if the setting leaves it open.

    Several tokens choose more experts than one, so that more passes find one missing: speculation
    that pays for single tokens need not pay for drafts to verify. (On the demo model with half of
    its experts in memory one token takes 2.8 passes, and three together the 3 after which
    speculation gives up.)

    Args:
        model: mlx-lm's model, with streaming experts.
        streamed: What streams them.
        setting: `engine.schedule`; `auto` measures.
        most_tokens: Of the largest step: the newest one and its drafts.
        clock: Time source.
    """
    if setting != "auto":
        return Decoding(schedule=setting, step_tokens=most_tokens)
    schedule = measured(model, streamed, clock)
    if schedule != "speculate" or most_tokens == 1:
        return Decoding(schedule=schedule, step_tokens=1)
    together = measured(model, streamed, clock, ("layers", "speculate"), most_tokens)
    return Decoding(schedule=schedule, step_tokens=most_tokens if together == "speculate" else 1)


def measured(
    model: Any,
    streamed: StreamedModel,
    clock: Clock,
    schedules: Sequence[Schedule] = SCHEDULES,
    step_tokens: int = 1,
) -> Schedule:
    """The schedule with which this host decodes fastest: a few steps with each, taking turns."""
    spent_s = dict.fromkeys(schedules, 0.0)
    for number in range(_ROUNDS):
        for schedule in schedules:
            tried = with_schedule(model, streamed, schedule, step_tokens)
            round_s = _decode_s(tried, number, clock, step_tokens)
            if number:
                spent_s[schedule] += round_s
    return min(schedules, key=spent_s.__getitem__)


def _decode_s(model: Any, number: int, clock: Clock, step_tokens: int) -> float:
    """Seconds that a few steps with the likeliest tokens take after a short prompt of its own."""
    cache = make_prompt_cache(model)
    prompt = [1 + (7 * number + 13 * token) % 97 for token in range(_PROMPT_TOKENS)]
    tokens = _likeliest(model(mx.array([prompt]), cache=cache), step_tokens)
    began_s = clock.monotonic_s()
    for _ in range(_ROUND_STEPS):
        tokens = _likeliest(model(tokens, cache=cache), step_tokens)
    return clock.monotonic_s() - began_s


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """The tokens that are likeliest to come next, computed; shape (1, count)."""
    tokens = mx.argsort(-logits[:, -1, :], axis=-1)[:, :count]
    mx.eval(tokens)
    return tokens
