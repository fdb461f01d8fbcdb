"""The gateway's answers to bad requests, unknown routes, wrong keys and odd headers."""

import json

import pytest

from headrace_replicas.contract.settings import GatewaySettings
from headrace_serve.http import routes
from headrace_serve.http.keys import digest
from tests.support.gateway_scene import (
    ASKED,
    PROMPTED,
    GatewayScene,
    Reply,
    call,
    demo_checkpoint,
)
from tests.support.virtual_time import run

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TYPED = {"content-type": "application/json"}
OPEN = ("/livez", "/readyz", "/openapi.json", "/docs")
CLOSED = ("/v1/models", "/v1/models/headrace-demo", "/fleet/v1/replicas", "/fleet/v1/incidents")
FRESH_ID = r"[0-9a-f]{32}"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def post(
    path: str,
    body: object,
    *,
    headers: dict[str, str] | None = None,
    gateway: GatewaySettings | None = None,
) -> Reply:
    scene = GatewayScene(gateway=gateway or GatewaySettings())
    reply = run(scene.request("POST", path, body, headers=headers))
    scene.check_nothing_left()
    return reply


BAD_BODIES: list[tuple[str, object, str | None]] = [
    (CHAT, b"", None),
    (CHAT, b"{", None),
    (CHAT, b"\xff\xfe", None),
    (CHAT, b"[]", None),
    (CHAT, b"null", None),
    (CHAT, b"[" * 5000, None),
    (CHAT, b'{"messages": NaN}', None),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    (CHAT, {**ASKED, "max_tokens": 0}, "max_tokens"),
    (CHAT, {**ASKED, "temperature": "1"}, "temperature"),
    (CHAT, {**ASKED, "stop": ["a", ""]}, "stop[1]"),
    (CHAT, {**ASKED, "n": 2}, "n"),
    (CHAT, {**ASKED, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {**ASKED, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {**ASKED, "logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT, {**ASKED, "stream": "yes"}, "stream"),
    (
        CHAT,
        {**ASKED, "stream_options": {"include_headrace": True}},
        "stream_options.include_headrace",
    ),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, {"prompt": ""}, "prompt"),
    (COMPLETE, {"prompt": []}, "prompt"),
    (COMPLETE, {"prompt": ["a", "b"]}, "prompt"),
    (COMPLETE, {"prompt": [demo_checkpoint().vocab_size]}, "prompt"),
    (COMPLETE, {"prompt": [5] * demo_checkpoint().context_tokens}, "prompt"),
    (COMPLETE, {**PROMPTED, "echo": True}, "echo"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), BAD_BODIES)
def test_a_bad_body_gets_400_before_anything_is_streamed(
    path: str, body: object, param: str | None, *, streamed: bool
) -> None:
    if isinstance(body, dict) and "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": streamed}
    reply = post(path, body)
    assert reply.status == 400
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", param)


def test_a_prompt_without_room_for_an_answer_is_called_too_long() -> None:
    long = [{"role": "user", "content": "word " * 4000}]
    reply = post(CHAT, {"messages": long})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "messages"


def test_an_answer_ends_with_the_context() -> None:
    """Without a limit, and with one that is larger than the room that is left."""
    room = 7
    prompt = [5] * (demo_checkpoint().context_tokens - room)
    for limit in ({}, {"max_tokens": 5000}):
        reply = post(COMPLETE, {"prompt": prompt, **limit})
        assert reply.json["usage"]["completion_tokens"] == room
        assert reply.json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data"])
def test_a_body_that_does_not_say_that_it_is_json_is_refused(content_type: str | None) -> None:
    scene = GatewayScene()
    headers = {} if content_type is None else {"content-type": content_type}
    raw = json.dumps(ASKED).encode()
    reply = run(call(scene.api, "POST", CHAT, headers=headers, body=[raw]))
    assert reply.status == 400
    assert "application/json" in reply.error["message"]


@pytest.mark.parametrize("announced", ["10000", "9" * 5000, None, "5"])
def test_a_body_that_is_too_large_gets_413_by_its_announcement_or_as_it_comes(
    announced: str | None,
) -> None:
    scene = GatewayScene(gateway=GatewaySettings(max_body_bytes=1000))
    headers = TYPED | ({} if announced is None else {"content-length": announced})
    reply = run(call(scene.api, "POST", CHAT, headers=headers, body=[b" " * 400] * 5))
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_a_client_that_leaves_while_it_sends_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = GatewayScene()
    reply = run(scene.request("POST", CHAT, ASKED, leaves_after_s=0))
    assert reply.status == 0
    assert caplog.records == []
    assert scene.fleet.attempts == []


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_an_unknown_model_is_a_404_that_names_the_known_ones(path: str) -> None:
    reply = post(path, {**ASKED, **PROMPTED, "model": "gpt-7"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert "headrace-demo" in reply.error["message"]


def test_an_answer_goes_by_the_name_under_which_the_model_was_asked_for() -> None:
    scene = GatewayScene(aliases=("org/other",))
    assert scene.chat(model="org/other").json["model"] == "org/other"
    assert scene.chat(model="headrace-demo").json["model"] == "headrace-demo"


def test_models_are_listed_with_their_aliases_and_found_by_any_name() -> None:
    scene = GatewayScene(aliases=("org/other",), names="")
    listed = scene.get("/v1/models").json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["headrace-demo", "org/other"]
    for model in listed["data"]:
        assert scene.get(f"/v1/models/{model['id']}").json == model
        assert model["context_length"] == demo_checkpoint().context_tokens
    assert scene.get("/v1/models/none").error["code"] == "model_not_found"


def test_an_unknown_route_is_404_and_a_wrong_method_405_with_the_right_one() -> None:
    unknown = GatewayScene().get("/v1/nothing")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    wrong = GatewayScene().get(CHAT)
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("path", [CHAT, COMPLETE, *OPEN, *CLOSED, "/v1/nothing", "/"])
def test_no_method_on_any_route_is_a_failure(path: str) -> None:
    scene = GatewayScene()
    for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "NONSENSE"):
        # 503 is what /readyz has to say while no replica is ready, by HEAD as by GET.
        assert run(scene.request(method, path)).status in {*range(200, 500), 503}


def test_the_routes_describe_themselves() -> None:
    paths = GatewayScene().get("/openapi.json").json["paths"]
    assert {CHAT, COMPLETE, "/v1/models", "/readyz", "/fleet/v1/incidents"} <= paths.keys()
    assert GatewayScene().get("/docs").status == 200


KEYED = GatewaySettings(api_keys=(digest("right"),))


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "right"}],
)
@pytest.mark.parametrize("path", [*CLOSED, CHAT, "/v1/nothing"])
def test_without_a_known_key_nothing_but_the_open_paths_answers(
    path: str, headers: dict[str, str]
) -> None:
    reply = run(GatewayScene(gateway=KEYED).request("GET", path, headers=headers))
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in reply.body.decode()


