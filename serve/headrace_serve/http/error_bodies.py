"""Errors as OpenAI's clients expect them: status, headers and `{"error": {...}}`."""

import math
from collections.abc import Mapping

from headrace_replicas.contract.errors import HeadraceError, InvalidApiKeyError, InvalidRequestError

_RETRY_AFTER_S = {
    429: 1.0,  # the shortest wait that the header can say: places come free with every answer
    503: 5.0,  # our choice: a lost replica's successor has to start a process and load first
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


def body_of(error: HeadraceError) -> dict[str, object]:
    """The body that tells a client about an error."""
    return _body(error.message, error.error_type, error.param, error.code)


def status_of(error: HeadraceError) -> int:
    """The HTTP status that goes with an error."""
    return error.http_status


def headers_of(error: HeadraceError, retry_after_s: float | None = None) -> dict[str, str]:
    """The headers that go with an error.

    Args:
        error: What went wrong.
        retry_after_s: A better guess than the default of when to come back, in seconds; it is
            rounded up to whole seconds and never below 1, because clients retry at once on 0.
    """
    if isinstance(error, InvalidApiKeyError):
        return {"www-authenticate": "Bearer"}
    default_s = _RETRY_AFTER_S.get(error.http_status)
    if default_s is None:
        return {}
    wait_s = default_s if retry_after_s is None else retry_after_s
    return {"retry-after": str(max(1, math.ceil(wait_s)))}


def unexpected(log_id: str) -> HeadraceError:
    """What a client is told of an exception that nobody foresaw: where to look, and no details.

    Args:
        log_id: An id that stands beside the traceback in the server's log.
    """
    return HeadraceError(
        f"The server failed in a way it did not foresee. Its log has the details under {log_id}."
    )


def body_for_status(status: int, message: str) -> Mapping[str, object]:
    """The body for an error of the HTTP layer itself: an unknown route, a wrong method.

    Args:
        status: The HTTP status, 400 to 599.
        message: For a person.
    """
    family = InvalidRequestError if status < 500 else HeadraceError
    return _body(message, family.error_type, None, _CODES.get(status, family.code))


def _body(message: str, error_type: str, param: str | None, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}
