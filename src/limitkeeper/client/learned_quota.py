"""LearnedQuota: what a server has said about its quota, as a bound on the calls that are still to be sent to it.

    calls that start until the reset ≤ remaining − calls in flight            of the newest response that names the quota

A call in flight may or may not be part of `remaining` yet; all are subtracted, so that the bound never exceeds the quota. After
the reset a quota starts again with its limit if limit and window are known, and is forgotten otherwise. A response to an older
call never replaces a newer one's.

A refusal blocks every call until the time that the server names. Calls that waited for it then start evenly over the spread:
n callers start at (i + u) · spread / n, u random in [0, 1). Rejected: all at once, which repeats the refusal.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import count

from ..fork import reset_after_fork
from .response_fields import MAX_ITEMS, Quota, ServerHints

#: A server's wish for a wait counts for at most this long, an hour: a wrong value does not silence a client for days.
LONGEST_BLOCK_US = 3600 * 10**6
Costs = Mapping[str, int]
ONE_REQUEST: Costs = {"requests": 1}


class Allowance:
    """What is left of one quota until `until_us`, as of the response to call number `sequence`."""

    __slots__ = ("quota", "remaining", "sequence", "until_us")

    def __init__(self, quota: Quota, remaining: int, until_us: int, sequence: int) -> None:
        self.quota, self.remaining, self.until_us, self.sequence = quota, remaining, until_us, sequence

    def cost(self, costs: Costs) -> int:
        """The units that a call takes, at most the whole limit; a unit that is not counted costs 1 when nothing is left."""
        cost = costs.get(self.quota.unit, 1)
        return cost if self.quota.limit is None else min(cost, self.quota.limit)

    def renew(self, now_us: int) -> bool:
        """Starts the next window; False when its limit or length is not known."""
        quota = self.quota
        if not quota.limit or not quota.window_us:
            return False
        self.remaining, self.until_us = quota.limit, now_us + quota.window_us
        return True


class LearnedQuota:
    """The learned quotas of one host, and its calls in flight."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.not_before_us = 0
        self._gap_us = self._gap_until_us = 0
        self.allowances: dict[str, Allowance] = {}
        self._numbers = count(1)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """The calls of the parent are not the child's."""
        self._lock = threading.Lock()
        self.waiting = 0  # callers that wait for this quota
        self._flying: dict[int, Costs] = {}  # calls in flight by number; changed in single steps, without the lock

    @property
    def idle(self) -> bool:
        return not (self.waiting or self._flying or self.allowances or self.not_before_us)

    def quotas(self, now_us: int) -> list[Quota]:
        """The quotas as they are known now."""
        with self._lock:
            return [
                one.quota._replace(remaining=one.remaining, reset_us=one.until_us - now_us)
                for one in self.allowances.values()
                if one.until_us > now_us
            ]

    def wait_us(self, now_us: int, costs: Costs = ONE_REQUEST) -> int:
        """How long a call would have to wait now."""
        if not self.allowances:
            return max(0, self.not_before_us - now_us)
        with self._lock:
            return self._wait_us(now_us, costs)

    def _wait_us(self, now_us: int, costs: Costs) -> int:
        wait = max(0, self.not_before_us - now_us)
        for name, one in list(self.allowances.items()):
            if one.until_us <= now_us and not one.renew(now_us):
                del self.allowances[name]
            elif one.remaining < one.cost(costs):
                wait = max(wait, one.until_us - now_us)
        return wait

    def take(self, now_us: int, costs: Costs = ONE_REQUEST) -> int:
        """Counts a call that starts now. Its number, or minus the wait in microseconds when it may not start."""
        if self.allowances or self.not_before_us:
            with self._lock:
                if wait := self._wait_us(now_us, costs):
                    return -wait
                for one in self.allowances.values():
                    one.remaining -= one.cost(costs)
                self.not_before_us = now_us + self._gap_us if now_us < self._gap_until_us else 0
        number = next(self._numbers)
        self._flying[number] = costs
        return number

    def ended(self, number: int) -> None:
        """A call has its response, or has failed."""
        self._flying.pop(number, None)

    def in_flight(self, unit: str = "requests") -> int:
        """The units of the calls that are on their way."""
        return sum([costs.get(unit, 0) for costs in list(self._flying.values())])

    def learn(self, hints: ServerHints, sequence: int, now_us: int) -> None:
        """Takes over what the response to call number `sequence` says. That call is no longer in flight."""
        with self._lock:
            for quota in hints.quotas[:MAX_ITEMS]:
                if quota.remaining is None or quota.reset_us is None:
                    continue
                known = self.allowances.get(quota.name)
                if known is None and len(self.allowances) >= MAX_ITEMS:
                    continue
                if known is None or known.sequence <= sequence:
                    left = max(0, quota.remaining - self.in_flight(quota.unit))
                    until_us = now_us + min(quota.reset_us, LONGEST_BLOCK_US)
                    self.allowances[quota.name] = Allowance(quota, left, until_us, sequence)

    def block(self, now_us: int, delay_us: int) -> None:
        """No call starts before `delay_us` from now."""
        with self._lock:
            self.not_before_us = max(self.not_before_us, now_us + min(delay_us, LONGEST_BLOCK_US))

    def join(self, change: int) -> None:
        """Counts callers that wait."""
        with self._lock:
            self.waiting += change

    def spread(self, now_us: int, spread_us: int, draw: float) -> None:
        """After a block, spaces the starts of those that wait now evenly over a spread that begins now."""
        with self._lock:
            if now_us < max(self._gap_until_us, self.not_before_us):
                return
            self._gap_us, self._gap_until_us = spread_us // max(1, self.waiting), now_us + spread_us
            self.not_before_us = now_us + int(draw * self._gap_us)
