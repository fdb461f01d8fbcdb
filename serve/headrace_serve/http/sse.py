"""Server-sent events: how a streamed answer is framed on the wire.

A stream is events, then `DONE`, then the end of the connection. After `error_event` nothing
follows, `DONE` least of all: a client must not take a broken answer for a whole one.
"""

from collections.abc import Mapping

from headrace_replicas.contract.errors import HeadraceError
from headrace_serve.http.error_bodies import body_of
from headrace_serve.http.json_bytes import json_bytes

DONE = b"data: [DONE]\n\n"
"""The last event of every answer that is complete."""

KEEPALIVE = b": keep-alive\n\n"
"""A comment line: it resets the read clocks of proxies, and event parsers skip it."""

HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    # no-transform keeps proxies from compressing, and so from collecting, the events.
    "cache-control": "no-cache, no-transform",
    # nginx buffers whole answers by default; this switches it off for one response.
    "x-accel-buffering": "no",
}
"""Headers of a streamed answer. No `connection`: it belongs to the hop, and HTTP/2 forbids it."""


def event(body: Mapping[str, object]) -> bytes:
    """One event with a JSON object as its content.

    Raises:
        ValueError: A number in it is NaN or infinite.
    """
    return b"data: " + json_bytes(body) + b"\n\n"


def error_event(error: HeadraceError) -> bytes:
    """The event that ends a stream which cannot be completed.

    It carries no `event:` name: OpenAI's clients look for `error` in the content.
    """
    return event(body_of(error))
