"""A storm of signals whose handler raises, in a process of its own: `python signal_storm.py KIND INTERRUPTS WHERE SEED`.

KIND is a store, WHERE the URL of a server or the path of a file. An alarm rings at a random moment of each call, and its handler
raises KeyboardInterrupt, TimeoutError (an OSError) or an exception of its own. Prints the number of calls that were interrupted;
any other outcome than an answer, a refusal, a store error or that exception ends the process with a traceback. SIGUSR1 prints the
stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from limitkeeper import FixedWindow, Limiter, MemoryStore, RateLimited, SharedStore, StoreError, TokenBucket
from limitkeeper.reservation import Reservation
from limitkeeper.stores import Store
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.leased import LeasedStore
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.sharded import ShardedStore


class Interrupted(Exception):
    pass


KINDS: dict[str, Callable[[str], Store]] = {
    "memory": lambda where: MemoryStore(),
    "shared": lambda where: SharedStore(where),
    "redis": lambda where: RedisStore(where, timeout="30s"),
    "leased": lambda where: LeasedStore(RedisStore(where, timeout="30s")),
    "sharded": lambda where: ShardedStore([RedisStore(where, prefix=f"shard {i}", timeout="30s") for i in range(2)]),
    "guarded": lambda where: GuardedStore(RedisStore(where, timeout="30s"), budget="30s", on_failure="closed"),
    "guarded memory": lambda where: GuardedStore(MemoryStore(), budget="30s", on_failure="closed"),
    "leased memory": lambda where: LeasedStore(MemoryStore()),
}
#: An alarm that was lost in a finaliser rings again: late, because a second one while a call gives back would lose its charge.
AGAIN_S = 5
#: One of them is free again after this time: longer than a storm may last, so that a waiter for it is always interrupted.
SLOW_S = 3600
RAISED = (KeyboardInterrupt, TimeoutError, Interrupted)


class Storm:
    def __init__(self, store: Store, interrupts: int, rng: random.Random) -> None:
        self.store, self.left, self.rng = store, interrupts, rng
        self.small = Limiter(FixedWindow("7/min"), store=store, name="small")
        self.large = Limiter(TokenBucket("100000/s burst 9000"), store=store, name="large")
        self.several = Limiter({"a": TokenBucket("50000/s"), "b": FixedWindow("80000/min")}, store=store, name="several")
        self.slow = Limiter(TokenBucket(f"1/{SLOW_S}s burst 1"), store=store, name="slow")
        self.admitted = self.rang = self.rings = self.left_behind = 0
        self.begun = time.monotonic()

    def calls(self) -> list[Callable[[], object]]:
        return [
            self.hit_small,
            self.hit_large,
            self.hit_several,
            self.reserve,
            self.wait,
            self.wait_entered,
            self.acquire,
            self.other,
        ]

    def hit_small(self) -> None:
        decision = self.small.hit("k")
        self.admitted += decision.allowed
        assert (decision.limit, decision.name) == (7, "small"), decision

    def hit_large(self) -> None:
        cost = self.rng.randrange(1, 4)
        decision = self.large.hit("k", cost)
        assert decision.limit == 9000, decision
        assert [one.limit for one in self.large.hit_many(["k", "l"])] == [9000, 9000]

    def hit_several(self) -> None:
        assert len(self.several.hit("k").decisions) == 2

    def reserve(self) -> None:
        with self.several.reserve("k", 3, max_wait=1) as reservation:
            reservation.settle(self.rng.randrange(5))
        self.large.reserve("k", 2).cancel()

    def acquire(self) -> None:
        assert self.large.acquire("k", timeout=1).limit == 9000

    def wait(self) -> None:
        """Waits for an hour or longer; only the alarm ends it."""
        self.slow.acquire("k")

    def wait_entered(self) -> None:
        with self.slow.reserve("k"):
            raise AssertionError("an hour is not over yet")

    def other(self) -> None:
        self.large.peek("k")
        self.large.refund("k")
        self.large.reset("reset")

    def run(self) -> int:
        calls = self.calls()
        for call in calls:
            if call not in (self.wait, self.wait_entered):
                call()
        self.slow.hit("k")
        durations = dict.fromkeys(calls, 0.001)

        def ring(*_: object) -> None:
            self.rings += 1
            raise self.rng.choice(RAISED)("rung")

        signal.signal(signal.SIGALRM, ring)
        while self.rang < self.left:
            call = self.rng.choice(calls)
            started, self.rings = time.perf_counter(), 0
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, self.rng.random() * durations[call] + 1e-6, AGAIN_S)
                    call()
                    durations[call] = 0.9 * durations[call] + 0.1 * (time.perf_counter() - started)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except (StoreError, RateLimited):
                pass
            except RAISED as error:
                if error.args != ("rung",):
                    raise
                self.rang += 1
                self.left_behind += self.may_leave_a_charge(error)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return self.rang

    def may_leave_a_charge(self, error: BaseException) -> bool:
        """Whether no store could give back what the call had charged: `reserve` had returned and the `try` of `__enter__` had not
        begun, so that the reservation was the caller's; or the handler raised again while the call gave back."""
        *_, (frame, line), _ = traceback.walk_tb(error.__traceback__)
        begins = frame.f_code is Reservation.__enter__.__code__ and line == frame.f_code.co_firstlineno
        return begins or frame.f_code is Storm.wait_entered.__code__ or self.rings > 1

    def check(self) -> None:
        """No caller waits, nothing is locked, nothing was admitted above a limit, and refunds of waiters are available again."""
        self.store.now_us()
        for limiter in (self.small, self.large, self.several, self.slow):
            assert limiter.waiting() == 0, f"{limiter!r} has {limiter.waiting()} phantom waiters"
        windows = 2 + int(time.monotonic() - self.begun) // 60
        assert self.admitted <= 7 * windows, self.admitted
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.extend([self.hit_large(), self.hit_several(), self.reserve()]), daemon=True
        )
        thread.start()
        thread.join(60)
        assert len(found) == 3, "a lock stays locked"
        charges = self.slow.peek("k").retry_after / SLOW_S
        assert charges <= 1 + self.left_behind, f"{charges} are charged, but {self.left_behind} are expected"


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    kind, interrupts, where, seed = sys.argv[1:]
    with KINDS[kind](where) as made:
        storm = Storm(made, int(interrupts), random.Random(int(seed)))
        print(storm.run())
        storm.check()
