"""A small HTTP client for the demo: streams one answer, and asks the gateway about the fleet."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from headrace_replicas.contract.errors import LaunchError

# Longer than any pause that the demo's fleet can make before a request gets an error.
_SILENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A streamed answer as a client has it in the end.

    Attributes:
        text: All content.
        finish_reason: `stop` or `length`.
        attempts: Replicas that worked on it.
        tokens: Output tokens by the server's count.
    """

    text: str
    finish_reason: str
    attempts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A replica as the gateway describes it."""

    replica_id: str
    state: str
    pid: int
    running: int


class StoryClient:
    """Talks to one gateway.

    Args:
        endpoint: Its base URL.
    """

    def __init__(self, endpoint: str) -> None:
        self._http = httpx.AsyncClient(base_url=endpoint, timeout=_SILENCE_S, trust_env=False)

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def tell(self, body: Mapping[str, Any], on_text: Callable[[str], None]) -> Story:
        """Stream one chat completion to its end.

        Args:
            body: The request without the fields that make it a stream.
            on_text: Hears each piece of content as it comes.

        Raises:
            LaunchError: The stream carried an error or ended without a finish reason.
        """
        options = {"include_usage": True, "include_headrace": True}
        streamed = {**body, "stream": True, "stream_options": options}
        heard: list[str] = []
        chunks: list[Mapping[str, Any]] = []
        async for chunk in self._chunks(streamed):
            chunks.append(chunk)
            text = content_of(chunk)
            if text:
                heard.append(text)
                on_text(text)
        return story_of("".join(heard), chunks)

    async def _chunks(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The JSON events of one streamed answer."""
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise LaunchError(f"the gateway answered {(await answer.aread()).decode()}")
                async for line in answer.aiter_lines():
                    chunk = parse_event(line)
                    if chunk is not None:
                        yield chunk
        except httpx.HTTPError as error:
            raise LaunchError(f"the stream was cut: {error!r}") from error

    async def model(self) -> str:
        """The id of the served model."""
        models: list[dict[str, Any]] = (await self._json("/v1/models"))["data"]
        return str(models[0]["id"])

    async def workers(self) -> tuple[Worker, ...]:
        """The replicas that have told the gateway about themselves."""
        return workers_of((await self._json("/fleet/v1/replicas"))["replicas"])

    async def incidents(self) -> list[tuple[Mapping[str, Any], Sequence[str]]]:
        """All incidents, oldest first: the record and its lines for a person."""
        body = await self._json("/fleet/v1/incidents")
        return list(zip(body["incidents"], body["summaries"], strict=True))

    async def _json(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(path)
        except httpx.HTTPError as error:
            raise LaunchError(f"{path} did not answer: {error!r}") from error
        if answer.status_code != httpx.codes.OK:
            raise LaunchError(f"{path} answered {answer.status_code}: {answer.text[:200]}")
        parsed: dict[str, Any] = answer.json()
        return parsed


def parse_event(line: str) -> Mapping[str, Any] | None:
    """The JSON of a `data:` line; None for comments, blank lines and the end marker.

    Raises:
        LaunchError: The event is an error.
    """
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    chunk: Mapping[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise LaunchError(f"the stream ended with an error: {chunk['error'].get('message')}")
    return chunk


def content_of(chunk: Mapping[str, Any]) -> str:
    """The content of all choices in a chunk."""
    return "".join(
        choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", [])
    )


def story_of(text: str, chunks: Sequence[Mapping[str, Any]]) -> Story:
    """What the chunks say of the whole.

    Raises:
        LaunchError: The answer has no finish reason: it is not whole.
    """
    reasons = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk.get("choices", [])
        if choice.get("finish_reason")
    ]
    if len(reasons) != 1:
        raise LaunchError(f"the stream ended with {len(reasons)} finish reasons instead of one")
    moves: Mapping[str, Any] = next(
        (chunk["headrace"] for chunk in chunks if chunk.get("headrace")), {}
    )
    usage: Mapping[str, Any] = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), {})
    return Story(
        text=text,
        finish_reason=reasons[0],
        attempts=int(moves.get("attempts", 1)),
        tokens=usage.get("completion_tokens", 0),
    )


def workers_of(replicas: Sequence[Mapping[str, Any]]) -> tuple[Worker, ...]:
    """The replicas with a snapshot; one that has just come has none yet."""
    return tuple(
        Worker(
            replica_id=entry["replica_id"],
            state=entry["state"],
            pid=entry["snapshot"]["pid"],
            running=entry["snapshot"]["running"],
        )
        for entry in replicas
        if entry.get("snapshot")
    )
