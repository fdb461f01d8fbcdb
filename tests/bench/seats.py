"""Processes that take turns: each holds one loaded model, so that its memory is its own.

Turns within one run are what makes speeds comparable on a machine that does other things too.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

SubjectT = TypeVar("SubjectT")
SubjectT_contra = TypeVar("SubjectT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)
ResultT = TypeVar("ResultT")


class Task(Protocol[SubjectT_contra, ResultT_co]):
    """Something to do with what sits in a seat; it and its result can be pickled."""

    def run(self, subject: SubjectT_contra, /) -> ResultT_co:
        """Do it, in the seat's process."""
        ...


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong in a seat, as text."""

    report: str


class Seat(Generic[SubjectT]):
    """A process with a subject of its own, which does one task at a time.

    Args:
        make: Makes the subject, in the process; can be pickled.

    Raises:
        RuntimeError: The subject could not be made; what went wrong there is in the message.
    """

    def __init__(self, make: Callable[[], SubjectT]) -> None:
        # Forked from a process without MLX, whose threads do not survive a fork; but with what
        # takes seconds to import.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_sit, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def do(self, task: Task[SubjectT, ResultT]) -> ResultT:
        """Have a task done, and wait for its result.

        Raises:
            RuntimeError: The task failed; what went wrong there is in the message.
        """
        self._connection.send(task)
        result: ResultT = self._receive()
        return result

    def _receive(self) -> Any:
        try:
            result = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"a process of the bench ended with exit code {self._process.exitcode}: "
                "is there enough memory?"
            ) from None
        if isinstance(result, _Failure):
            raise RuntimeError(f"in a process of the bench:\n{result.report}")  # noqa: TRY004 - not a type error
        return result

    def __enter__(self) -> "Seat[SubjectT]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _sit(connection: Connection, make: Callable[[], Any]) -> None:
    try:
        subject = make()
        connection.send(None)
        while True:
            connection.send(connection.recv().run(subject))
    except EOFError:  # the other side has left
        return
    except Exception:  # noqa: BLE001 - told to the other side, which raises it
        connection.send(_Failure(traceback.format_exc()))
