"""Prompts of very different length, alone and all at once (G05), on a random-weight checkpoint.

Greedy texts must be equal. A near-tie may flip by float order: run with another seed of the
checkpoint before believing in a fault. `python -m tests.cases.procedures.g05_batch_vs_single
BASE MODEL`.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from tests.cases.http_call import Target
from tests.cases.procedures.chat import ask, chat_body, user

PROMPTS = ("a", "tell me", "x " * 20, "long " * 120, "mid " * 50, "z", "q " * 200, "end")


def answer_to(target: Target, prompt: str) -> tuple[int | None, str]:
    """Status and text of one greedy answer."""
    body = chat_body(target, [user(prompt)], max_tokens=24)
    answer, view = ask(target, body, timeout_s=300.0)
    return answer.status, view.text


def differences(target: Target, *, rounds: int) -> list[str]:
    """One line for each answer that came out differently in a batch."""
    alone = [answer_to(target, prompt) for prompt in PROMPTS]
    lines = []
    if len(set(alone)) == 1:
        lines.append("every prompt has the same answer: serve a checkpoint of random weights")
    for number in range(rounds):
        with ThreadPoolExecutor(max_workers=len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: answer_to(target, prompt), PROMPTS))
        lines += [
            f"round {number}, prompt {index}: alone {one}, together {other}"
            for index, (one, other) in enumerate(zip(alone, together, strict=True))
            if one != other
        ]
    return lines


def _command(
    base: str,
    model: str,
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Batches to compare.")] = 3,
) -> None:
    """Compare answers given alone to answers given in a batch."""
    lines = differences(Target(base=base, model=model, key=key), rounds=rounds)
    figure = f"batch: {'BAD' if lines else 'clean'}, {len(lines)} differences in {rounds} rounds"
    sys.stdout.write("\n".join([*lines, figure]) + "\n")
    raise typer.Exit(code=1 if lines else 0)


if __name__ == "__main__":
    typer.run(_command)
