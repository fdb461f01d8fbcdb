"""The FastAPI application: routes, keys, request ids and error shapes around `GatewayService`."""

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

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
    _add_errors(api)
    _add_keys(api, KeyRing(settings.api_keys))
    _add_generation(api, service, settings)
    _add_state(api, service, read_incidents)
    return api


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(HeadraceError)
    async def on_headrace_error(_request: Request, error: HeadraceError) -> Response:
        return error_response(error)

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}. The routes are at /docs."
        return json_response(body_for_status(error.status_code, message), error.status_code)

    @api.exception_handler(Exception)
    async def on_surprise(request: Request, error: Exception) -> Response:
        return error_response(logged(error, request.url.path))


def _add_keys(api: FastAPI, keys: KeyRing) -> None:
    @api.middleware("http")
    async def check_key(
        request: Request, proceed: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if request.url.path not in _OPEN_PATHS:
            try:
                keys.check(request.headers)
            except HeadraceError as error:
                return error_response(error)
        return await proceed(request)


def _add_generation(api: FastAPI, service: GatewayService, settings: GatewaySettings) -> None:
    limits = BodyLimits(max_body_bytes=settings.max_body_bytes)

    async def respond(
        request: Request,
        endpoint: Endpoint,
        body: ChatBody | CompletionBody,
        admitted: Admitted,
    ) -> Response:
        model = service.model(body.model).id
        writer = AnswerWriter(service, endpoint, admitted, model)
        if body.stream:
            response: Response = writer.streamed(
                include_usage=body.stream_options.include_usage,
                include_headrace=body.stream_options.include_headrace,
                keep_alive_s=settings.keepalive_s,
            )
        else:
            response = await writer.whole()
        response.headers["x-request-id"] = _echoed_id(request, admitted.request.request_id)
        return response

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions, streamed or whole."""
        body = parse_chat(await _read(request, limits), limits)
        admitted = service.admit_chat(body, secrets.token_hex(16), _timeout_s(request))
        return await respond(request, CHAT, body, admitted)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's legacy completions, streamed or whole."""
        body = parse_completion(await _read(request, limits), limits)
        admitted = service.admit_completion(body, secrets.token_hex(16), _timeout_s(request))
        return await respond(request, COMPLETION, body, admitted)

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
        except (OSError, RuntimeError, ValueError) as error:
            raise NoReplicaError(
                f"The controller cannot be reached ({error}); it is restarted by itself. "
                "Serving goes on. Ask again in a few seconds."
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
    async for piece in request.stream():
        held += piece
        check_length(len(held), limits)
    return bytes(held)


def _echoed_id(request: Request, fresh: str) -> str:
    """The id that the answer's header names: the client's own when it sent a sane one.

    Inside, a request always goes by a fresh id. Two live requests may carry the same header, and
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
