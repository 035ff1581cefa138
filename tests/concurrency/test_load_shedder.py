"""LoadShedder: the least critical first, with hysteresis, and a reserve for the most critical."""

from __future__ import annotations

import asyncio

import pytest

from limitkeeper import BulkheadFull, ConfigurationError
from limitkeeper.concurrency import Bulkhead, LoadShedder


def admitted(shedder: LoadShedder, criticality: str, times: int = 1) -> list[object]:
    """The calls that were admitted and run on."""
    found = []
    for _ in range(times):
        call = shedder.call(criticality)
        try:
            found.append(call.__enter__())
        except BulkheadFull:
            continue
    return found


def end(calls: list[object]) -> None:
    for call in calls:
        call.__exit__(None, None, None)
    calls.clear()


def test_the_reserve_is_for_the_most_critical(clock):
    """However many other calls come, a fifth of the places stays free for critical ones."""
    shedder = LoadShedder(Bulkhead(10, max_waiting=0), clock=clock)
    assert len(admitted(shedder, "normal", 50)) == 8
    assert len(admitted(shedder, "critical", 50)) == 2
    assert shedder.shed["normal"] == 42
    with pytest.raises(BulkheadFull, match="no place outside its reserve for 'background'"):
        shedder.call("background").__enter__()


def test_the_lowest_class_is_shed_first(clock):
    """Under lasting overload one class after the other is shed, from the lowest; never the highest."""
    shedder, levels = LoadShedder(Bulkhead(10, max_waiting=0), clock=clock), []
    for _ in range(5):
        running = admitted(shedder, "critical", 5) + admitted(shedder, "normal", 200) + admitted(shedder, "critical", 200)
        clock.advance(1)
        running += admitted(shedder, "critical")
        levels.append(shedder.level)
        end(running)
    assert levels == [1, 2, 2, 2, 2]
    assert len(admitted(shedder, "critical", 20)) == 10
    with pytest.raises(BulkheadFull, match="sheds 'normal' calls"):
        shedder.call("normal").__enter__()


def overloaded(clock) -> LoadShedder:
    """A shedder of level 1, with nothing running."""
    shedder = LoadShedder(Bulkhead(10, max_waiting=0), clock=clock, patience=3)
    running = admitted(shedder, "normal", 100)
    clock.advance(1)
    running += admitted(shedder, "normal")
    assert shedder.level == 1
    end(running)
    for _ in range(20):
        end(admitted(shedder, "critical"))
    return shedder


def test_hysteresis(clock):
    """Between the two marks the level stays; below the lower one it falls after `patience` intervals in a row."""
    shedder = overloaded(clock)
    clock.advance(1)
    middle = admitted(shedder, "critical", 6)  # a load of 0.75
    for _ in range(10):
        clock.advance(1)
        admitted(shedder, "background")
        assert shedder.level == 1
    end(middle)
    levels = []
    for _ in range(6):
        end(admitted(shedder, "background", 3))
        levels.append(shedder.level)
        clock.advance(1)
    assert levels[0] == levels[1] == 1
    assert levels[-1] == 0
    assert levels == sorted(levels, reverse=True)
    assert admitted(shedder, "background")


def test_idle_time_counts(clock):
    """A service without traffic recovers too: the first call after a long pause already has the lower level."""
    shedder = overloaded(clock)
    clock.advance(1)
    end(admitted(shedder, "critical"))
    clock.advance(60)
    assert admitted(shedder, "normal")
    assert shedder.level == 0


def test_idle_time_after_an_overload_counts(clock):
    """The interval before the idle time was overloaded: its level is raised, and falls with the idle intervals after it."""
    shedder = LoadShedder(Bulkhead(10, max_waiting=0), clock=clock, patience=3)
    running = admitted(shedder, "normal", 100)
    clock.advance(60)
    assert not admitted(shedder, "background")  # long calls still run: no interval is calm
    assert shedder.level == 1
    end(running)
    clock.advance(60)
    assert admitted(shedder, "background")
    assert shedder.level == 0


def test_a_clock_that_goes_back_does_not_hold_the_level(clock):
    """After a step of an hour back an idle service recovers as soon as without it."""
    shedder = overloaded(clock)
    clock.advance(-3600)
    for _ in range(40):
        end(admitted(shedder, "critical"))
        clock.advance(1)
    assert shedder.level == 0


def test_fluctuating_load_does_not_flap(clock):
    """A load that changes between idle and full every interval changes the level twice in `patience` intervals at most."""
    shedder, changes = LoadShedder(Bulkhead(10, max_waiting=0), clock=clock), 0
    for i in range(40):
        before = shedder.level
        running = admitted(shedder, "normal", 60 if i % 2 else 2)
        changes += shedder.level != before
        end(running)
        clock.advance(1)
    assert changes <= 2 * 40 / 5


def test_critical_calls_may_wait():
    """A critical call waits in the bulkhead's queue, and none of the others overtakes it."""

    async def main():
        shedder = LoadShedder(Bulkhead(1, max_waiting=5), reserve=0.0)
        async with shedder.call("critical"):
            waiter = asyncio.create_task(shedder.call("critical").__aenter__())
            await asyncio.sleep(0)
            assert shedder.bulkhead.waiting == 1
            with pytest.raises(BulkheadFull):
                async with shedder.call("background"):
                    pass
        await waiter
        assert shedder.bulkhead.in_use == 1

    asyncio.run(main())


def test_the_decorator():
    """`@shedder.call("background").limit` holds a place of that class during a call."""
    shedder = LoadShedder(Bulkhead(1), reserve=0.0)

    @shedder.call("background").limit
    def report():
        with pytest.raises(BulkheadFull), shedder.call("normal"):
            pass
        return shedder.bulkhead.in_use

    assert report() == 1
    assert shedder.bulkhead.in_use == 0


def test_nothing_leaks():
    """After calls of every class, with exceptions, all places are free."""
    shedder = LoadShedder(Bulkhead(10))
    for criticality in ("critical", "normal", "background") * 5:
        with pytest.raises(KeyError), shedder.call(criticality):
            raise KeyError
    assert shedder.bulkhead.in_use == 0
    assert shedder.bulkhead.stats().permitted == 15


@pytest.mark.parametrize(
    "options",
    [{"classes": ("one",)}, {"classes": ("a", "a")}, {"reserve": 1.0}, {"low": 0.9, "high": 0.5}, {"high": 1.5}],
)
def test_invalid_settings(options):
    """Settings that can't work are refused."""
    with pytest.raises(ConfigurationError):
        LoadShedder(Bulkhead(1), **options)
    with pytest.raises(ConfigurationError, match="unknown class 'urgent'"):
        LoadShedder(Bulkhead(1)).call("urgent")
