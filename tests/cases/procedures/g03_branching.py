"""Warm answers equal cold ones (G02, G03).

Takes two servers of the same random-weight checkpoint: one without a prefix cache, one with.
Conversations branch, come back, and are pushed out of the cache; every answer must be the same.
`python -m tests.cases.procedures.g03_branching COLD_URL WARM_URL MODEL`.
"""

import sys
from typing import Annotated

import typer

from tests.cases.http_call import Target
from tests.cases.procedures.chat import ask, assistant, chat_body, user

_SYSTEM = {"role": "system", "content": "You are terse. " * 20}
_A1 = [user("alpha")]
_A2 = [user("alpha"), assistant("one"), user("more")]

TURNS: tuple[tuple[str, list[dict[str, str]]], ...] = (
    ("A1", _A1),
    ("B1", [user("beta")]),
    ("A1 again", _A1),
    ("A2", _A2),
    ("A2, other branch", [user("alpha"), assistant("two"), user("more")]),
    ("B2", [user("beta"), assistant("one"), user("more")]),
    ("A2 again", _A2),
    ("prefix of A1", [user("alph")]),
    ("A1 and one letter", [user("alphab")]),
    *((f"filler {n}", [user(f"filler {n} " * 60)]) for n in range(6)),
    ("A2 after eviction", _A2),
    ("A1 after eviction", _A1),
)


def answer_to(target: Target, turns: list[dict[str, str]]) -> tuple[int | None, str]:
    """Status and text of one greedy answer."""
    body = chat_body(target, [_SYSTEM, *turns], max_tokens=24)
    answer, view = ask(target, body, timeout_s=300.0)
    return answer.status, view.text


def differences(cold: Target, warm: Target) -> list[str]:
    """One line for each turn that the two servers answer differently."""
    lines = []
    for name, turns in TURNS:
        expected, got = answer_to(cold, turns), answer_to(warm, turns)
        if expected != got:
            lines.append(f"{name}: cold {expected}, warm {got}")
    return lines


def _command(
    cold_url: str,
    warm_url: str,
    model: str,
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
) -> None:
    """Compare a server without a prefix cache to one with it."""
    lines = differences(
        Target(base=cold_url, model=model, key=key), Target(base=warm_url, model=model, key=key)
    )
    word = "BAD" if lines else "clean"
    figure = f"branching: {word}, {len(lines)} of {len(TURNS)} answers differ"
    sys.stdout.write("\n".join([*lines, figure]) + "\n")
    raise typer.Exit(code=1 if lines else 0)


if __name__ == "__main__":
    typer.run(_command)
