"""A client that gives up on content and sends the same long prompt again (S02).

With a prefill slower than the client's patience the attempts must still add up: one of them is
answered. `python -m tests.cases.procedures.s02_retry_livelock BASE MODEL`.
"""

import sys
import time
from typing import Annotated

import typer

from tests.cases.http_call import Target
from tests.cases.procedures.chat import chat_body, user
from tests.cases.procedures.raw_post import post

_CONTENT = b'"content"'
_COMMENT = b"\n: "
_AFTER_CONTENT_S = 30.0
_LEAST_WAIT_S = 0.05


def attempt(target: Target, *, patience_s: float, words: int) -> tuple[bool, int]:
    """Asks once; comment lines do not stretch the patience.

    Returns:
        Whether the stream came to its end, and how many comment lines were seen.
    """
    message = user("word " * words + "[[fence]]")
    body = chat_body(target, [message], max_tokens=30, stream=True)
    started_s = time.monotonic()
    received = b""
    with post(target, body, timeout_s=patience_s) as connection:
        while b"[DONE]" not in received:
            left_s = patience_s - (time.monotonic() - started_s)
            has_content = _CONTENT in received
            if not has_content and left_s <= 0:
                return False, received.count(_COMMENT)
            connection.settimeout(_AFTER_CONTENT_S if has_content else max(_LEAST_WAIT_S, left_s))
            try:
                part = connection.recv(4096)
            except TimeoutError:
                return False, received.count(_COMMENT)
            if not part:
                break
            received += part
    return b"[DONE]" in received, received.count(_COMMENT)


def _command(
    base: str,
    model: str,
    key: Annotated[str | None, typer.Option(help="The API key.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds without content.")] = 3.0,
    words: Annotated[int, typer.Option(help="Length of the prompt.")] = 700,
    attempts: Annotated[int, typer.Option(min=1, help="How often to ask.")] = 12,
) -> None:
    """Ask the same long prompt until it is answered."""
    target = Target(base=base, model=model, key=key)
    for number in range(attempts):
        is_answered, comments = attempt(target, patience_s=patience, words=words)
        sys.stdout.write(f"attempt {number}: answered {is_answered}, {comments} comment lines\n")
        if is_answered:
            sys.stdout.write(f"retry: clean, answered at attempt {number + 1} of {attempts}\n")
            return
    sys.stdout.write(f"retry: BAD, no answer in {attempts} attempts\n")
    raise typer.Exit(code=1)


if __name__ == "__main__":
    typer.run(_command)
