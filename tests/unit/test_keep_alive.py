"""Signs of life on a silent stream, on virtual time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from headrace_serve.http.keep_alive import with_keep_alive
from tests.support.virtual_time import run

SIGN = b": here\n\n"
PERIOD_S = 5.0


class Source:
    """Says one byte after each pause; then ends, or fails. Knows whether it was closed."""

    def __init__(self, *pauses: float, error: Exception | None = None) -> None:
        self._pauses = pauses
        self._error = error
        self.open = False

    async def items(self) -> AsyncGenerator[bytes, None]:
        self.open = True
        try:
            for pause_s in self._pauses:
                await asyncio.sleep(pause_s)
                yield b"x"
            if self._error is not None:
                raise self._error
        finally:
            try:
                await asyncio.sleep(0.01)  # closing takes a moment
            finally:
                self.open = False


async def timed(stream: AsyncGenerator[bytes, None]) -> list[tuple[float, bytes]]:
    """Everything that comes, with the second at which it does."""
    loop = asyncio.get_running_loop()
    async with aclosing(stream):
        return [(round(loop.time(), 3), item) async for item in stream]


def heard(source: Source) -> list[tuple[float, bytes]]:
    return run(timed(with_keep_alive(source.items(), PERIOD_S, SIGN)))


def test_a_stream_that_talks_gets_no_signs() -> None:
    assert heard(Source(4.9, 4.9, 0)) == [(4.9, b"x"), (9.8, b"x"), (9.8, b"x")]


def test_a_silent_stream_gets_a_sign_every_period() -> None:
    assert heard(Source(12, 6)) == [
        (5, SIGN),
        (10, SIGN),
        (12, b"x"),
        (17, SIGN),
        (18, b"x"),
    ]


def test_nothing_follows_the_end() -> None:
    assert heard(Source()) == []


def test_signs_do_not_hold_up_what_comes_meanwhile() -> None:
    """A reader that takes its time over a sign gets the waiting item right after it."""

    async def story() -> list[bytes]:
        seen = []
        async with aclosing(with_keep_alive(Source(6).items(), PERIOD_S, SIGN)) as stream:
            async for item in stream:
                seen.append(item)
                await asyncio.sleep(30)
        return seen

    assert run(story()) == [SIGN, b"x"]


def test_an_error_of_the_source_reaches_the_reader() -> None:
    source = Source(1, error=ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        heard(source)
    assert not source.open


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_reader_that_stops_closes_the_source(count: int) -> None:
    """After an item, after a sign, and while the next item is on its way."""

    async def story() -> None:
        async with aclosing(with_keep_alive(source.items(), PERIOD_S, SIGN)) as stream:
            for _ in range(count):
                await anext(stream)

    source = Source(1, 7, 100)
    run(story())
    assert not source.open


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.0, 5.5, 7.2])
def test_a_cancelled_reader_closes_the_source(at_s: float, times: int) -> None:
    """Also when the cancellation is repeated while the source still closes."""

    async def story() -> None:
        reading = asyncio.create_task(timed(with_keep_alive(source.items(), PERIOD_S, SIGN)))
        await asyncio.sleep(at_s)
        for _ in range(times):
            reading.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({reading})
        assert reading.cancelled()
        await asyncio.sleep(0.02)

    source = Source(1, 6, 100)
    run(story())
    assert not source.open


def test_a_source_that_is_cancelled_from_inside_does_not_end_in_silence() -> None:
    """It must not look like the end of the stream."""

    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"x"
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(timed(with_keep_alive(broken(), PERIOD_S, SIGN)))
