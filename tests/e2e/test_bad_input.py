"""Bad input gets a 4xx in OpenAI's shape, and nobody else notices."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

HELLO = [{"role": "user", "content": "What is 9 + 9?"}]

BAD: dict[str, tuple[bytes | dict[str, Any], int, str]] = {
    "broken JSON": (b'{"model": "x", "messages": [', 400, "invalid_value"),
    "not an object": (b"[1, 2]", 400, "invalid_value"),
    "stop is a number": ({"messages": HELLO, "stop": 5}, 400, "invalid_value"),
    "stop holds a number": ({"messages": HELLO, "stop": [1]}, 400, "invalid_value"),
    "temperature is text": ({"messages": HELLO, "temperature": "hot"}, 400, "invalid_value"),
    "temperature is NaN": (
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        400,
        "invalid_value",
    ),
    "unknown model": ({"model": "gpt-4o", "messages": HELLO}, 404, "model_not_found"),
    "a path as model": ({"model": "/etc", "messages": HELLO}, 404, "model_not_found"),
    "empty messages": ({"messages": []}, 400, "invalid_value"),
    "a message without a role": ({"messages": [{"content": "x"}]}, 400, "invalid_value"),
    "max_tokens 0": ({"messages": HELLO, "max_tokens": 0}, 400, "invalid_value"),
    "n is 0": ({"messages": HELLO, "n": 0}, 400, "invalid_value"),
    "n is 2": ({"messages": HELLO, "n": 2}, 400, "unsupported_parameter"),
    "a bias beyond the vocabulary": (
        {"messages": HELLO, "logit_bias": {"999999": 1}},
        400,
        "invalid_value",
    ),
    "longer than the context": (
        {"messages": [{"role": "user", "content": "word " * 5000}]},
        400,
        "context_length_exceeded",
    ),
}


def post(stack: Stack, body: bytes | dict[str, Any]) -> httpx.Response:
    url = f"{stack.endpoint}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    if isinstance(body, bytes):
        return httpx.post(url, content=body, headers=headers, timeout=30, trust_env=False)
    return httpx.post(url, json={"model": MODEL, **body}, timeout=30, trust_env=False)


def test_bad_requests_are_refused_while_a_neighbour_streams_on_unchanged(stack: Stack) -> None:
    body = stack.body("Tell me a story about an owl named Otto.", max_tokens=300)
    undisturbed = stack.stream(body)
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(stack.stream, body)
        for name, (bad, status, code) in BAD.items():
            response = post(stack, bad)
            error = response.json()["error"]
            assert (name, response.status_code) == (name, status)
            assert (name, error["code"]) == (name, code)
            assert error["message"]
            assert {"message", "type", "param", "code"} == set(error)
        answer = neighbour.result()
    assert answer.whole
    assert answer.text == undisturbed.text
    assert answer.attempts == 1


def test_unknown_and_null_fields_are_accepted(stack: Stack) -> None:
    body = {"messages": HELLO, "temperature": 0, "seed": None, "stop": None, "tools": None}
    response = post(stack, {**body, "service_tier": "auto", "made_up": {"x": [1]}})
    assert response.json()["choices"][0]["message"]["content"] == "9 + 9 = 18"


def test_unknown_routes_and_methods_answer_in_the_same_shape(stack: Stack) -> None:
    lost = httpx.get(f"{stack.endpoint}/v1/nothing", timeout=30, trust_env=False)
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
    wrong = httpx.get(f"{stack.endpoint}/v1/chat/completions", timeout=30, trust_env=False)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_deadline_ends_a_request_with_an_error_that_says_so(stack: Stack) -> None:
    body = {"model": MODEL, "messages": HELLO, "temperature": 0}
    story = {**body, "messages": [{"role": "user", "content": "Tell me a long story."}]}
    response = httpx.post(
        f"{stack.endpoint}/v1/chat/completions",
        json={**story, "logit_bias": {"2": -100, "0": -100}, "max_tokens": 1500},
        headers={"x-request-timeout": "0.5"},
        timeout=30,
        trust_env=False,
    )
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
