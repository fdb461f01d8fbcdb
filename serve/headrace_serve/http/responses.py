"""The bodies of successful answers, whole and in chunks, as OpenAI's clients read them.

Laws of a stream: all chunks share id, created, model and object; the first delta and no other has
the role; one chunk has a finish reason, and after it only the usage chunk may come; without
`include_usage` no chunk has a `usage` key, with it the usage chunk has no choices and every other
chunk says `usage: null`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace_replicas.contract.requests import FinishReason, Usage

Body = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What an answer and all of its chunks share.

    Attributes:
        request_id: The client request's id; the answer's id is made from it.
        created_s: Wall-clock second of admission.
        model: The id under which the model is served.
    """

    request_id: str
    created_s: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of the model list.

    Attributes:
        id: What clients put in `model`.
        created_s: Wall-clock second since which it is served.
        context_tokens: Prompt and answer together, at most.
    """

    id: str
    created_s: int
    context_tokens: int


def usage_object(usage: Usage) -> Body:
    """Token counts of one answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_completion(
    head: AnswerHead,
    *,
    content: str,
    finish_reason: FinishReason,
    usage: Usage,
    logprobs: Mapping[str, object] | None = None,
) -> Body:
    """A whole chat answer.

    Args:
        head: Whose answer it is.
        content: The text; "" when the model said nothing.
        finish_reason: Why it ended.
        usage: Its token counts.
        logprobs: The object for `choices[0].logprobs`; None when not asked for.
    """
    message = {"role": "assistant", "content": content, "refusal": None}
    choice = _choice("message", message, logprobs, finish_reason)
    return {**_chat_head(head, "chat.completion", [choice]), "usage": usage_object(usage)}


def text_completion(
    head: AnswerHead,
    *,
    text: str,
    finish_reason: FinishReason,
    usage: Usage,
    logprobs: Mapping[str, object] | None = None,
) -> Body:
    """A whole legacy completion; the arguments are those of `chat_completion`."""
    choice = _choice("text", text, logprobs, finish_reason)
    return {**_text_head(head, [choice]), "usage": usage_object(usage)}


def model_object(model: ServedModel) -> Body:
    """One model, for /v1/models/{id} and the list.

    The context length stands under two names: clients of OpenRouter read `context_length`, those
    of vLLM `max_model_len`; OpenAI's own object has none.
    """
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "headrace",
        "context_length": model.context_tokens,
        "max_model_len": model.context_tokens,
    }


def model_list(models: Iterable[ServedModel]) -> Body:
    """The answer of /v1/models."""
    return {"object": "list", "data": [model_object(model) for model in models]}


class _AnswerStream(ABC):
    """The chunks of one streamed answer, in the only order that is allowed.

    Args:
        head: Whose answer it is.
        include_usage: Whether the request asked for the usage chunk.
    """

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._started = False
        self._ended = False

    def delta(self, text: str, logprobs: Mapping[str, object] | None = None) -> Body:
        """The chunk with the next piece of text.

        Raises:
            RuntimeError: The stream has ended.
        """
        return self._next(text, logprobs, None)

    def end(
        self,
        finish_reason: FinishReason,
        usage: Usage,
        *,
        headrace: Mapping[str, object] | None = None,
    ) -> tuple[Body, ...]:
        """The last chunks: the one with the finish reason, then the usage if it was asked for.

        Args:
            finish_reason: Why the answer ended.
            usage: Its token counts, sent only when asked for.
            headrace: Put as `headrace` into the last chunk; None when not asked for.

        Raises:
            RuntimeError: The stream has ended before.
        """
        chunks = [self._next("", None, finish_reason)]
        self._ended = True
        if self._include_usage:
            chunks.append({**self._chunk([]), "usage": usage_object(usage)})
        if headrace is not None:
            chunks[-1]["headrace"] = dict(headrace)
        return tuple(chunks)

    def _next(
        self,
        text: str,
        logprobs: Mapping[str, object] | None,
        finish_reason: FinishReason | None,
    ) -> Body:
        if self._ended:
            message = f"The stream of {self._head.request_id} has ended; no chunk may follow."
            raise RuntimeError(message)
        chunk = self._chunk([self._choice(text, logprobs, finish_reason)])
        self._started = True
        return {**chunk, "usage": None} if self._include_usage else chunk

    @abstractmethod
    def _chunk(self, choices: list[Body]) -> Body:
        """A chunk with these choices."""

    @abstractmethod
    def _choice(
        self,
        text: str,
        logprobs: Mapping[str, object] | None,
        finish_reason: FinishReason | None,
    ) -> Body:
        """The one choice of a chunk."""


class ChatStream(_AnswerStream):
    """The `chat.completion.chunk` objects of one answer."""

    def _chunk(self, choices: list[Body]) -> Body:
        return _chat_head(self._head, "chat.completion.chunk", choices)

    def _choice(
        self,
        text: str,
        logprobs: Mapping[str, object] | None,
        finish_reason: FinishReason | None,
    ) -> Body:
        delta: Body = {} if self._started else {"role": "assistant", "content": text}
        if self._started and finish_reason is None:
            delta["content"] = text
        return _choice("delta", delta, logprobs, finish_reason)


class TextStream(_AnswerStream):
    """The `text_completion` objects of one streamed legacy completion."""

    def _chunk(self, choices: list[Body]) -> Body:
        return _text_head(self._head, choices)

    def _choice(
        self,
        text: str,
        logprobs: Mapping[str, object] | None,
        finish_reason: FinishReason | None,
    ) -> Body:
        return _choice("text", text, logprobs, finish_reason)


def _choice(
    kind: str,
    held: object,
    logprobs: Mapping[str, object] | None,
    finish_reason: FinishReason | None,
) -> Body:
    return {"index": 0, kind: held, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_head(head: AnswerHead, kind: str, choices: list[Body]) -> Body:
    return _headed(f"chatcmpl-{head.request_id}", kind, head, choices)


def _text_head(head: AnswerHead, choices: list[Body]) -> Body:
    return _headed(f"cmpl-{head.request_id}", "text_completion", head, choices)


def _headed(answer_id: str, kind: str, head: AnswerHead, choices: list[Body]) -> Body:
    return {
        "id": answer_id,
        "object": kind,
        "created": head.created_s,
        "model": head.model,
        "choices": choices,
    }
