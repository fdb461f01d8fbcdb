"""The FastAPI application: routes, keys, request ids and error shapes around `GatewayService`."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Final, ParamSpec, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_replicas.contract.errors import HeadraceError, InvalidRequestError, NoReplicaError
from headrace_replicas.contract.fleet import Incident
from headrace_replicas.contract.settings import GatewaySettings
from headrace_serve.http.answers import (
    CHAT,
    COMPLETION,
    AnswerWriter,
    Endpoint,
    error_response,
    json_response,
    logged,
    timeout_of,
)
from headrace_serve.http.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from headrace_serve.http.error_bodies import body_for_status
from headrace_serve.http.keys import KeyRing
from headrace_serve.http.raw_body import BodyLimits, check_content_type, check_length
from headrace_serve.http.responses import model_list, model_object
from headrace_serve.http.service import Admitted, GatewayService
from headrace_serve.incidents import summary

ReadIncidents = Callable[[], Awaitable[tuple[Incident, ...]]]

Work = ParamSpec("Work")
Result = TypeVar("Result")

_TIMEOUT_HEADERS: Final = ("x-request-timeout", "x-request-timeout-seconds")
# A body of this length is parsed, rendered and encoded in about 20 ms.
_SHORT_BODY_BYTES: Final = 32 * 1024
# These say nothing but whether the service is well and what its routes are.
_OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/openapi.json", "/docs"})


def build_api(
    service: GatewayService, settings: GatewaySettings, read_incidents: ReadIncidents
) -> FastAPI:
    """The gateway's HTTP application.

    Args:
        service: What answers.
        settings: Limits, keys and keep-alive.
        read_incidents: Fetches the controller's incidents; may raise when it cannot be reached.
    """
    api = FastAPI(
        title="headrace",
        summary="LLM serving that keeps answering when Metal does not.",
        redoc_url=None,
    )
    api.add_middleware(Reception, keys=KeyRing(settings.api_keys))
    _add_errors(api, service)
    _add_generation(api, service, settings)
    _add_state(api, service, read_incidents)
    return api


class Reception:
    """What every request passes: its id, its key, and an answer to failures nobody foresaw.

    Plain ASGI on purpose. Starlette's `BaseHTTPMiddleware` runs the rest of the application in a
    task group of its own, whose cancellation comes again at every await of a clean-up; and its
    handler for `Exception` raises the error once more after it was answered.

    Args:
        app: The application inside.
        keys: Who is let in.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Ray Serve's proxy echoes the client's x-request-id. Inside, a request goes by an id of its
        # own: two live ones may carry the same header, and must not share an engine's slot.
        fresh_id = secrets.token_hex(16)
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": fresh_id}}
        request = Request(scope)
        begun = False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check_key(request)
            await self._app(scope, receive, send_noted)
        except ClientDisconnect:
            return  # nobody is left to answer
        except HeadraceError as error:
            await error_response(error)(scope, receive, send_noted)
        except Exception as error:
            if begun:
                raise  # the broken connection tells the client
            unforeseen = logged(error, request.url.path)
            await error_response(unforeseen)(scope, receive, send_noted)

    def _check_key(self, request: Request) -> None:
        if request.url.path not in _OPEN_PATHS:
            self._keys.check(request.headers)


def _add_errors(api: FastAPI, service: GatewayService) -> None:
    @api.exception_handler(HeadraceError)
    async def on_headrace_error(_request: Request, error: HeadraceError) -> Response:
        return error_response(error, service.retry_after_s())

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}. The routes are at /docs."
        body = body_for_status(error.status_code, message)
        return json_response(body, error.status_code, error.headers)


