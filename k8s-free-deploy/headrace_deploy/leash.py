"""A process that holds another on a leash: when its owner goes, however it goes, so does all of it.

The owner starts `python -m headrace_deploy.leash -- COMMAND...` in a session of its own and keeps
the other end of its standard input. When that closes (the owner is done, or was killed with
SIGKILL), on SIGTERM, or when the command ends, the leash ends the command and every process of
the session, and removes the folder that it was told to.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_deploy.session import Member, kill_all, members
from headrace_replicas.contract.clock import SystemClock

# What SIGKILL does not end in this time hangs in the kernel.
_KILL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeashOrder:
    """What a leash is told.

    Attributes:
        command: The command to hold.
        grace_s: Seconds that it gets to end by itself after SIGTERM.
        remove: Folder to remove at the end, or None.
    """

    command: tuple[str, ...]
    grace_s: float
    remove: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How it came to the end.

    Attributes:
        status: The command's exit status, negative when a signal ended it.
        released: Whether the owner let go; otherwise the command ended by itself.
        known: What the session held at the last moment before.
    """

    status: int
    released: bool
    known: frozenset[Member]


def order_arguments(order: LeashOrder) -> list[str]:
    """The command line that starts a leash with this order.

    `-P` keeps Python from importing what happens to lie in the working directory.
    """
    remove = [] if order.remove is None else [f"--remove={order.remove}"]
    options = [f"--grace-s={order.grace_s}", *remove]
    return [sys.executable, "-P", "-m", "headrace_deploy.leash", *options, "--", *order.command]


def parse_order(arguments: Sequence[str]) -> LeashOrder:
    """The order in a command line."""
    parser = argparse.ArgumentParser(prog="headrace_deploy.leash", description=__doc__)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--remove", type=Path)
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args(arguments)
    return LeashOrder(command=tuple(parsed.command), grace_s=parsed.grace_s, remove=parsed.remove)


async def hold(order: LeashOrder) -> Ending:
    """Run the command until it ends or must end."""
    loop = asyncio.get_running_loop()
    let_go = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, let_go.set)
    loop.add_reader(sys.stdin.fileno(), let_go.set)
    process = await asyncio.create_subprocess_exec(*order.command, stdin=asyncio.subprocess.DEVNULL)
    ended = asyncio.create_task(process.wait())
    released = asyncio.create_task(let_go.wait())
    await asyncio.wait({ended, released}, return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(sys.stdin.fileno())
    known = members(os.getsid(0))
    if not ended.done():
        process.terminate()
        await asyncio.wait({ended}, timeout=order.grace_s)
    return Ending(
        status=ended.result() if ended.done() else -signal.SIGKILL,
        released=let_go.is_set(),
        known=known,
    )


def clean_up(order: LeashOrder, ending: Ending) -> None:
    """End everything that is left of this session but this process, and remove the folder.

    A folder whose command ended by itself stays for the owner, who wants to read why.
    """
    clock = SystemClock()
    give_up_s = clock.monotonic_s() + _KILL_S
    for one in kill_all(os.getsid(0), ending.known, os.getpid(), give_up_s, clock):
        sys.stderr.write(f"leash: process {one.pid} does not end\n")
    if order.remove is not None and ending.released:
        shutil.rmtree(order.remove, ignore_errors=True)


def main() -> None:
    """Hold what the command line says, in the session that the owner made."""
    order = parse_order(sys.argv[1:])
    ending = asyncio.run(hold(order))
    clean_up(order, ending)
    sys.exit(min(abs(ending.status), 255))


if __name__ == "__main__":
    main()
