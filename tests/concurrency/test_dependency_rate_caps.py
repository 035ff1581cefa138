"""Dependencies: caps on a service's own calls, exact in every window, shared through a store."""

from __future__ import annotations

import asyncio
from bisect import bisect_right

import pytest

from limitkeeper import BulkheadFull, ConfigurationError, InvalidLimit, MemoryStore, RateLimited, SlidingWindowLog, TokenBucket
from limitkeeper.concurrency import Dependencies, DependencyCap
from limitkeeper.policy import Policy
from limitkeeper.policy.reading.diagnostics import PolicyError
from virtual_time import VirtualClock


async def turns() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def most_in_a_window(starts: list[int], window_us: int) -> int:
    """The most starts in any half-open window."""
    return max(bisect_right(starts, start + window_us - 1) - i for i, start in enumerate(starts))


def test_a_cap_holds_in_every_window():
    """ "Capped at 300" is at most 300 starts in every window of one second, over all pods, and the whole rate is used."""

    async def main():
        clock, starts = VirtualClock(), []
        store = MemoryStore(clock=clock)
        pods = [Dependencies({"inventory": DependencyCap("300/s", timeout="10s")}, store) for _ in range(3)]

        async def call(pod, at):
            await clock.at(at)
            async with pod["inventory"]:
                starts.append(clock.now_us())

        begun_us = clock.now_us()
        tasks = [asyncio.create_task(call(pods[i % 3], begun_us + i * 700)) for i in range(1200)]  # 1429/s for 0.84 s
        await clock.run_until(begun_us + 9_000_000, turns)
        await asyncio.gather(*tasks)
        starts.sort()
        assert len(starts) == 1200
        assert most_in_a_window(starts, 1_000_000) == 300
        assert starts[-1] - begun_us < 3_900_000

    asyncio.run(main())


def test_a_bare_rate_is_a_sliding_window_log():
    """A bare rate is exact; another algorithm can be written out."""
    assert DependencyCap("300/s").limit == SlidingWindowLog("300/s")
    assert DependencyCap("token bucket 300/s burst 1").limit == TokenBucket("300/s burst 1")
    assert DependencyCap(TokenBucket("5/s")).limit == TokenBucket("5/s")


def test_calls_wait_and_are_refused(clock):
    """A call waits up to its timeout for its start, and is refused at once when that is not enough."""
    dependencies = Dependencies({"pricing": DependencyCap("1/s", timeout="1s")}, MemoryStore(clock=clock))
    pricing, began_us = dependencies["pricing"], clock.now_us()
    for _ in range(3):
        with pricing:
            pass
    assert clock.now_us() - began_us == 2_000_000
    quick = Dependencies({"pricing": DependencyCap("1/s", timeout=0)}, dependencies.store)["pricing"]
    with pytest.raises(RateLimited):
        quick.acquire()


def test_the_bulkhead_beside_the_rate(clock):
    """At most `concurrent` calls run; a refusal by the rate gives the place back."""
    store = MemoryStore(clock=clock)
    cap = DependencyCap("2/s", concurrent=1, max_waiting=0, timeout="100ms")
    payment = Dependencies({"payment": cap}, store)["payment"]
    with payment, pytest.raises(BulkheadFull, match="'payment'"):
        payment.acquire()
    with payment:
        pass
    with pytest.raises(RateLimited):
        payment.acquire()
    assert payment.bulkhead is not None
    assert payment.bulkhead.in_use == 0


def test_one_timeout_for_both_waits():
    """The wait for a place and the wait for a start together last no longer than the timeout."""

    async def main():
        clock = VirtualClock()
        store = MemoryStore(clock=clock)
        cap = DependencyCap("1/s", concurrent=1, timeout="900ms")
        payment, begun_us = Dependencies({"payment": cap}, store)["payment"], clock.now_us()
        await payment.aacquire()
        second = asyncio.create_task(payment.aacquire())
        await clock.run_until(begun_us + 500_000, turns)
        payment.release()  # the next start is 500 ms from now, and 400 ms are left
        await turns()
        with pytest.raises(RateLimited):
            await second
        assert payment.bulkhead.in_use == 0

    asyncio.run(main())


