"""A signal handler may raise at any moment of a wait: the caller gets that exception, and its charge is given back."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections import OrderedDict
from contextlib import suppress

import pytest

from effort import scaled
from interrupts import interrupted_at
from limitkeeper import Limiter, MemoryStore, RateLimited
from limitkeeper.testing import ManualClock


class StillClock(ManualClock):
    """Sleeping does not move it."""

    def sleep(self, seconds, wake=None):
        """Returns at once."""


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "then another"])
@pytest.mark.parametrize("method", ["acquire", "reserve"])
def test_an_interrupt_at_any_moment_gives_back_what_several_limits_were_charged(method, behind):
    """A call that waits for two limits and is interrupted leaves both as they were: none waits, and others can."""
    limiter = Limiter({"a": "10/s", "b": "fixed window 10/min"}, store=MemoryStore(clock=StillClock(1000)))
    limiter.hit("k", 10)
    free = limiter.peek("k", 10)
    number = 1
    while interrupted_at(number, lambda: getattr(limiter, method)("k", 10)):
        assert limiter.waiting() == 0, number
        if behind:
            other = limiter.reserve("k", 3)
            assert other.wait == free.retry_after, number
            assert other.cancel(), number
        assert limiter.peek("k", 10) == free, number
        number += 1
    assert number > 30


def test_a_signal_handler_may_use_the_limiter_that_it_interrupts():
    """A handler that runs at any moment of a call whose limit can't reserve, and makes such a call too, is answered."""
    limiter = Limiter("sliding window counter 1000000/h", store=MemoryStore())
    left = number = 0

    def handler(frame, event, arg):
        nonlocal left
        left -= 1
        if left == 0:
            with suppress(RateLimited):  # the interrupted call may be ahead of it
                limiter.acquire("k", timeout=0)

    def work():
        nonlocal left, number
        while left <= 0:
            left = number = number + 1
            sys.setprofile(handler)
            limiter.acquire("k")
            sys.setprofile(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert number > 20
    assert limiter.waiting() == 0


def test_a_handler_may_reserve_while_another_reservation_looks_at_other_keys():
    """A handler that reserves just when `join` reads which keys to check leaves both reservations as they are."""
    limiter = Limiter("1/h burst 1", store=MemoryStore(clock=StillClock(1000)))
    keys = [f"k{number}" for number in range(5)]
    for key in (*keys, "last"):
        limiter.hit(key)

    class Interrupting(OrderedDict):
        def __iter__(self):
            found = super().__iter__()
            if keys:
                assert limiter.reserve(keys.pop())
            return found

    assert limiter.reserve("k0")
    queue = limiter._queue
    queue._waiters = Interrupting(queue._waiters)
    assert limiter.reserve("last").wait == 3600
    assert not keys
    assert limiter.waiting() == 0


class Streamed:
    """A response that holds a reservation while it is streamed, in a cycle with its generator: the collector ends it."""

    def __init__(self, limiter, cost):
        self.lines = self.stream(limiter.reserve("u", cost))
        next(self.lines)

    def stream(self, reservation):
        try:
            yield self
        finally:
            reservation.cancel()


@pytest.mark.parametrize("costs", [[1], [1, 2]], ids=["one cost", "two costs"])
def test_reservations_that_are_cancelled_by_the_collector_leave_the_others_in_order(costs):
    """Generators with reservations, collected at any allocation while other reservations come and leave: those that stay start
    in order, none before its bucket admits it."""
    rng, threshold = random.Random(4), gc.get_threshold()
    try:
        for number in range(scaled(500, 200)):
            gc.disable()
            limiter = Limiter("token bucket 1/s burst 3", store=MemoryStore(clock=StillClock(1000)))
            limiter.hit("u", 3)
            stay, leave = [], []
            for _ in range(8):
                kind = rng.choice([stay, leave, None])
                cost = rng.choice(costs)
                if kind is None:
                    Streamed(limiter, cost)
                else:
                    kind.append((limiter.reserve("u", cost), cost))
            gc.set_threshold(rng.randrange(2, 300), 1000, 1000)
            gc.enable()
            for reservation, _ in leave:
                assert reservation.cancel()
                stay.append((limiter.reserve("u", 1), 1))
            gc.disable()
            gc.collect()
            stay.append((limiter.reserve("u", 1), 1))
            charged = 0
            for reservation, cost in stay:
                charged += cost
                assert reservation.wait >= charged, number
            assert limiter.waiting() == 0
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
