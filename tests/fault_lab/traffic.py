"""Callers that hit one store again and again, in threads and in tasks, and record the answers.

    traffic = Traffic(store, LIMITS, "round-1")
    traffic.start(); assert traffic.go_on(0.3, until=lambda seen: seen.errors.total() > 0); tally = traffic.stop()

A tally counts what was admitted by limit and key, errors by class, and the longest call. An error that is not limitkeeper's own
is `strange`. A call that does not come back is `hung`. Expected events are awaited without a fixed time: a slow machine takes
longer. A watch measures how late this machine wakes a thread at the moment.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from limitkeeper import AsyncLimiter, FixedWindow, Limiter, LimitkeeperError, TokenBucket
from limitkeeper.algorithms import Limit

from .scheduling_delay import WAKES, Witness

#: What callers are limited by: a bucket that refills while they watch, and a window that does not end.
LIMITS: dict[str, Limit] = {"bucket": TokenBucket("20/s burst 40"), "window": FixedWindow("60/400d")}
COUNTED = ("admitted", "alone", "errors", "answers_at", "errors_at", "bucket_at", "alone_at")
KEYS = ("ann", "bob", "zoë")
#: Seconds until an awaited event counts as not happening, and of good answers that make a recovery.
PATIENCE = 15.0
STRETCH = 0.3
#: Seconds after which the end of a call is known.
SETTLED = 0.2


@dataclass
class Tally:
    """The answers of the callers."""

    calls: int = 0
    #: By limit and key: admitted by the store; and admitted by a guard alone, while the store was away.
    admitted: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    #: The longest call, how late a sleeper was woken at the latest, and the first without being woken late; in seconds.
    longest: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    hung: int = 0
    seconds: float = 0.0
    #: By the tenth of a second of the monotonic clock in which a call began: answers, errors, and what the bucket admitted.
    answers_at: Counter[int] = field(default_factory=Counter)
    errors_at: Counter[int] = field(default_factory=Counter)
    bucket_at: Counter[int] = field(default_factory=Counter)
    alone_at: Counter[int] = field(default_factory=Counter)

    def answered(self, limit: str, key: str, allowed: bool, begun: float, alone: bool = False) -> None:
        self.calls += 1
        self.longest = max(self.longest, time.monotonic() - begun)
        self.answers_at[tenth(begun)] += 1
        if alone:
            self.alone_at[tenth(begun)] += 1
        if allowed:
            (self.alone if alone else self.admitted)[f"{limit} {key}"] += 1
            if limit == "bucket":
                self.bucket_at[tenth(begun)] += 1

    def failed(self, error: BaseException, begun: float) -> None:
        self.calls += 1
        self.longest = max(self.longest, time.monotonic() - begun)
        self.errors_at[tenth(begun)] += 1
        self.errors[type(error).__name__] += 1
        if not isinstance(error, LimitkeeperError) and len(self.strange) < 5:
            self.strange.append("".join(traceback.format_exception(error))[-1500:])

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.strange += other.strange
        self.hung += other.hung
        for name in COUNTED:
            getattr(self, name).update(dict(getattr(other, name)))  # a copy in one step: its owner may be counting
        for name in ("longest", "late", "slow", "seconds"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def unwell(self, since: float, until: float = 1e12) -> str:
        """What is wrong with the calls of that time: too many errors (a busy machine may cause one in fifty), or no answer."""
        fine, failed = between(self.answers_at, since, until), between(self.errors_at, since, until)
        if failed > max(2, (fine + failed) // 50):
            return f"{failed} of {fine + failed} calls failed"
        return "" if fine else "no call was answered"


def tenth(moment: float) -> int:
    return int(moment * 10)


def between(counts: Counter[int], first: float, last: float = 1e12) -> int:
    """How many there were in the whole tenths of a second after the first moment and before the last."""
    return sum(count for moment, count in list(counts.items()) if first < moment / 10 and (moment + 1) / 10 <= last)


def moments(first: float, last: float) -> list[float]:
    """From the first to the last, a twentieth of a second apart."""
    return [first + step / 20 for step in range(int((last - first) * 20) + 1)]


class Traffic:
    """`threads` callers and `tasks` callers in one loop, all on one store, each going through every limit and key."""

    def __init__(
        self,
        store: Any,
        limits: dict[str, Limit] = LIMITS,
        name: str = "traffic",
        keys: tuple[str, ...] = KEYS,
        threads: int = 4,
        tasks: int = 4,
        pause: float = 0.004,
    ) -> None:
        self.keys, self.pause = keys, pause
        #: Whether a decision was made by a guard alone.
        self.alone: Callable[[Any], bool] = getattr(store, "answered_here", lambda decision: False)
        self.near = {limit: Limiter(rule, store=store, name=f"{name} {limit}") for limit, rule in limits.items()}
        self.far = {limit: AsyncLimiter(rule, store=store, name=f"{name} {limit}") for limit, rule in limits.items()}
        self.tallies = [Tally() for _ in range(threads + tasks)]
        self.ended = threading.Event()
        self.witness = Witness()
        self.begun = time.monotonic()
        self.threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(threads)]
        if tasks:
            self.threads.append(threading.Thread(target=self._loop, args=(range(threads, threads + tasks),), daemon=True))

    def start(self) -> Traffic:
        self.begun = time.monotonic()
        for thread in (self.witness, *self.threads):
            thread.start()
        return self

    def seen(self) -> Tally:
        """The answers of the callers so far."""
        total = Tally()
        for tally in self.tallies:
            total.add(tally)
        return total

    def go_on(self, seconds: float = 0.0, until: Callable[[Tally], Any] = lambda seen: True, patience: float = PATIENCE) -> bool:
        """Lets callers continue for so many seconds, and then until the condition holds; False when it never did."""
        time.sleep(seconds)
        end = time.monotonic() + patience
        while not until(self.seen()):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def recovery(
        self, healed: float, unwell: Callable[[Tally, float, float], Any] = Tally.unwell, patience: float = PATIENCE
    ) -> float:
        """Lets callers continue until all was well for a stretch of time; returns how many seconds after `healed` that began."""
        found: list[float] = []

        def well(seen: Tally) -> bool:
            last = time.monotonic() - STRETCH - SETTLED
            found[:] = [since for since in moments(healed, last) if not unwell(seen, since, since + STRETCH)][:1]
            return bool(found)

        return found[0] - healed if self.go_on(STRETCH + SETTLED, well, patience) else math.inf

    def stop(self, patience: float = PATIENCE) -> Tally:
        """Ends the callers; those that are still in a call after `patience` seconds are counted as hung."""
        self.ended.set()
        end = time.monotonic() + patience
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        total = self.seen()
        total.hung = sum(thread.is_alive() for thread in self.threads)
        total.seconds = time.monotonic() - self.begun
        total.late = self.witness.stop()
        total.slow = total.longest - WAKES * total.late
        return total

    def _call(self, number: int) -> None:
        tally, turn = self.tallies[number], number
        while not self.ended.is_set():
            turn += 1
            key = self.keys[turn % len(self.keys)]
            for limit, limiter in self.near.items():
                begun = time.monotonic()
                try:
                    decision = limiter.hit(key)
                    tally.answered(limit, key, bool(decision), begun, self.alone(decision))
                except Exception as error:
                    tally.failed(error, begun)
            time.sleep(self.pause)

    async def _acall(self, number: int) -> None:
        tally, turn = self.tallies[number], number
        while not self.ended.is_set():
            turn += 1
            key = self.keys[turn % len(self.keys)]
            for limit, limiter in self.far.items():
                begun = time.monotonic()
                try:
                    decision = await limiter.hit(key)
                    tally.answered(limit, key, bool(decision), begun, self.alone(decision))
                except Exception as error:
                    tally.failed(error, begun)
            await asyncio.sleep(self.pause)

    def _loop(self, numbers: range) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._acall(number) for number in numbers))

        asyncio.run(all_of_them())


def most(limit: Limit, seconds: float, forgotten: int = 0, jumps: int = 0) -> float:
    """The most that one key may be admitted: a full limit, another for each time that state was lost, another at most for each
    jump of the clock ahead, and what a bucket gains in that time."""
    gained = limit.count * seconds * 1e6 / limit.period if isinstance(limit, TokenBucket) else 0.0
    return limit.capacity * (1 + forgotten + jumps) + gained


def over(tally: Tally, limits: dict[str, Limit], forgotten: int = 0, jumps: int = 0, extra: float = 0.0) -> dict[str, float]:
    """By limit and key: how many more than the bound were admitted, where it was more."""
    found = {}
    for name, admitted in tally.admitted.items():
        excess = admitted - most(limits[name.split()[0]], tally.seconds, forgotten, jumps) - extra
        if excess > 0:
            found[name] = excess
    return found
