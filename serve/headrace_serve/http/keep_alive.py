"""Signs of life on a stream whose source is silent, by the wall clock."""

import asyncio
from collections.abc import AsyncGenerator


async def with_keep_alive(
    source: AsyncGenerator[bytes, None], period_s: float, sign: bytes
) -> AsyncGenerator[bytes, None]:
    """Pass `source` on, and `sign` whenever it has been silent for `period_s`.

    Whatever holds the source up, a long prefill or a move to another replica, the signs go on,
    because they hang on a timer and not on the source. They end with the source.
    """
    arriving = asyncio.ensure_future(anext(source, None))
    try:
        while True:
            done, _pending = await asyncio.wait({arriving}, timeout=period_s)
            if not done:
                yield sign
                continue
            item = arriving.result()
            if item is None:
                return
            yield item
            arriving = asyncio.ensure_future(anext(source, None))
    finally:
        if not arriving.done():
            arriving.cancel()
            # Cancelled again while it waits here, the source still unwinds in its own task.
            await asyncio.wait({arriving})
        await source.aclose()
