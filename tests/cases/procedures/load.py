"""Steady load with a ledger (H10, R04, R06, R12, R15, U01, U03).

Run it, do the damage (`--at` runs a command at a second of the run: kill a replica, drain, roll
out), read the ledger. `python -m tests.cases.procedures.load --help`.
"""

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from tests.cases.http_call import Target
from tests.cases.procedures.chat import SCRIPT_TEXTS, ask, chat_body, user
from tests.cases.procedures.ledger import Ledger, end_of

_MAX_TOKENS = 120  # the longest script has 82


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send.

    Attributes:
        duration_s: New requests start for this long, seconds; each client sends at least one.
        concurrency: Clients that ask one request after the other.
        script: Name of the scripted text (a key of `SCRIPT_TEXTS`).
        deadline_s: Seconds without a byte after which a request counts as a hang.
        abort_ratio: Share of requests whose client leaves in the middle.
        pad_words: A prompt gets up to this many words more.
        seed: Of the order of events; the same seed sends the same requests.
    """

    duration_s: float = 30.0
    concurrency: int = 4
    script: str = "count"
    stream: bool = True
    deadline_s: float = 60.0
    abort_ratio: float = 0.0
    pad_words: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A shell command at a second of the run."""

    at_s: float
    command: str


def parse_damage(text: str) -> Damage:
    """Reads `SECONDS:COMMAND`.

    Raises:
        ValueError: The text has another form.
    """
    written = re.fullmatch(r"(\d+(?:\.\d+)?):(.*\S.*)", text, re.DOTALL)
    if written is None:
        raise ValueError(f"damage {text!r}: write SECONDS:COMMAND, such as 10:'kill -9 123'")
    return Damage(at_s=float(written[1]), command=written[2])


def run_load(target: Target, load: LoadPlan, damages: Sequence[Damage] = ()) -> Ledger:
    """Sends the load, does the damage, and returns when the last request has ended.

    Args:
        target: A server of the scripted checkpoint.
        load: What to send.
        damages: What to do to the server meanwhile.
    """
    ledger, lock = Ledger(), threading.Lock()
    started_s = time.monotonic()

    def client(number: int) -> None:
        draw = random.Random(f"{load.seed}/{number}")  # noqa: S311 - load, not secrets
        _one_request(target, load, draw, ledger, lock, started_s)
        while time.monotonic() - started_s < load.duration_s:
            _one_request(target, load, draw, ledger, lock, started_s)

    clients = [threading.Thread(target=client, args=(n,)) for n in range(load.concurrency)]
    for thread in clients:
        thread.start()
    for damage in sorted(damages, key=lambda damage: damage.at_s):
        time.sleep(max(0.0, started_s + damage.at_s - time.monotonic()))
        status = subprocess.call(["/bin/sh", "-c", damage.command])
        sys.stdout.write(f"{damage.at_s:.1f} s: {damage.command} -> {status}\n")
    for thread in clients:
        thread.join()
    return ledger


def _one_request(
    target: Target,
    load: LoadPlan,
    draw: random.Random,
    ledger: Ledger,
    lock: threading.Lock,
    started_s: float,
) -> None:
    padding = "pad " * draw.randint(0, load.pad_words)
    message = user(f"{padding}[[{load.script}]] {draw.random()}")
    leaves = draw.random() < load.abort_ratio
    answer, view = ask(
        target,
        chat_body(target, [message], max_tokens=_MAX_TOKENS, stream=load.stream),
        timeout_s=load.deadline_s,
        abort_after=draw.randint(1, 3000) if leaves else None,
    )
    end = end_of(answer, view, wanted=SCRIPT_TEXTS[load.script], left=leaves)
    with lock:
        ledger.record(end, answer, view, at_s=time.monotonic() - started_s)


def _command(
    *,
    base: Annotated[str, typer.Option(help="Address of the server.")],
    model: Annotated[str, typer.Option(help="The id that requests name.")],
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of the run.")] = 30.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients.")] = 4,
    script: Annotated[str, typer.Option(help=f"One of {', '.join(SCRIPT_TEXTS)}.")] = "count",
    stream: Annotated[bool, typer.Option(help="Ask for event streams.")] = True,
    deadline: Annotated[float, typer.Option(help="Silence that counts as a hang, s.")] = 60.0,
    at: Annotated[list[str] | None, typer.Option(help="SECONDS:COMMAND, repeatable.")] = None,
    abort_ratio: Annotated[float, typer.Option(help="Share of clients that leave.")] = 0.0,
    pad_words: Annotated[int, typer.Option(min=0, help="Extra prompt words at most.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the order of events.")] = 0,
) -> None:
    """Send steady load and keep a ledger of how every request ended."""
    load = LoadPlan(
        duration_s=seconds,
        concurrency=concurrency,
        script=script,
        stream=stream,
        deadline_s=deadline,
        abort_ratio=abort_ratio,
        pad_words=pad_words,
        seed=seed,
    )
    damages = [parse_damage(text) for text in at or ()]
    ledger = run_load(Target(base=base, model=model, key=key), load, damages)
    sys.stdout.write("\n".join(ledger.lines()) + "\n")
    raise typer.Exit(code=1 if ledger.forbidden_count else 0)


if __name__ == "__main__":
    typer.run(_command)
