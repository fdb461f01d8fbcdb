"""The one chat request that procedures send, in its variations."""

from typing import Any

from tests.cases.case_file import Step
from tests.cases.http_call import Answer, Target, call
from tests.cases.view import View, read

# What the scripted checkpoint says to [[name]], whole.
SCRIPT_TEXTS = {
    "count": "Count:" + "".join(f" {number}" for number in range(1, 81)),
    "hello": "Hello from the scripted model.",
    "fence": "alpha beta gamma delta eps",
}


def user(text: str) -> dict[str, str]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    """An assistant message."""
    return {"role": "assistant", "content": text}


def chat_body(
    target: Target,
    messages: list[dict[str, str]],
    *,
    max_tokens: int,
    stream: bool = False,
    temperature: float | None = 0,
) -> dict[str, Any]:
    """A chat request's body; a temperature of None leaves the default."""
    body: dict[str, Any] = {"model": target.model, "messages": messages, "max_tokens": max_tokens}
    if stream:
        body["stream"] = True
    if temperature is not None:
        body["temperature"] = temperature
    return body


def ask(
    target: Target, body: dict[str, Any], *, timeout_s: float, abort_after: int | None = None
) -> tuple[Answer, View]:
    """Sends one chat request and reads the answer."""
    step = Step(name="chat", body=body, timeout=timeout_s, abort_after=abort_after)
    answer = call(target, step)
    return answer, read(answer)
