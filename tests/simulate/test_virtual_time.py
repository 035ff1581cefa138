"""The virtual loop: time jumps to the next timer, blocking code takes turns with it, and a deadlock is an error."""

from __future__ import annotations

import asyncio

import pytest

from limitkeeper.errors import StoreUnavailable
from limitkeeper.simulate.virtual_time import BEGIN_US, SimulatedClock, VirtualTimeLoop, block_on, run_in_thread, run_virtual


def here() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def test_an_hour_passes_at_once():
    """Sleepers wake in the order of their times, at exactly these, without waiting."""

    async def main() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        async def sleeper(seconds: int) -> None:
            await asyncio.sleep(seconds)
            seen.append((seconds, here().now_us()))

        await asyncio.gather(*(sleeper(seconds) for seconds in (3600, 60, 1)))
        return seen

    assert run_virtual(main()) == [(1, 1_000_000), (60, 60_000_000), (3600, 3_600_000_000)]


def test_a_clock_has_offset_drift_and_steps():
    """A clock of 100 ppm gains 360 ms in an hour, and a step changes `now_us` but not `steady_us`."""

    async def main() -> tuple[int, int]:
        clock = SimulatedClock(here(), offset_us=500, drift_ppm=100)
        await asyncio.sleep(3600)
        clock.step(-7_000_000)
        return clock.now_us() - BEGIN_US, clock.steady_us() - BEGIN_US

    assert run_virtual(main()) == (500 + 3_600_360_000 - 7_000_000, 500 + 3_600_360_000)


def test_blocking_code_and_tasks_take_turns():
    """A thread that sleeps on a simulated clock lets the tasks of the loop run meanwhile, in virtual time."""

    async def main() -> list[str]:
        seen: list[str] = []
        clock = SimulatedClock(here())

        def blocking() -> str:
            for _ in range(3):
                clock.sleep(1.0)
                seen.append(f"thread {here_us() // 1_000_000}")
            return "done"

        loop = here()

        def here_us() -> int:
            return loop.now_us()

        async def task() -> None:
            for _ in range(3):
                await asyncio.sleep(0.9)
                seen.append(f"task {here_us() // 100_000}")

        answer, _ = await asyncio.gather(run_in_thread(blocking), task())
        return [*seen, answer]

    assert run_virtual(main()) == ["task 9", "thread 1", "task 18", "thread 2", "task 27", "thread 3", "done"]


def test_blocking_code_of_a_cancelled_caller_fails():
    """Cancelling the caller makes the calls of its thread fail, and ends when the thread does."""

    async def main() -> list[str]:
        seen: list[str] = []

        def blocking() -> None:
            for _ in range(2):
                try:
                    block_on(asyncio.sleep(10))
                except StoreUnavailable as error:
                    seen.append(str(error))

        work = asyncio.ensure_future(run_in_thread(blocking))
        await asyncio.sleep(1)
        work.cancel()
        await asyncio.wait({work})
        return seen

    assert run_virtual(main()) == ["the process has crashed"] * 2


def test_a_deadlock_is_an_error():
    """When every task waits for something that never comes, the loop raises an error instead of hanging."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never comes"):
        run_virtual(main())
