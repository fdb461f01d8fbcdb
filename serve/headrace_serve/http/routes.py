"""The FastAPI application: routes, keys, request ids and error shapes around `GatewayService`."""

import re
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
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

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TIMEOUT_HEADERS: Final = ("x-request-timeout", "x-request-timeout-seconds")
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
    _add_errors(api)
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
        fresh_id = secrets.token_hex(16)
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": fresh_id}}
        request = Request(scope)
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = _echoed_id(request, fresh_id)
            await send(message)

        try:
            self._check_key(request)
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            return  # nobody is left to answer
        except HeadraceError as error:
            await error_response(error)(scope, receive, send_named)
        except Exception as error:
            if begun:
                raise  # the broken connection tells the client
            unforeseen = logged(error, request.url.path)
            await error_response(unforeseen)(scope, receive, send_named)

    def _check_key(self, request: Request) -> None:
        if request.url.path not in _OPEN_PATHS:
            self._keys.check(request.headers)


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(HeadraceError)
    async def on_headrace_error(_request: Request, error: HeadraceError) -> Response:
        return error_response(error)

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
        body = parse_chat(await _read(request, limits), limits)
        admitted = service.admit_chat(body, request.state.request_id, _timeout_s(request))
        return await respond(CHAT, body, admitted)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's legacy completions, streamed or whole."""
        body = parse_completion(await _read(request, limits), limits)
        admitted = service.admit_completion(body, request.state.request_id, _timeout_s(request))
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
    @api.get("/livez")
    async def livez() -> Response:
        """This gateway process runs."""
        return json_response({"alive": True})

    @api.get("/readyz")
    async def readyz() -> Response:
        """A replica passed a generation probe lately; 503 with ages and reasons otherwise."""
        ready, body = service.readiness()
        return json_response(body, 200 if ready else 503)

    @api.get("/fleet/v1/replicas")
    async def replicas() -> Response:
        """Each replica with its state, its process and what it is doing."""
        return json_response({"replicas": service.replicas()})

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


def _echoed_id(request: Request, fresh: str) -> str:
    """The id that every answer's header names: the client's own when it sent a sane one.

    Inside, a request always goes by the fresh id. Two live requests may carry the same header, and
    must not share a journal's fence, an engine's slot or a verdict.
    """
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else fresh


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
