"""From bytes to one JSON object, or to an error that says what to repair."""

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import InvalidRequestError, RequestTooLargeError
from headrace_serve.http.raw_body import (
    MAX_DEPTH,
    BodyLimits,
    check_content_type,
    check_length,
    load_object,
)

LIMITS = BodyLimits(max_body_bytes=100_000)


def nested(levels: int) -> bytes:
    """An object whose only value makes it that many levels deep."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b" \r\n\t", "empty"),
        (b'{"model": ', "not valid JSON"),
        (b"model=x", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"[1,2]", "not an object"),
        (b"null", "not an object"),
        (b'"text"', "not an object"),
        (b'{"a":"\xff"}', "not UTF-8"),
        ('{"a":"b"}'.encode("utf-16"), "not UTF-8"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":"\\udc00 and more"}', "surrogate"),
        (b'{"a":' + b"9" * 5_000 + b"}", "out of range"),
        (nested(MAX_DEPTH + 50), "nested more than 200 levels"),
        (b'{"a":' * 20_000, "nested more than 200 levels"),
    ],
)
def test_a_broken_body_is_refused_in_words_that_name_the_fault(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        load_object(raw, LIMITS)


@pytest.mark.parametrize(
    ("raw", "literal"),
    [
        (b'{"temperature":NaN}', "NaN"),
        (b'{"a":[1,\n  -Infinity]}', "Infinity"),
        (b'{"ignored":{"deep":Infinity}}', "Infinity"),
    ],
)
def test_a_non_finite_literal_is_refused_by_name_wherever_it_stands(
    raw: bytes, literal: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{literal} is not a JSON number"):
        load_object(raw, LIMITS)


def test_the_word_nan_inside_a_string_is_only_text() -> None:
    assert load_object(b'{"a":"NaN Infinity"}', LIMITS) == {"a": "NaN Infinity"}


def test_nesting_up_to_the_limit_is_read() -> None:
    assert "a" in load_object(nested(MAX_DEPTH), LIMITS)


def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_not() -> None:
    raw = b'{"a":1}'
    assert load_object(raw, BodyLimits(max_body_bytes=len(raw))) == {"a": 1}
    with pytest.raises(RequestTooLargeError, match="max_body_bytes"):
        load_object(raw, BodyLimits(max_body_bytes=len(raw) - 1))


def test_an_announced_length_is_refused_before_the_body_is_read() -> None:
    check_length(100_000, LIMITS)
    with pytest.raises(RequestTooLargeError, match="100000 bytes"):
        check_length(100_001, LIMITS)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        " application/json ;charset=UTF-8",
        "application/vnd.api+json",
    ],
)
def test_every_spelling_of_json_is_taken(content_type: str) -> None:
    check_content_type(content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=application/json",
        "application/jsonx",
        "application/notjson",
    ],
)
def test_what_a_browser_sends_without_asking_is_not_taken(content_type: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="Content-Type: application/json"):
        check_content_type(content_type)


@given(st.binary(max_size=300))
@example(b"\\")
@example(b'{"a":-NaN}')
@example(b"{\n\n\nNaN")
def test_any_bytes_give_an_object_or_an_invalid_request(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(load_object(raw, LIMITS), dict)


@given(st.dictionaries(st.text(), st.text() | st.integers(-(2**63), 2**63) | st.booleans()))
def test_a_json_object_comes_through_unchanged(body: dict[str, object]) -> None:
    assert load_object(json.dumps(body, ensure_ascii=False).encode(), LIMITS) == body