def _add_generation(api: FastAPI, service: GatewayService, settings: GatewaySettings) -> None:
    limits = BodyLimits(max_body_bytes=settings.max_body_bytes)

    async def respond(
        endpoint: Endpoint, body: ChatBody | CompletionBody, admitted: Admitted
    ) -> Response:
        model = service.model(body.model).id
        writer = AnswerWriter(service, endpoint, admitted, model)
        if not body.stream:
            return await writer.whole()
        return writer.streamed(
            include_usage=body.stream_options.include_usage,
            include_headrace=body.stream_options.include_headrace,
            keep_alive_s=settings.keepalive_s,
        )

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions, streamed or whole."""
        raw = await _read(request, limits)
        body = await _off_loop(raw, parse_chat, raw, limits)
        admitted = await _off_loop(
            raw, service.admit_chat, body, request.state.request_id, _timeout_s(request)
        )
        return await respond(CHAT, body, admitted)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's legacy completions, streamed or whole."""
        raw = await _read(request, limits)
        body = await _off_loop(raw, parse_completion, raw, limits)
        admitted = await _off_loop(
            raw, service.admit_completion, body, request.state.request_id, _timeout_s(request)
        )
        return await respond(COMPLETION, body, admitted)

    @api.get("/v1/models")
    async def models() -> Response:
        """The models that are served, aliases included, whatever the replicas' state."""
        return json_response(model_list(service.models()))

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """One served model."""
        return json_response(model_object(service.model(name)))


def _add_state(api: FastAPI, service: GatewayService, read_incidents: ReadIncidents) -> None:
    # Load balancers ask by HEAD.
    @api.head("/livez", include_in_schema=False)
    @api.get("/livez")
    async def livez() -> Response:
        """This gateway process runs."""
        return json_response({"alive": True})

    @api.head("/readyz", include_in_schema=False)
    @api.get("/readyz")
    async def readyz() -> Response:
        """A replica passed a generation probe lately; 503 with ages and reasons otherwise."""
        ready, body = service.readiness()
        return json_response(body, 200 if ready else 503)

    @api.get("/fleet/v1/replicas")
    async def replicas() -> Response:
        """Each replica with its state and its process; each place without a ready engine."""
        return json_response({"replicas": service.replicas(), "hosts": service.hosts()})

    @api.get("/fleet/v1/incidents")
    async def incidents() -> Response:
        """All incidents, each also as five lines for a person."""
        try:
            found = await read_incidents()
        except Exception as error:  # the call crosses Ray, whose errors share no other base
            raise NoReplicaError(
                f"The controller cannot be reached ({type(error).__name__}); it restarts by "
                "itself. Serving goes on. Ask again in a few seconds."
            ) from error
        return json_response(
            {
                "incidents": [asdict(incident) for incident in found],
                "summaries": [summary(incident) for incident in found],
            }
        )


async def _read(request: Request, limits: BodyLimits) -> bytes:
    """The body, refused as soon as it is known to be too large.

    Raises:
        InvalidRequestError: Not JSON by its content type.
        RequestTooLargeError: Longer than the limit.
    """
    check_content_type(request.headers.get("content-type"))
    announced = request.headers.get("content-length", "")
    # A longer number than this is larger than any limit; Python refuses to parse very long ones.
    if announced.isdecimal():
        check_length(int(announced[:19]), limits)
    held = bytearray()
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            held += piece
            check_length(len(held), limits)
    return bytes(held)


async def _off_loop(
    raw: bytes, work: Callable[Work, Result], *arguments: Work.args, **options: Work.kwargs
) -> Result:
    """Do the work on a body: on the event loop when it is short, on a thread when it is long.

    All streams of this gateway stand still while its loop computes.
    """
    if len(raw) <= _SHORT_BODY_BYTES:
        return work(*arguments, **options)
    return await asyncio.to_thread(work, *arguments, **options)


def _timeout_s(request: Request) -> float | None:
    for name in _TIMEOUT_HEADERS:
        value = request.headers.get(name)
        try:
            timeout_s = timeout_of(value)
        except ValueError as error:
            raise InvalidRequestError(
                f"The header {name} must be a positive number of seconds, not {value!r:.40}.", name
            ) from error
        if timeout_s is not None:
            return timeout_s
    return None
