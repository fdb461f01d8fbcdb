"""From the token ids of one choice to its text: detokeniser, then stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_replicas.contract.requests import TokenLogprob
from headrace_serve.text.detokenizer import Detokenizer
from headrace_serve.text.stops import StopMatcher
from headrace_serve.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What some tokens added to a choice.

    Attributes:
        text: New text; "" while a character or a possible stop string is incomplete.
        logprobs: Of the tokens that were taken, as far as they were asked for.
        stopped: Whether a stop string was completed; nothing may follow.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...]
    stopped: bool


class ChoiceText:
    """The text of one choice; it sees an ordered sequence of ids and never a move of the stream.

    Args:
        tokenizer: The served model's.
        stops: Stop strings.
        mid_text: Whether the text goes on from a raw prompt, so that a leading space is kept.

    Attributes:
        completion_tokens: Tokens taken so far, the one that completed a stop string included.
    """

    def __init__(
        self, tokenizer: TextTokenizer, stops: tuple[str, ...], *, mid_text: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, mid_text=mid_text)
        self._matcher = StopMatcher(stops)
        self.completion_tokens = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> TextDelta:
        """Take tokens up to the one that completes a stop string; those after it are dropped."""
        pieces: list[str] = []
        taken = 0
        stopped = False
        for token_id in ids:
            result = self._matcher.add(self._detokenizer.add((token_id,)))
            pieces.append(result.text)
            taken += 1
            if result.matched is not None:
                stopped = True
                break
        self.completion_tokens += taken
        return TextDelta(text="".join(pieces), logprobs=tuple(logprobs[:taken]), stopped=stopped)

    def finish(self) -> TextDelta:
        """What was held back when the model ended by itself."""
        result = self._matcher.add(self._detokenizer.flush())
        held = "" if result.matched is not None else self._matcher.flush()
        return TextDelta(text=result.text + held, logprobs=(), stopped=result.matched is not None)
