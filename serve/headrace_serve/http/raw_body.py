"""From the bytes of a request to one JSON object, or to an error that says what is wrong with them.

Laws: any bytes give an object or an `InvalidRequestError` or `RequestTooLargeError`; no other
exception leaves this module. What comes out is at most `MAX_DEPTH` levels deep and holds neither
NaN literals nor lone surrogates, so nothing after it has to guard against them.
"""

import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from headrace_replicas.contract.errors import InvalidRequestError, RequestTooLargeError

MAX_DEPTH = 200
"""Levels of nesting that the JSON parser (jiter, inside pydantic) follows before it refuses."""

_PLACE = re.compile(r"line (\d+) column (\d+)$")
_LITERALS = (b"NaN", b"Infinity")
_JSON_TYPE = re.compile(r"application/([a-z0-9.!#$&^_-]+\+)?json\s*(;.*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """How much of a request is read.

    Attributes:
        max_body_bytes: A longer body is refused unread, at least 1.
    """

    max_body_bytes: int


def check_content_type(content_type: str | None) -> None:
    """Refuse a body that does not say that it is JSON.

    A missing type is refused too: a page in a browser can send such a request, or one with a
    form's type, to a server on this machine without asking first (no CORS preflight).

    Raises:
        InvalidRequestError: With the header to send.
    """
    if content_type is None or not _JSON_TYPE.fullmatch(content_type.strip()):
        raise InvalidRequestError("The body must be JSON: send `Content-Type: application/json`.")


def check_length(length_bytes: int, limits: BodyLimits) -> None:
    """Refuse a body by its announced length, or by what has arrived of it so far.

    Raises:
        RequestTooLargeError: With the limit.
    """
    if length_bytes > limits.max_body_bytes:
        message = (
            f"The request body is larger than {limits.max_body_bytes} bytes. Send a shorter "
            "prompt, or raise `gateway.max_body_bytes` on the server."
        )
        raise RequestTooLargeError(message)


def load_object(raw: bytes, limits: BodyLimits) -> dict[str, Any]:
    """Parse a request body. Of a name that is there twice, the last value counts.

    Raises:
        RequestTooLargeError: More bytes than the limit.
        InvalidRequestError: Empty, not UTF-8, not JSON, nested too deeply, or not an object.
    """
    check_length(len(raw), limits)
    if not raw.strip():
        raise InvalidRequestError("The request body is empty. Send a JSON object.")
    try:
        loaded = from_json(raw, allow_inf_nan=False)
    except ValueError as problem:
        raise _refusal(raw, str(problem)) from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError("The request body is JSON, but not an object: send {...}.")
    return loaded


def _refusal(raw: bytes, problem: str) -> InvalidRequestError:
    """Say what is wrong in the words of a person who has to repair it."""
    if "recursion limit" in problem:
        return InvalidRequestError(f"The JSON is nested more than {MAX_DEPTH} levels deep.")
    place = _PLACE.search(problem)
    where = f" at {place.group()}" if place else ""
    literal = _literal_at(raw, place)
    if literal:
        return InvalidRequestError(
            f"{literal} is not a JSON number (found{where}). Send a finite number or null."
        )
    if "hex escape" in problem or "surrogate" in problem:
        return InvalidRequestError(
            rf"A \u escape is cut short or is half of a surrogate pair{where}. "
            "Cut texts between characters, not inside one."
        )
    if not _is_utf8(raw):
        return InvalidRequestError("The request body is not UTF-8. Encode the JSON as UTF-8.")
    return InvalidRequestError(f"The request body is not valid JSON: {problem}.")


def _literal_at(raw: bytes, place: re.Match[str] | None) -> str | None:
    """The non-finite number that stopped the parser, if that is what did."""
    if place is None:
        return None
    line, column = int(place.group(1)), int(place.group(2))
    rest = raw.split(b"\n", line)[line - 1][column - 1 :]
    return next((name.decode() for name in _LITERALS if rest.startswith(name)), None)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
