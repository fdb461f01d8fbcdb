"""The virtual clock that other tests rely on to find hangs and leaks."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.support.virtual_time import EPOCH_S, HangError, LooseEndsError, VirtualClock, run


async def counting() -> AsyncGenerator[int, None]:
    for number in range(3):
        yield number


async def fail() -> None:
    raise ValueError("seen by nobody")


def test_hours_pass_at_once_and_to_the_second() -> None:
    async def story() -> tuple[float, float]:
        await asyncio.sleep(7200)
        clock = VirtualClock()
        return clock.monotonic_s(), clock.now_s()

    assert run(story()) == (7200, EPOCH_S + 7200)


def test_timers_ring_in_their_order() -> None:
    async def story() -> list[float]:
        rung: list[float] = []

        async def ring(after_s: float) -> None:
            await asyncio.sleep(after_s)
            rung.append(after_s)

        await asyncio.gather(*map(ring, (3.0, 1.0, 2.0)))
        return rung

    assert run(story()) == [1, 2, 3]


def test_a_call_from_another_thread_is_heard() -> None:
    async def story() -> int:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        loop.call_soon_threadsafe(answer.set_result, 4)
        return await answer

    assert run(story()) == 4


def test_a_hang_is_an_error() -> None:
    async def story() -> None:
        await asyncio.Event().wait()

    with pytest.raises(HangError):
        run(story())


def test_a_task_that_is_left_running_is_an_error() -> None:
    kept: list[asyncio.Task[None]] = []

    async def story() -> None:
        kept.append(asyncio.create_task(asyncio.sleep(5)))

    with pytest.raises(LooseEndsError, match="still runs"):
        run(story())


def test_an_exception_that_nobody_sees_is_an_error() -> None:
    async def story() -> None:
        task = asyncio.create_task(fail())
        await asyncio.wait({task})

    with pytest.raises(LooseEndsError, match="seen by nobody"):
        run(story())


def test_a_generator_that_is_held_and_not_closed_is_an_error() -> None:
    kept = counting()

    async def story() -> None:
        await anext(kept)

    with pytest.raises(LooseEndsError, match="not closed"):
        run(story())


def test_a_generator_that_is_left_to_the_garbage_collector_is_an_error() -> None:
    async def story() -> None:
        async for _ in counting():
            break

    with pytest.raises(LooseEndsError, match="garbage collector"):
        run(story())
