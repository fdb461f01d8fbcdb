"""From the parts of an answer to the bytes of a response, streamed or whole."""

import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace_replicas.contract.errors import HeadraceError, NoReplicaError
from headrace_replicas.contract.requests import TokenLogprob
from headrace_serve.http.error_bodies import body_of, headers_of, status_of, unexpected
from headrace_serve.http.json_bytes import json_bytes
from headrace_serve.http.keep_alive import with_keep_alive
from headrace_serve.http.responses import (
    AnswerHead,
    ChatStream,
    TextStream,
    chat_completion,
    text_completion,
)
from headrace_serve.http.service import Admitted, AnswerEnd, GatewayService
from headrace_serve.http.sse import DONE, HEADERS, KEEPALIVE, error_event, event
from headrace_serve.text.detokenizer import Detokenizer
from headrace_serve.text.logprobs import TextOffsets, chat_logprobs, completion_logprobs

log = logging.getLogger("ray.serve.headrace.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What /v1/chat/completions and /v1/completions do differently.

    Attributes:
        stream: Makes the chunks of a streamed answer.
        whole: Makes the body of a whole answer from head, text, finish reason, usage, logprobs.
        text_name: The name of the text argument of `whole`.
    """

    stream: type[ChatStream] | type[TextStream]
    whole: Callable[..., dict[str, object]]
    text_name: str


CHAT = Endpoint(stream=ChatStream, whole=chat_completion, text_name="content")
COMPLETION = Endpoint(stream=TextStream, whole=text_completion, text_name="text")


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer whose bytes are always valid UTF-8."""
    return Response(
        json_bytes(body),
        status_code=status,
        media_type="application/json",
        headers=dict(headers or {}),
    )


def error_response(error: HeadraceError, retry_after_s: float | None = None) -> Response:
    """An error in OpenAI's shape.

    Args:
        error: What went wrong.
        retry_after_s: When a replica may be there again, for who met none.
    """
    wait_s = retry_after_s if isinstance(error, NoReplicaError) else None
    return json_response(body_of(error), status_of(error), headers_of(error, wait_s))


def logged(error: Exception, where: str) -> HeadraceError:
    """Keep the details of an unforeseen failure in the log, and tell the client where."""
    log_id = secrets.token_hex(8)
    log.error("%s: unforeseen failure in %s", log_id, where, exc_info=error)
    return unexpected(log_id)


class EventStream(StreamingResponse):
    """A streamed answer whose source is closed when its request ends, however it ends.

    Starlette leaves the source of a stream whose client went away to the garbage collector, and
    until that comes by a replica would work for nobody.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=dict(HEADERS))
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as an ASGI application."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


class AnswerWriter:
    """Writes one admitted request's answer.

    Args:
        service: Produces the answer's parts.
        endpoint: Chat or legacy completion.
        admitted: The request.
        model: The id that the client asked for.
    """

    def __init__(
        self, service: GatewayService, endpoint: Endpoint, admitted: Admitted, model: str
    ) -> None:
        self._service = service
        self._endpoint = endpoint
        self._admitted = admitted
        self._head = AnswerHead(
            request_id=admitted.request.request_id, created_s=admitted.created_s, model=model
        )
        self._offsets = TextOffsets(Detokenizer(service.tokenizer, mid_text=admitted.mid_text))

    async def whole(self) -> Response:
        """The answer in one piece, with its attempts and resume mode as headers.

        Raises:
            HeadraceError: The request cannot be completed.
        """
        pieces: list[str] = []
        entries: list[TokenLogprob] = []
        async with aclosing(self._service.answer(self._admitted)) as parts:
            async for part in parts:
                if isinstance(part, AnswerEnd):
                    body = self._endpoint.whole(
                        self._head,
                        finish_reason=part.finish_reason,
                        usage=part.usage,
                        logprobs=self._logprobs(entries),
                        **{self._endpoint.text_name: "".join(pieces)},
                    )
                    return json_response(
                        body,
                        headers={
                            f"x-headrace-{name}": str(value) for name, value in _moves(part).items()
                        },
                    )
                pieces.append(part.text)
                entries.extend(part.logprobs)
        raise _without_ending()

    def streamed(
        self, *, include_usage: bool, include_headrace: bool, keep_alive_s: float
    ) -> EventStream:
        """The answer as server-sent events; headers go out before the first token."""
        events = self._events(include_usage, include_headrace)
        return EventStream(with_keep_alive(events, keep_alive_s, KEEPALIVE))

    async def _events(
        self, include_usage: bool, include_headrace: bool
    ) -> AsyncGenerator[bytes, None]:
        stream = self._endpoint.stream(self._head, include_usage=include_usage)
        try:
            async with aclosing(self._service.answer(self._admitted)) as parts:
                async for part in parts:
                    if isinstance(part, AnswerEnd):
                        moves = _moves(part) if include_headrace else None
                        for chunk in stream.end(part.finish_reason, part.usage, headrace=moves):
                            yield event(chunk)
                        yield DONE
                        return
                    yield event(stream.delta(part.text, self._logprobs(part.logprobs)))
            yield error_event(_without_ending())
        except HeadraceError as error:
            yield error_event(error)
        except Exception as error:  # noqa: BLE001  the 200 is out: the stream must say that it failed
            yield error_event(logged(error, self._head.request_id))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Mapping[str, object] | None:
        if self._admitted.request.sampling.logprobs is None:
            return None
        if self._endpoint is CHAT:
            return chat_logprobs(self._service.tokenizer, entries)
        return completion_logprobs(self._service.tokenizer, entries, self._offsets)


def _without_ending() -> HeadraceError:
    return HeadraceError("The answer stopped without its ending: a fault of the gateway.")


def _moves(end: AnswerEnd) -> dict[str, object]:
    return {"attempts": end.attempts, "resume": end.resume or "none"}


def timeout_of(value: str | None) -> float | None:
    """Seconds from a deadline header; None when the client sent none.

    Raises:
        ValueError: Not a positive, finite number.
    """
    if value is None:
        return None
    timeout_s = float(value)
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(value)
    return timeout_s
