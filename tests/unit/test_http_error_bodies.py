"""Every error has OpenAI's shape, the right status and the headers that go with it."""

from collections.abc import Iterator

import pytest

from headrace_replicas.contract.errors import (
    HeadraceError,
    InvalidApiKeyError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
)
from headrace_serve.http.error_bodies import (
    body_for_status,
    body_of,
    headers_of,
    status_of,
    unexpected,
)


def family(base: type[HeadraceError] = HeadraceError) -> Iterator[type[HeadraceError]]:
    """All classes of the project's errors."""
    yield base
    for derived in base.__subclasses__():
        yield from family(derived)


@pytest.mark.parametrize("kind", list(family()))
def test_each_error_has_openais_shape(kind: type[HeadraceError]) -> None:
    error = kind("What to do.", "stop[0]")
    assert body_of(error) == {
        "error": {
            "message": "What to do.",
            "type": kind.error_type,
            "param": "stop[0]",
            "code": kind.code,
        }
    }
    assert 400 <= status_of(error) < 600


def test_an_error_without_a_field_has_a_null_param() -> None:
    assert body_of(InvalidRequestError("m"))["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_value",
    }


@pytest.mark.parametrize("kind", [OverloadedError, NoReplicaError])
def test_a_busy_server_says_when_to_come_back(kind: type[HeadraceError]) -> None:
    assert int(headers_of(kind("m"))["retry-after"]) >= 1
    assert headers_of(kind("m"), 12.2) == {"retry-after": "13"}
    assert headers_of(kind("m"), 0.0) == {"retry-after": "1"}


def test_a_missing_key_is_answered_with_the_scheme_to_use() -> None:
    assert headers_of(InvalidApiKeyError("m")) == {"www-authenticate": "Bearer"}


def test_other_errors_need_no_header() -> None:
    assert headers_of(InvalidRequestError("m"), 5.0) == {}


def test_an_unforeseen_exception_tells_only_where_to_look() -> None:
    error = unexpected("e-123")
    assert status_of(error) == 500
    assert "e-123" in error.message
    assert body_of(error)["error"] == {
        "message": error.message,
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


@pytest.mark.parametrize(
    ("status", "error_type", "code"),
    [
        (404, "invalid_request_error", "not_found"),
        (405, "invalid_request_error", "method_not_allowed"),
        (422, "invalid_request_error", "invalid_value"),
        (500, "server_error", "internal_error"),
    ],
)
def test_errors_of_the_http_layer_have_the_same_shape(
    status: int, error_type: str, code: str
) -> None:
    assert body_for_status(status, "m") == {
        "error": {"message": "m", "type": error_type, "param": None, "code": code}
    }
