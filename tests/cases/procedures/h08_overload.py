"""Ten times more clients than slots, some of whom leave early (H08, R16).

Every request ends within the deadline with 200, or with 429 or 503 that says Retry-After; after
the storm a short request is served. `python -m tests.cases.procedures.h08_overload BASE MODEL`.
"""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from tests.cases.http_call import Answer, Target
from tests.cases.procedures.chat import ask, chat_body, user

_SHED = frozenset({429, 503})
_ALLOWED = frozenset({"200", "429", "503", "left early"})
_LEAVING_EVERY = 5
_LEAVING_S = 1.0


def end_of(answer: Answer, *, leaves: bool) -> str:
    """Names the end of one request; only the names in `_ALLOWED` are right."""
    if answer.status is None:
        return "left early" if leaves else f"no answer: {answer.failure}"
    if answer.status in _SHED and "retry-after" not in answer.headers:
        return f"{answer.status} without Retry-After"
    return str(answer.status)


def storm(target: Target, *, clients: int, deadline_s: float) -> Counter[str]:
    """Sends all requests at once; every fifth client leaves after a second."""

    def one(number: int) -> str:
        leaves = number % _LEAVING_EVERY == 0
        messages = [user(f"[[count]] {number}")]
        body = chat_body(target, messages, max_tokens=120, stream=bool(number % 2))
        answer, _ = ask(target, body, timeout_s=_LEAVING_S if leaves else deadline_s)
        return end_of(answer, leaves=leaves)

    with ThreadPoolExecutor(max_workers=clients) as pool:
        return Counter(pool.map(one, range(clients)))


def _command(
    base: str,
    model: str,
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 60,
    deadline: Annotated[float, typer.Option(help="Bound on each request, s.")] = 120.0,
) -> None:
    """Overload a server and see how every request ends."""
    target = Target(base=base, model=model, key=key)
    ends = storm(target, clients=clients, deadline_s=deadline)
    body = chat_body(target, [user("[[hello]]")], max_tokens=20)
    after, _ = ask(target, body, timeout_s=deadline)
    is_bad = after.status != 200 or not set(ends) <= _ALLOWED
    sys.stdout.write(
        f"overload: {'BAD' if is_bad else 'clean'}, {dict(ends)}, then {after.status} in "
        f"{after.total_s:.1f} s\n"
    )
    raise typer.Exit(code=1 if is_bad else 0)


if __name__ == "__main__":
    typer.run(_command)
