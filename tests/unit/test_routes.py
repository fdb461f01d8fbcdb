"""The gateway's answers over HTTP, whole and streamed, with scripted replicas behind it."""

import re
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace_replicas.contract.settings import GatewaySettings
from headrace_serve.http.sse import KEEPALIVE
from headrace_serve.text.logprobs import IMPOSSIBLE
from tests.cases import sse_check
from tests.support.gateway_scene import (
    ANSWER,
    ASKED,
    GatewayScene,
    Reply,
    answer_ids,
    demo_tokenizer,
)
from tests.support.scripted_fleet import HARMLESS, LOSSES, Fault, FaultKind, Pace, by_attempt
from tests.support.stream_scene import SOUND
from tests.support.virtual_time import EPOCH_S

ENDPOINTS = ("chat", "complete")
COUNT = len(answer_ids())


def ask(scene: GatewayScene, endpoint: str, **fields: Any) -> Reply:
    return scene.chat(**fields) if endpoint == "chat" else scene.complete(**fields)


def text_of(reply: Reply) -> str:
    """The text of a whole answer or of a stream without a fault in its form."""
    if reply.headers["content-type"] == "application/json":
        [choice] = reply.json["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    report = sse_check.check(reply.body)
    assert report.problems == ()
    return report.text


def finish_of(reply: Reply) -> str:
    if reply.headers["content-type"] == "application/json":
        return str(reply.json["choices"][0]["finish_reason"])
    return str(sse_check.check(reply.body).finish)


def said(tokens: int) -> str:
    """What the model's first tokens spell, without a character that they only begin."""
    spelled = b"".join(map(demo_tokenizer().token_bytes, answer_ids()[:tokens]))
    return spelled.decode(errors="ignore")


def anonymous(reply: Reply) -> bytes:
    """A stream's bytes without its own id and without comments."""
    named = reply.body.replace(KEEPALIVE, b"")
    return re.sub(rb"cmpl-[0-9a-f]{32}", b"cmpl-", named)


def test_a_whole_chat_answer_is_one_that_openais_client_reads() -> None:
    reply = GatewayScene().chat()
    assert (reply.status, text_of(reply)) == (200, ANSWER)
    answer = ChatCompletion.model_validate(reply.json, strict=True)
    assert answer.choices[0].message.role == "assistant"
    assert (answer.model, answer.created) == ("headrace-demo", EPOCH_S)
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", answer.id)
    assert answer.usage is not None
    prompt_ids = demo_tokenizer().render_chat(ASKED["messages"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), COUNT)
    assert (reply.headers["x-headrace-attempts"], reply.headers["x-headrace-resume"]) == (
        "1",
        "none",
    )


def test_a_whole_completion_is_one_that_openais_client_reads() -> None:
    reply = GatewayScene().complete()
    assert (reply.status, text_of(reply), finish_of(reply)) == (200, ANSWER, "stop")
    answer = Completion.model_validate(reply.json, strict=True)
    assert re.fullmatch("cmpl-[0-9a-f]{32}", answer.id)
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(demo_tokenizer().encode("once")) + COUNT


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("pace", [Pace(), Pace(chunk_tokens=4), Pace(chunk_tokens=100)])
def test_a_stream_keeps_the_rules_and_says_the_same_as_the_whole_answer(
    endpoint: str, pace: Pace
) -> None:
    reply = ask(GatewayScene(pace=pace), endpoint, stream=True)
    assert (text_of(reply), finish_of(reply)) == (ANSWER, "stop")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.body.count(b"[DONE]") == 1
    assert len({event["id"] for event in reply.events}) == 1
    assert {(event["created"], event["model"]) for event in reply.events} == {
        (EPOCH_S, "headrace-demo")
    }
    assert not any("usage" in event or "headrace" in event for event in reply.events)
    if endpoint == "chat":
        for event in reply.events:
            ChatCompletionChunk.model_validate(event, strict=True)


def test_a_stream_says_by_its_headers_that_nothing_may_hold_it_up() -> None:
    headers = GatewayScene().chat(stream=True).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_usage_and_moves_come_in_the_last_chunk_when_they_are_asked_for(endpoint: str) -> None:
    options = {"include_usage": True, "include_headrace": True}
    plan = by_attempt(Fault(kind="die", at=3))
    reply = ask(GatewayScene(plan), endpoint, stream=True, stream_options=options)
    report = sse_check.check(reply.body)
    assert (report.problems, report.usage_chunks) == ((), 1)
    *others, last = reply.events
    assert all(event["usage"] is None and event["choices"] for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == COUNT
    assert last["headrace"] == {"attempts": 2, "resume": "fast"}


def test_an_empty_answer_is_an_answer() -> None:
    whole, streamed = GatewayScene(said=()).chat(), GatewayScene(said=()).chat(stream=True)
    assert (text_of(whole), finish_of(whole)) == ("", "stop")
    assert (text_of(streamed), finish_of(streamed)) == ("", "stop")
    assert streamed.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("cut", [0, 4, 7, COUNT])
def test_a_moved_stream_has_the_bytes_of_an_undisturbed_one(
    cut: int, kind: FaultKind, endpoint: str
) -> None:
    """Cuts inside of words and characters too; only the answer's id differs."""
    fields = {"stream": True, "seed": 5, "stream_options": {"include_usage": True}}
    fields["logprobs"] = True if endpoint == "chat" else 2
    scene = GatewayScene(by_attempt(Fault(kind=kind, at=cut)))
    moved, still = ask(scene, endpoint, **fields), ask(GatewayScene(), endpoint, **fields)
    assert len(scene.fleet.attempts) == 2
    assert anonymous(moved) == anonymous(still)


@pytest.mark.parametrize("kind", [*LOSSES, *HARMLESS])
def test_a_moved_whole_answer_is_the_undisturbed_one(kind: FaultKind) -> None:
    plan = by_attempt(Fault(kind=kind, at=4, for_s=0.3))
    reply, still = GatewayScene(plan).chat(logprobs=True), GatewayScene().chat(logprobs=True)
    for key in ("choices", "usage", "created", "model", "object"):
        assert reply.json[key] == still.json[key]
    assert reply.headers["x-headrace-attempts"] == ("2" if kind in LOSSES else "1")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_three_lost_attempts_end_in_one_error_and_not_in_half_an_answer(
    endpoint: str, *, streamed: bool
) -> None:
    scene = GatewayScene(by_attempt(*[Fault(kind="die", at=4)] * 3))
    reply = ask(scene, endpoint, stream=streamed)
    if not streamed:
        assert (reply.status, reply.error["code"]) == (502, "replica_lost")
        return
    assert reply.status == 200
    report = sse_check.check(reply.body)
    assert report.finish is None
    assert reply.events[-1]["error"]["code"] == "replica_lost"
    assert b"[DONE]" not in reply.body
    assert ANSWER.startswith(report.text)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("wörld", "Hello, "),
        ("🦊", "Hello, wörld "),
        ("!\nThe", "Hello, wörld 🦊"),
        (["zebra", "END", "near"], "Hello, wörld 🦊!\nThe "),
        ("H", ""),
    ],
)
def test_a_stop_string_spread_over_tokens_ends_the_answer_before_it(
    stop: str | list[str], text: str, endpoint: str, chunk_tokens: int
) -> None:
    pace = Pace(chunk_tokens=chunk_tokens)
    stops = [stop] if isinstance(stop, str) else stop
    whole = ask(GatewayScene(pace=pace), endpoint, stop=stop)
    assert (text_of(whole), finish_of(whole)) == (text, "stop")
    used = whole.json["usage"]["completion_tokens"]
    assert any(one in said(used) for one in stops), "a token of the stop string is not counted"
    assert not any(one in said(used - 1) for one in stops), "a token after it is counted"
    for cut in (None, 1, used - 1, used):
        plan = SOUND if cut is None else by_attempt(Fault(kind="die", at=cut))
        streamed = ask(GatewayScene(plan, pace=pace), endpoint, stop=stop, stream=True)
        assert (text_of(streamed), finish_of(streamed)) == (text, "stop")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_beginning_of_a_stop_string_at_the_end_of_the_answer_is_text(endpoint: str) -> None:
    for streamed in (False, True):
        reply = ask(GatewayScene(), endpoint, stop="nearly", stream=streamed)
        assert (text_of(reply), finish_of(reply)) == (ANSWER, "stop")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_token_limit_cuts_and_says_so(endpoint: str) -> None:
    fox = ANSWER.index("🦊")
    for streamed in (False, True):
        reply = ask(GatewayScene(), endpoint, max_tokens=7, stream=streamed)
        assert (text_of(reply), finish_of(reply)) == (ANSWER[:fox] + "\ufffd", "length")


