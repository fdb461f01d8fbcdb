"""Attempts on an engine, for callers that wait in an event loop and for those that block."""

import asyncio
import queue
from collections.abc import AsyncGenerator
from contextlib import suppress

from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import GenerateRequest, Progress, TokenChunk
from headrace_replicas.engine.commands import stream_key
from headrace_replicas.engine.steps import Engine


async def attempt(engine: Engine, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    """Run one attempt; the first chunk comes at once and says that the engine has it.

    Raises:
        HeadraceError: Whatever the engine answers instead of tokens.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[TokenChunk | HeadraceError] = asyncio.Queue()

    def sink(item: TokenChunk | HeadraceError) -> None:
        # A closed loop has nobody left to tell; the engine must not fail over that.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    engine.submit(request, sink)
    try:
        yield _accepted(engine, request)
        while True:
            item = await arrived.get()
            if isinstance(item, HeadraceError):
                raise item
            yield item
            if item.finish_reason is not None:
                return
    finally:
        engine.cancel(stream_key(request))


def _accepted(engine: Engine, request: GenerateRequest) -> TokenChunk:
    return TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        position=len(request.output_ids),
        progress=Progress(
            engine_steps=engine.status.engine_steps,
            prefill_done_tokens=0,
            prefill_total_tokens=len(request.prompt_ids) + len(request.output_ids),
        ),
    )


def answer_now(engine: Engine, request: GenerateRequest) -> tuple[int, ...]:
    """Run one attempt and block until its last token.

    Raises:
        HeadraceError: Whatever the engine answers instead of tokens.
    """
    arrived: queue.SimpleQueue[TokenChunk | HeadraceError] = queue.SimpleQueue()
    engine.submit(request, arrived.put)
    token_ids: list[int] = []
    while True:
        item = arrived.get()
        if isinstance(item, HeadraceError):
            raise item
        token_ids.extend(item.ids)
        if item.finish_reason is not None:
            return tuple(token_ids)
