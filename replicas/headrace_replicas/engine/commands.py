"""What others ask of the engine thread."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.engine.output_stream import Sink

StreamKey = tuple[str, int, int]


def stream_key(request: GenerateRequest) -> StreamKey:
    """What tells the attempts inside one engine apart."""
    return (request.request_id, request.choice, request.attempt)


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request; its sink hears of it."""

    request: GenerateRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop an attempt."""

    key: StreamKey


@dataclass(frozen=True, slots=True)
class Act:
    """Do something between two steps."""

    action: Callable[[], object]
    done: Future[None]


class Stop:
    """End after the current step."""
