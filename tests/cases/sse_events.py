"""The outer form of an event stream: UTF-8, blank lines between events, known field names."""

from collections.abc import Iterator
from dataclasses import dataclass

_SILENT_FIELDS = frozenset({"id", "retry"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event that carries data; `name` is its `event:` field."""

    name: str | None
    data: str


def events(body: bytes, problems: list[str]) -> Iterator[Event]:
    """Yields the events of a whole body; comments (`: keep-alive`) vanish.

    Args:
        body: Everything after the headers.
        problems: Gets one sentence for each breach of form.
    """
    text = _decoded(body, problems).replace("\r\n", "\n")
    if text and not text.endswith("\n\n"):
        problems.append("body does not end with a blank line")
    for block in text.split("\n\n"):
        event = _event(block, problems)
        if event is not None:
            yield event


def _decoded(body: bytes, problems: list[str]) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as failure:
        problems.append(f"not UTF-8: {failure}")
        return body.decode("utf-8", "replace")


def _event(block: str, problems: list[str]) -> Event | None:
    name: str | None = None
    data: list[str] = []
    for line in block.split("\n"):
        if not line or line.startswith(":"):
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field not in _SILENT_FIELDS:
            problems.append(f"line is no SSE field: {line[:60]!r}")
    return Event(name=name, data="\n".join(data)) if data else None
