"""Whether drafts pay, judged by what tokens have cost with them and without.

Pure. Drafts are tried, the time of a token is compared with that of tokens without drafts, and
where they do not pay they rest, longer each time. While they pay, a few tokens without drafts now
and then keep the comparison fresh.

Laws: decoding without drafts is measured before the first draft. A trial that did not pay is
followed by a rest, and no rest is shorter than the one before unless drafts paid in between. All
time spent on prefilling the draft model is counted against drafts sooner or later.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

Phase = Literal["measuring", "drafting", "resting"]

# Tokens without drafts that a trial is compared with.
_SAMPLE_TOKENS: Final = 8
# Tokens between two verdicts while drafting.
_TRIAL_TOKENS: Final = 32
# Good trials in a row after which decoding without drafts is measured again: one token in 33 then
# goes without.
_TRIALS_IN_A_ROW: Final = 8
_FIRST_REST_TOKENS: Final = 64
_LONGEST_REST_TOKENS: Final = 1024
# The draft model's prefill is written off over so many drafted tokens: a usual answer has more.
_WRITE_OFF_TOKENS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What tokens took; those of earlier phases count half, a quarter and so on.

    Attributes:
        tokens: How many there were.
        spent_s: Seconds that they took together.
    """

    tokens: float = 0.0
    spent_s: float = 0.0

    @property
    def per_token_s(self) -> float:
        """Seconds that one took; 0 when there was none."""
        return self.spent_s / self.tokens if self.tokens else 0.0

    def plus(self, spent_s: float) -> "Cost":
        """With one more token."""
        return Cost(tokens=self.tokens + 1, spent_s=self.spent_s + spent_s)

    def faded(self) -> "Cost":
        """As a new phase finds it."""
        return Cost(tokens=self.tokens / 2, spent_s=self.spent_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How decoding goes with drafts and without.

    Attributes:
        phase: Whether tokens without drafts are measured, drafts are tried, or they rest.
        left_tokens: Tokens until the phase ends.
        with_drafts: Cost of tokens while drafting, prefill of the draft model included.
        without: Cost of tokens while not drafting.
        paid: The verdict on the newest trial; None before there was one.
        trials: Trials in a row that paid.
        rest_tokens: How long drafts rest after the next trial that does not pay.
        owed_s: Seconds of prefill of the draft model that are not counted yet.
        share_s: What each drafted token is charged of them.
    """

    phase: Phase = "measuring"
    left_tokens: int = _SAMPLE_TOKENS
    with_drafts: Cost = Cost()
    without: Cost = Cost()
    paid: bool | None = None
    trials: int = 0
    rest_tokens: int = _FIRST_REST_TOKENS
    owed_s: float = 0.0
    share_s: float = 0.0

    @property
    def drafting(self) -> bool:
        """Whether the next token is to be drafted for."""
        return self.phase == "drafting"


def observed(pace: Pace, spent_s: float) -> Pace:
    """The pace after one more token that took so many seconds."""
    if pace.drafting:
        paid_s = min(pace.owed_s, pace.share_s)
        pace = replace(
            pace,
            with_drafts=pace.with_drafts.plus(spent_s + paid_s),
            owed_s=pace.owed_s - paid_s,
        )
    else:
        pace = replace(pace, without=pace.without.plus(spent_s))
    pace = replace(pace, left_tokens=pace.left_tokens - 1)
    return pace if pace.left_tokens else _next_phase(pace)


def prefilled(pace: Pace, spent_s: float) -> Pace:
    """The pace after the draft model was fed tokens to catch up with a sequence."""
    owed_s = pace.owed_s + spent_s
    return replace(pace, owed_s=owed_s, share_s=owed_s / _WRITE_OFF_TOKENS)


def _next_phase(pace: Pace) -> Pace:
    if not pace.drafting:
        return _in_phase(pace, "drafting", _TRIAL_TOKENS)
    paid = pace.with_drafts.per_token_s < pace.without.per_token_s
    judged = replace(pace, paid=paid, trials=pace.trials + 1 if paid else 0)
    if not paid:
        longer = min(2 * pace.rest_tokens, _LONGEST_REST_TOKENS)
        return replace(_in_phase(judged, "resting", pace.rest_tokens), rest_tokens=longer)
    judged = replace(judged, rest_tokens=_FIRST_REST_TOKENS)
    if judged.trials < _TRIALS_IN_A_ROW:
        return _in_phase(judged, "drafting", _TRIAL_TOKENS)
    return _in_phase(replace(judged, trials=0), "measuring", _SAMPLE_TOKENS)


def _in_phase(pace: Pace, phase: Phase, tokens: int) -> Pace:
    """At the beginning of a phase; what it measures anew fades."""
    pace = replace(pace, phase=phase, left_tokens=tokens)
    if pace.drafting:
        return replace(pace, with_drafts=pace.with_drafts.faded())
    return replace(pace, without=pace.without.faded())


def most_drafts(wanted: int, *, top_k: int, slots: int) -> int:
    """Drafts of one verify pass at most, while experts stream; 0 means that there can be none.

    A pass needs the experts of all its tokens at once. Where they might not fit into a layer's
    slots together, they would come in groups, each of which waits for the one before.

    Args:
        wanted: `engine.draft_tokens`.
        top_k: Experts of a layer that one token uses.
        slots: Slots of the layer that has fewest.
    """
    return max(0, min(wanted, slots // top_k - 1))