def test_a_known_key_is_let_in_and_open_paths_need_none() -> None:
    scene = GatewayScene(gateway=KEYED)
    assert scene.chat(headers={"authorization": "Bearer right"}).status == 200
    assert scene.chat(headers={"x-api-key": "right"}).status == 200
    for path in OPEN:
        assert scene.get(path).status in (200, 503)


@pytest.mark.parametrize("name", ["x-request-timeout", "x-request-timeout-seconds"])
@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "inf", "1e999", "", "1 s"])
def test_a_timeout_that_is_no_positive_number_is_refused_by_name(name: str, value: str) -> None:
    reply = post(CHAT, ASKED, headers={name: value})
    assert (reply.status, reply.error["param"]) == (400, name)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/nothing"])
def test_the_request_id_header_is_left_to_the_proxy(path: str) -> None:
    """It echoes the client's id on every answer; a second one would contradict it."""
    assert "x-request-id" not in post(path, ASKED, headers={"x-request-id": "mine"}).headers


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "word " * 60_000}]},
        {"messages": [{"role": "user", "content": "x"}] * 3000},
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_SHORT_BODY_BYTES", 10**9)  # virtual time knows no threads
    reply = post(CHAT, {**ASKED, **change})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "cannot fit" in reply.error["message"]


def test_a_stop_string_of_megabytes_is_refused() -> None:
    reply = post(CHAT, {**ASKED, "stop": ["fine", "x" * 1001]})
    assert (reply.status, reply.error["param"]) == (400, "stop[1]")
