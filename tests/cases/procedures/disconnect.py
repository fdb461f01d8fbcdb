"""Clients that leave (H05, H06, H07, R05): a short request afterwards must start soon.

Phases: `stream` leaves in mid-stream, `prefill` before the first token, `nonstream` while a whole
answer is computed, `race` within 20 ms of sending. `python -m tests.cases.procedures.disconnect
--help`.
"""

import random
import re
import sys
import time
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from tests.cases.http_call import Target
from tests.cases.procedures.chat import SCRIPT_TEXTS, ask, chat_body, user
from tests.cases.procedures.raw_post import post, reset

_LONG_TOKENS = 3000
_RACES_PER_CHECK = 25
_SETTLE_S = 3.0  # gauges are exported by the second


class Phase(StrEnum):
    """When the client leaves."""

    STREAM = "stream"
    PREFILL = "prefill"
    NONSTREAM = "nonstream"
    RACE = "race"


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """One request that is left: after so many bytes, or so many seconds."""

    body: dict[str, Any]
    after_bytes: int = 0
    after_s: float = 0.0
    by_reset: bool = False


def departure(target: Target, phase: Phase, draw: random.Random, *, prompt_words: int) -> Departure:
    """Draws one departure of a phase; half of them reset the connection."""
    by_reset = draw.random() < 0.5
    loop = [user("[[loop]]")]
    match phase:
        case Phase.STREAM:
            body = chat_body(target, loop, max_tokens=_LONG_TOKENS, stream=True)
            return Departure(body=body, after_bytes=2000, by_reset=by_reset)
        case Phase.PREFILL:
            long = [user("word " * prompt_words + "[[loop]]")]
            body = chat_body(target, long, max_tokens=_LONG_TOKENS, stream=True, temperature=None)
            return Departure(body=body, after_s=0.3, by_reset=by_reset)
        case Phase.NONSTREAM:
            body = chat_body(target, loop, max_tokens=_LONG_TOKENS, temperature=None)
            return Departure(body=body, after_s=0.5, by_reset=by_reset)
        case Phase.RACE:
            streams = draw.random() < 0.7
            count = [user("[[count]]")]
            body = chat_body(target, count, max_tokens=200, stream=streams, temperature=None)
            return Departure(body=body, after_s=draw.random() * 0.02, by_reset=by_reset)


def leave(target: Target, step: Departure) -> None:
    """Sends the request and goes away."""
    connection = post(target, step.body, timeout_s=30.0)
    time.sleep(step.after_s)
    received = 0
    while received < step.after_bytes:
        part = connection.recv(4096)
        if not part:
            break
        received += len(part)
    if step.by_reset:
        reset(connection)
    else:
        connection.close()


def next_request(target: Target) -> tuple[bool, float, str]:
    """Sends a short request: whether it is right, its seconds, and what was seen."""
    body = chat_body(target, [user("[[hello]]")], max_tokens=20)
    answer, view = ask(target, body, timeout_s=120.0)
    is_right = answer.status == 200 and view.text == SCRIPT_TEXTS["hello"]
    return is_right, answer.total_s, f"{answer.status} {answer.failure} {answer.body[:80]!r}"


def gauges(url: str, pattern: str) -> list[str]:
    """The lines of a Prometheus page that a pattern finds."""
    with urllib.request.urlopen(url, timeout=10) as page:  # noqa: S310 - the tester's own address
        return re.findall(pattern, page.read().decode(), re.MULTILINE)


def run(target: Target, phase: Phase, *, times: int, limit_s: float, prompt_words: int) -> int:
    """Leaves again and again; returns how many of the requests in between went wrong."""
    draw = random.Random(f"{phase}")  # noqa: S311 - departures, not secrets
    wrong, worst_s = 0, 0.0
    for number in range(times):
        leave(target, departure(target, phase, draw, prompt_words=prompt_words))
        if phase is Phase.RACE and number % _RACES_PER_CHECK != _RACES_PER_CHECK - 1:
            continue
        is_right, took_s, seen = next_request(target)
        worst_s = max(worst_s, took_s)
        wrong += not is_right or took_s > limit_s
        sys.stdout.write(f"{number}: next request {took_s:.2f} s {'' if is_right else seen}\n")
    word = "BAD" if wrong else "clean"
    sys.stdout.write(f"disconnect {phase}: {word}, {wrong} wrong, worst {worst_s:.2f} s\n")
    return wrong


def _command(
    *,
    base: Annotated[str, typer.Option(help="Address of the server.")],
    model: Annotated[str, typer.Option(help="The id that requests name.")],
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
    phase: Annotated[Phase, typer.Option(help="When the client leaves.")] = Phase.STREAM,
    times: Annotated[int, typer.Option("--n", min=1, help="Departures.")] = 5,
    limit: Annotated[float, typer.Option(help="Bound on the request after, s.")] = 5.0,
    prompt_words: Annotated[int, typer.Option(help="Length of the long prompt.")] = 600,
    metrics: Annotated[str | None, typer.Option(help="Prometheus page to read after.")] = None,
    gauge: Annotated[str, typer.Option(help="Pattern of the lines to show.")] = "^.*running.*$",
) -> None:
    """Leave requests and see whether the next one is served soon."""
    target = Target(base=base, model=model, key=key)
    wrong = run(target, phase, times=times, limit_s=limit, prompt_words=prompt_words)
    if metrics is not None:
        time.sleep(_SETTLE_S)
        sys.stdout.write("\n".join(gauges(metrics, gauge)[:8]) + "\n")
    raise typer.Exit(code=1 if wrong else 0)


if __name__ == "__main__":
    typer.run(_command)
