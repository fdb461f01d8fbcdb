"""Events on the wire are one line of valid JSON in valid UTF-8."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import ReplicaLostError
from headrace_serve.http.json_bytes import json_bytes
from headrace_serve.http.sse import DONE, HEADERS, KEEPALIVE, error_event, event

ANY_TEXT = st.text(st.characters(exclude_categories=()))


def contents(stream: bytes) -> list[str]:
    """What an event parser by the book hands on: the data of each event, comments skipped."""
    blocks = stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n\n")
    lines = [line for block in blocks for line in block.split("\n") if line]
    return [line.removeprefix("data: ") for line in lines if not line.startswith(":")]


@given(ANY_TEXT)
@example("a\r\nb\n\n data: x\u2028\x00")
@example("😀 \ud83d half \ude00")
def test_any_text_makes_one_event_of_one_line(text: str) -> None:
    raw = event({"text": text})
    assert raw.startswith(b"data: {")
    assert raw.endswith(b"}\n\n")
    assert raw.count(b"\n") == 2
    (content,) = contents(raw)
    read = json.loads(content)["text"]
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert read == text
    assert not any("\ud800" <= character <= "\udfff" for character in read)


def test_a_lone_surrogate_is_replaced_and_a_pair_becomes_its_character() -> None:
    assert json.loads(json_bytes({"a": "x\ud800y"})) == {"a": "x\ufffdy"}
    assert json.loads(json_bytes({"a": "\ud83d\ude00"})) == {"a": "😀"}


def test_json_is_compact_and_not_escaped() -> None:
    assert json_bytes({"a": [1, "ď"]}) == '{"a":[1,"ď"]}'.encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_say_is_an_error(number: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        json_bytes({"a": number})


def test_a_keepalive_is_a_comment_that_event_parsers_skip() -> None:
    assert KEEPALIVE.startswith(b":")
    assert b"data:" not in KEEPALIVE
    assert contents(KEEPALIVE + event({"a": 1}) + KEEPALIVE + DONE) == ['{"a":1}', "[DONE]"]


def test_stream_headers_keep_proxies_from_buffering() -> None:
    assert HEADERS["content-type"].startswith("text/event-stream")
    assert HEADERS["cache-control"] == "no-cache, no-transform"
    assert HEADERS["x-accel-buffering"] == "no"
    assert "connection" not in HEADERS


def test_an_error_event_holds_the_error_object_and_no_done() -> None:
    raw = error_event(ReplicaLostError("The replica is gone."))
    (content,) = contents(raw)
    assert json.loads(content)["error"]["code"] == "replica_lost"
    assert b"[DONE]" not in raw
