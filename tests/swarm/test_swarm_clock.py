"""Virtual time is exact, and does not hang where nothing can happen."""

import asyncio
import time

import pytest

from triscale.swarm import clock


def test_hours_take_no_time_and_are_exact():
    async def main():
        await asyncio.gather(*(asyncio.sleep(3600.0 * i / 7) for i in range(50)))
        return clock.now(), clock.timestamp()

    began = time.perf_counter()
    assert clock.run(main(), virtual=True) == (3600.0 * 49 / 7, 3600.0 * 49 / 7)
    assert time.perf_counter() - began < 60  # a real loop would need seven hours


def test_timeouts_and_order():
    async def main():
        order = []

        async def note(name, seconds):
            await asyncio.sleep(seconds)
            order.append((name, clock.now()))

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 0.3), ("a", 0.1), ("b", 0.2)):
                group.create_task(note(name, seconds))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(10.0)
        return order, clock.now()

    order, end = clock.run(main(), virtual=True)
    assert order == [("a", 0.1), ("b", 0.2), ("c", 0.3)] and end == 5.3


def test_threads_take_real_time_but_no_virtual_time():
    async def main():
        timer = asyncio.create_task(asyncio.sleep(100.0))
        value = await asyncio.to_thread(lambda: (time.sleep(0.05), 7)[1])
        before = clock.now()
        await timer
        return value, before, clock.now()

    assert clock.run(main(), virtual=True) == (7, 0.0, 100.0)


def test_a_deadlock_raises():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="hang for ever"):
        clock.run(main(), virtual=True)


def test_real_timestamps_are_wall_time():
    async def main():
        return clock.timestamp(), clock.is_virtual()

    stamp, virtual = clock.run(main())
    assert abs(stamp - time.time()) < 60 and not virtual
