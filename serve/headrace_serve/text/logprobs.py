r"""Log probabilities in the two shapes of the OpenAI API: chat, and legacy completions.

A token that is not valid UTF-8 by itself (a part of an emoji) is written with its bytes escaped,
as `\xf0\x9f`, which keeps different tokens different; its exact bytes stand beside it in chat,
and the legacy shape says `bytes:` before it.

JSON knows no infinity: whatever is not finite is -9999.0, as the OpenAI API reports a token that
is as good as impossible.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

from headrace_replicas.contract.requests import TokenLogprob
from headrace_serve.text.detokenizer import Detokenizer
from headrace_serve.text.tokenizer import TextTokenizer

IMPOSSIBLE = -9999.0


class TopLogprob(TypedDict):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """One token of a chat answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """`choices[].logprobs` of a chat answer or of one of its chunks."""

    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """`choices[].logprobs` of a legacy completion or of one of its chunks."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextOffsets:
    """Where each token's text begins in an answer, in characters, over all of its chunks.

    A token that only continues a character begins where that character will.

    Args:
        detokenizer: A fresh one of its own, made like the one that gives the answer's text.
        start: Offset of the answer's first character.
    """

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = start

    def add(self, ids: Sequence[int]) -> list[int]:
        """Offsets of these ids, which follow those of earlier calls."""
        offsets = []
        for token_id in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.add((token_id,)))
        return offsets


def chat_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The chat shape; `top_logprobs` is empty where no alternatives were asked for."""
    content: list[ChatTokenLogprob] = [
        {
            **_alternative(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_alternative(tokenizer, *pair) for pair in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[TokenLogprob], offsets: TextOffsets
) -> CompletionLogprobs:
    """The legacy shape.

    `top_logprobs` always holds the chosen token too, so it may have one more entry than was asked
    for. Of alternatives that read the same, the likeliest counts.
    """
    top: list[dict[str, float]] = []
    for entry in entries:
        by_text: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            by_text.setdefault(_legacy_text(tokenizer, token_id), finite(logprob))
        top.append(by_text)
    return {
        "tokens": [_legacy_text(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets.add([entry.token_id for entry in entries]),
    }


def finite(logprob: float) -> float:
    """The log probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _alternative(tokenizer: TextTokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    text = raw.decode("utf-8", "backslashreplace")
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def _legacy_text(tokenizer: TextTokenizer, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + raw.decode("utf-8", "backslashreplace")