def test_chat_logprobs_are_the_same_whole_and_streamed_and_name_every_byte() -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    [choice] = GatewayScene().chat(**fields).json["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == ANSWER
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    for chunk_tokens in (1, 4):
        stream = GatewayScene(pace=Pace(chunk_tokens=chunk_tokens)).chat(stream=True, **fields)
        deltas = [event["choices"][0]["logprobs"] for event in stream.events]
        assert [entry for delta in deltas if delta for entry in delta["content"]] == entries


@pytest.mark.parametrize("chunk_tokens", [1, 100])
def test_logprobs_end_with_the_token_that_completes_a_stop_string(chunk_tokens: int) -> None:
    reply = GatewayScene(pace=Pace(chunk_tokens=chunk_tokens)).chat(logprobs=True, stop="END")
    entries = reply.json["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply.json["usage"]["completion_tokens"]
    assert [entry["token"] for entry in entries][-1] == "D"


def test_legacy_logprobs_are_the_same_whole_and_streamed_and_say_where_each_token_begins() -> None:
    [choice] = GatewayScene().complete(logprobs=2).json["choices"]
    held = choice["logprobs"]
    assert {len(held[key]) for key in held} == {COUNT}
    assert held["text_offset"] == sorted(held["text_offset"])
    assert all(logprob > IMPOSSIBLE for logprob in held["token_logprobs"])
    for token, offset in zip(held["tokens"], held["text_offset"], strict=True):
        assert token.startswith("bytes:") or ANSWER[offset:].startswith(token)
    stream = GatewayScene().complete(stream=True, logprobs=2)
    deltas = [event["choices"][0]["logprobs"] for event in stream.events]
    for key in held:
        assert [entry for delta in deltas if delta for entry in delta[key]] == held[key]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_without_logprobs_no_chunk_has_any(endpoint: str) -> None:
    reply = ask(GatewayScene(), endpoint, stream=True)
    assert all(event["choices"][0]["logprobs"] is None for event in reply.events)


def test_a_long_prefill_is_bridged_by_comments_on_the_clock() -> None:
    reply = GatewayScene(pace=Pace(prefill_s=23)).chat(stream=True)
    signs = [at_s for at_s, piece in reply.parts if piece == KEEPALIVE]
    assert signs == pytest.approx([5, 10, 15, 20])
    assert text_of(reply) == ANSWER


def test_comments_end_with_the_error_that_ends_the_stream() -> None:
    reply = GatewayScene(names="", gateway=GatewaySettings(keepalive_s=7)).chat(stream=True)
    assert [piece == KEEPALIVE for _, piece in reply.parts] == [True] * 4 + [False]
    assert reply.events[0]["error"]["code"] == "no_replica_available"
    assert b"[DONE]" not in reply.body


def test_a_request_that_no_replica_takes_ends_with_503_and_when_to_come_back() -> None:
    reply = GatewayScene(names="").chat()
    assert (reply.status, reply.error["code"]) == (503, "no_replica_available")
    assert int(reply.headers["retry-after"]) > 0