def test_decorated_calls():
    """A decorated coroutine is one call; an exception ends it, and its start stays charged."""
    inventory = Dependencies({"inventory": DependencyCap("2/h", concurrent=1, timeout=0)})["inventory"]

    @inventory.limit
    async def fetch(fail):
        assert inventory.bulkhead.in_use == 1
        if fail:
            raise KeyError

    asyncio.run(fetch(False))
    with pytest.raises(KeyError):
        asyncio.run(fetch(True))
    with pytest.raises(RateLimited):
        asyncio.run(fetch(False))
    assert inventory.bulkhead.in_use == 0


def test_hosts():
    """HTTP clients find a dependency by its host; other hosts have no cap."""
    dependencies = Dependencies({"a": DependencyCap("1/s", hosts=("Inventory.internal", "inv")), "b": "2/s"})
    assert dependencies.of_host("inventory.INTERNAL") is dependencies["a"]
    assert dependencies.of_host("example.com") is None
    with pytest.raises(ConfigurationError, match="same host"):
        Dependencies({"a": DependencyCap("1/s", hosts=("x",)), "b": DependencyCap("1/s", hosts=("x",))})


def test_a_policy_section():
    """`dependencies:` in a policy is read as caps, with positions in the messages; `of_policy` enforces them."""
    policy = Policy.read(
        """
name: shop
dependencies:
  inventory: 300/s
  pricing: 500/s
  payment: {rate: token bucket 200/s burst 1, concurrent: 40, max_waiting: 5, timeout: 200ms, hosts: [pay.internal]}
"""
    )
    assert policy.dependencies == {
        "inventory": DependencyCap("300/s"),
        "pricing": DependencyCap("500/s"),
        "payment": DependencyCap("token bucket 200/s burst 1", 40, 5, "200ms", ("pay.internal",)),
    }
    assert policy == Policy.of(
        name="shop",
        dependencies={
            "inventory": "300/s",
            "pricing": DependencyCap("500/s"),
            "payment": policy.dependencies["payment"],
        },
    )
    dependencies = Dependencies.of_policy(policy, MemoryStore())
    assert list(dependencies) == ["inventory", "pricing", "payment"]
    with dependencies["payment"]:
        (snapshot,) = dependencies.snapshot().bulkheads
        assert (snapshot.name, snapshot.in_use) == ("payment", 1)
    with pytest.raises(KeyError, match="known are: inventory, pricing, payment"):
        dependencies["invntory"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("inventory: 300/moon", "unknown unit 'moon'"),
        ("inventory: 300/s burst 5", "unknown option"),
        ("inventory: sliding windw log 3/s", "did you mean"),
        ("inventory: {concurrent: 4}", "missing field 'rate'"),
        ("inventory: {rate: 3/s, concurrent: 0}", "concurrent"),
        ("inventory: {rate: 3/s, max_waiting: 4}", "give concurrent"),
        ("inventory: {rate: 3/s, bulkhead: 4}", "unknown field 'bulkhead'"),
        ("inventory: {rate: 3/s, timeout: -1s}", "timeout"),
        ("inventory: []", "expected"),
    ],
)
def test_invalid_sections(section, message):
    """A mistake in the section is an error with its line."""
    with pytest.raises(PolicyError, match=message.replace("'", ".")) as raised:
        Policy.read(f"dependencies:\n  {section}\n")
    assert "line 2" in str(raised.value) or ":2:" in str(raised.value)


@pytest.mark.parametrize("rate", [300, "", "fast", None])
def test_invalid_rates(rate):
    """A cap needs a rate with a unit."""
    with pytest.raises(InvalidLimit):
        DependencyCap(rate)
