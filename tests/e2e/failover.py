"""`make failover`: kills and freezes engines under requests over HTTP, and prints one table.

The rows are the promises of the README: the same bytes after a kill at any point, nothing lost
under load, and a frozen engine costs a pause. Ends with its figure and exits non-zero when a
request was lost, changed or cut.
"""

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.stack import Stack

STORY = "Tell me a story about a fox named Vera."
CUTS = (1, 5, 20, 60)
LOAD_REQUESTS = 50
LOAD_CONCURRENCY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was done to the fleet.
        good: Requests that ended whole with the right bytes.
        total: Requests sent.
        pause_s: Longest pause of a client between two pieces of content; None when not streamed.
        note: What else is worth saying.
    """

    what: str
    good: int
    total: int
    pause_s: float | None = None
    note: str = ""


def rows(stack: Stack) -> Iterator[Row]:
    """All runs, one after the other, on a fleet of two engines."""
    undisturbed = stack.stream(stack.body(STORY))
    assert undisturbed.whole, undisturbed
    for number in (signal.SIGKILL, signal.SIGABRT):
        for cut in CUTS if number is signal.SIGKILL else (20,):
            yield kill_streamed(stack, undisturbed.text, cut, number)
    for cut in CUTS:
        yield kill_unstreamed(stack, undisturbed.text, cut)
    yield kill_under_load(stack, LOAD_REQUESTS, LOAD_CONCURRENCY)
    yield freeze_streamed(stack, undisturbed.text, 20)
    yield freeze_under_load(stack)


def kill_streamed(stack: Stack, expected: str, cut: int, number: signal.Signals) -> Row:
    """Kill the engine that streams, once the client has `cut` tokens."""
    stack.wait_for_ready(2)
    answer = stack.stream(
        stack.body(STORY), once(cut, lambda: stack.signal_replica(stack.holder(), number))
    )
    good = answer.whole and answer.text == expected and answer.attempts == 2
    what = f"{number.name} after {cut} tokens, streamed"
    return Row(what=what, good=int(good), total=1, pause_s=answer.worst_gap_s)


def kill_unstreamed(stack: Stack, expected: str, cut: int) -> Row:
    """Kill the engine of a request that is not streamed, once it has made `cut` steps of it."""
    stack.wait_for_ready(2)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(stack.whole, stack.body(STORY))
        holder = _await(lambda: [one for one in stack.ready() if one["in_flight"]])[0]
        # No token is seen from outside: the pace of an engine alone, 10 ms a token and more, has
        # to do. Where the cut falls exactly is the business of the engine's own tests.
        time.sleep(cut * 0.01)
        stack.signal_replica(holder, signal.SIGKILL)
        response = answering.result()
    answer = response.json()["choices"][0]
    moved = response.headers["x-headrace-attempts"]
    good = answer["message"]["content"] == expected and answer["finish_reason"] == "length"
    what = f"SIGKILL {cut * 10} ms into it, not streamed"
    return Row(what=what, good=int(good), total=1, note=f"{moved} attempts")


def kill_under_load(stack: Stack, requests: int, concurrency: int) -> Row:
    """Kill one of two engines while many requests stream."""
    stack.wait_for_ready(2)
    victim = stack.ready()[0]
    return _load(stack, requests, concurrency, victim, signal.SIGKILL, "SIGKILL of one of two")


def freeze_streamed(stack: Stack, expected: str, cut: int) -> Row:
    """Freeze the engine that streams; the pause is the time from the stop to the next token."""
    stack.wait_for_ready(2)
    answer = stack.stream(
        stack.body(STORY),
        once(cut, lambda: stack.signal_replica(stack.holder(), signal.SIGSTOP)),
    )
    good = answer.whole and answer.text == expected and answer.attempts == 2
    what = f"SIGSTOP after {cut} tokens, streamed"
    return Row(what=what, good=int(good), total=1, pause_s=answer.worst_gap_s)


def freeze_under_load(stack: Stack) -> Row:
    """Freeze one of two engines while many requests stream."""
    stack.wait_for_ready(2)
    victim = stack.ready()[0]
    return _load(stack, 20, 4, victim, signal.SIGSTOP, "SIGSTOP of one of two")


def _load(
    stack: Stack,
    requests: int,
    concurrency: int,
    victim: dict[str, object],
    number: signal.Signals,
    what: str,
) -> Row:
    """Each request has its own seed; its bytes must equal those of a second, undisturbed run."""
    bodies = [stack.body(STORY, seed=seed, max_tokens=60) for seed in range(requests)]
    begun = threading.Semaphore(0)

    def run(body: dict[str, object]) -> tuple[str, bool, float, int]:
        begun.release()
        answer = stack.stream(body)
        return answer.text, answer.whole, answer.worst_gap_s, answer.attempts

    with ThreadPoolExecutor(concurrency) as pool:
        disturbed = [pool.submit(run, body) for body in bodies]
        for _ in range(concurrency + 2):
            begun.acquire()
        stack.signal_replica(victim, number)
        results = [future.result() for future in disturbed]
    stack.wait_for_ready(2, without=frozenset({str(victim["replica_id"])}))
    with ThreadPoolExecutor(concurrency) as pool:
        again = [future.result() for future in [pool.submit(run, body) for body in bodies]]
    good = sum(
        whole and text == other[0]
        for (text, whole, _gap, _moves), other in zip(results, again, strict=True)
    )
    completed = sum(whole for _text, whole, _gap, _moves in results)
    moved = sum(moves > 1 for _text, _whole, _gap, moves in results)
    law = f"admitted {requests} = completed {completed} + failed {requests - completed} + 0 gone"
    return Row(
        what=f"{what}, {requests} requests, {concurrency} at a time",
        good=good,
        total=requests,
        pause_s=max(gap for _text, _whole, gap, _moves in results),
        note=f"{moved} moved; {law}",
    )


def once(tokens: int, act: Callable[[], object]) -> Callable[[int], None]:
    """A listener that acts at the first call with that many tokens."""
    acted = False

    def listen(count: int) -> None:
        nonlocal acted
        if count >= tokens and not acted:
            acted = True
            act()

    return listen


def _await(look: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    give_up_s = time.monotonic() + 30
    while not (found := look()):
        if time.monotonic() > give_up_s:
            raise AssertionError("nothing came")
    return found


def main() -> int:
    """Run everything and print the table."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-failover-"))
    write = sys.stdout.write
    write(f"{'what':<58} {'same bytes':>10} {'worst pause':>12}  note\n")
    good = total = 0
    with Stack.running(folder) as stack:
        for row in rows(stack):
            pause = "" if row.pause_s is None else f"{row.pause_s:.2f} s"
            write(f"{row.what:<58} {row.good:>4} of {row.total:<3} {pause:>12}  {row.note}\n")
            sys.stdout.flush()
            good, total = good + row.good, total + row.total
        opened = stack.get("/fleet/v1/incidents")["incidents"]
    write(f"incidents: {len(opened)}\n")
    write(f"failover: {good} of {total} requests whole and unchanged\n")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
