"""One HTTP request, raw: bytes as they came, no redirect, no decompression, no retry."""

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.cases.case_file import Step, expand

_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server under test.

    Attributes:
        base: Its address, such as `http://127.0.0.1:8000`.
        model: The id that requests name.
        key: The API key, or None.
    """

    base: str
    model: str
    key: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            ValueError: `base` is no address of an HTTP server.
        """
        parts = urlsplit(self.base)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{self.base!r} is no http address; give one as http://HOST:PORT")
        return parts.hostname, parts.port or 80

    def url_path(self, path: str) -> str:
        """The request path under the base address, with the model's id put in."""
        return urlsplit(self.base).path.rstrip("/") + path.replace("$MODEL", self.model)


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back, and when; times are seconds since the request began.

    Attributes:
        status: None when no status line came.
        headers: Names in lower case.
        failure: Why the transport failed, or None.
        timed_out: The failure was the client's own time limit.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    headers_s: float | None = None
    first_byte_s: float | None = None
    total_s: float = 0.0
    failure: str | None = None
    timed_out: bool = False


def request_body(step: Step, model: str) -> bytes | None:
    """The bytes that a step sends, or None when it has no body."""
    if step.raw_size is not None:
        head, tail = b'{"model":"x","messages":[{"role":"user","content":"', b'"}]}'
        return head + b"a" * step.raw_size + tail
    if step.raw_hex is not None:
        return bytes.fromhex(step.raw_hex)
    if step.raw is not None:
        return str(expand(step.raw, model)).encode()
    if "body" in step.model_fields_set:
        return json.dumps(expand(step.body, model)).encode()
    return None


def request_headers(step: Step, key: str | None) -> dict[str, str]:
    """Content type and key, then the step's own headers; a None takes one away."""
    headers: dict[str, str | None] = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    headers |= step.headers
    return {name: value for name, value in headers.items() if value is not None}


def call(target: Target, step: Step) -> Answer:
    """Sends one request and reads its answer to the end (or to `abort_after`)."""
    host, port = target.address
    answer = Answer()
    started_s = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=step.timeout)
    try:
        connection.request(
            step.method,
            target.url_path(step.path),
            request_body(step, target.model),
            request_headers(step, target.key),
        )
        _read(connection, step, answer, started_s)
    except (OSError, http.client.HTTPException) as failure:
        answer.failure = f"{type(failure).__name__}: {failure}"
        answer.timed_out = isinstance(failure, TimeoutError)
    finally:
        connection.close()
    answer.total_s = time.monotonic() - started_s
    return answer


def _read(
    connection: http.client.HTTPConnection, step: Step, answer: Answer, started_s: float
) -> None:
    with connection.getresponse() as response:
        answer.headers_s = time.monotonic() - started_s
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.getheaders()}
        while received := response.read1(_READ_BYTES):
            if answer.first_byte_s is None:
                answer.first_byte_s = time.monotonic() - started_s
            answer.body += received
            if step.abort_after is not None and len(answer.body) > step.abort_after:
                return
