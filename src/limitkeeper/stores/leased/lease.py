"""Lease: the batches of tokens that a node holds for one key, the refusal it knows of, and the key's demand.

A batch of `size` tokens was charged at the parent store at `charged_at`. It may be spent from `start_us` until `end_us`, one
lease life after it was requested. A second batch (`next_…`) follows the first, so that it is there before the first runs out. A
refusal of the parent is kept too: until `refused_until_us`, costs from `refused_min` to `refused_max` are refused here.

    demand     rate ← rate + (used / elapsed − rate) · elapsed / min(observed, 2 · life)           tokens per µs
    size       ¾ · rate · life, at least 1, at most a quarter of the capacity (or what the limit grants in an eighth of a life or
               in four round trips, if that is more); or fixed, as long as a fixed batch is spent within its life
    low mark   what is used during two round trips, at least 1, at most a quarter of the batch: below it, the next is fetched

Batches last ¾ of a life, so that a steady key spends them before they expire. Held at once: a batch and a quarter.
Rejected: topping a lease up to its size (every fetch is then smaller than a batch), and one life for everything held (renewing
would keep a token for ever, and the bound `rate × life` would be lost).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import Limit
else:
    from ...algorithms.claim import NamedLimit
    from ...algorithms.limit import Limit

from ...algorithms.fixed_window import FixedWindow
from ...decision import STORE

if TYPE_CHECKING:
    from .refill import PendingFetch

#: Sources of a charge at the parent; a lease keeps the index, which it can copy without the interpreter's lock.
SOURCES = (STORE, "lease", "local_share", "open", "closed")


class Unspent(NamedTuple):
    """What was not spent of a batch: `amount` of `size`, charged at `charged_at` by `source`."""

    lease: Lease
    amount: int
    size: int
    charged_at: int
    source: str


@cython.cclass
class LeaseTerms:
    """How one limit is leased: whether at all, in which batch sizes, and as which limit at the parent; and its leases by key."""

    def __init__(
        self, named: NamedLimit, parent_limit: NamedLimit, fixed_batch: cython.longlong, life_us: cython.longlong
    ) -> None:
        limit: Limit = parent_limit.limit
        self.named = named
        self.parent_limit = parent_limit
        self.limit = named.limit
        self.name = named.name
        self.leases: dict[str, Lease] = {}
        self.leasable = limit.refunds  # a queue paces every single start: there is nothing to spend ahead
        self.continuous = limit.gain > 0  # tokens come one by one, not all at once when a window ends
        self.windowed = isinstance(limit, FixedWindow)  # a batch ends with its window
        self.life_us = life_us
        self.tokens_per_us = float(limit.count) / float(limit.period)
        per_life = self.tokens_per_us * life_us
        largest = max(1, limit.capacity // 4, min(limit.capacity, int(per_life / 8)))
        self.max_batch = largest if fixed_batch == 0 else min(fixed_batch, limit.capacity)
        self.fixed_batch = 0 if fixed_batch == 0 else self.max_batch
        self.scarce_batch = max(1, min(self.max_batch, int(per_life / 2)))

    def largest_batch(self, round_trip_us: int) -> int:
        """The largest batch: of a far parent at least what the limit grants during four round trips."""
        if self.fixed_batch:
            return int(self.fixed_batch)
        return max(int(self.max_batch), min(int(self.limit.capacity), int(4 * self.tokens_per_us * round_trip_us)))


@cython.cclass
class Lease:
    """What is held for one key."""

    # fmt: off
    __slots__ = ("charged_at", "check_us", "end_us", "generation", "key", "last_used_us", "left", "low_mark", "measured_us",
                 "next_charged_at", "next_end_us", "next_left", "next_requested_us", "next_size", "next_source",
                 "next_start_us", "observed_us", "oversized", "parent_left", "pending", "queued", "rate", "recheck_us",
                 "refusals", "refused_left", "refused_max", "refused_min", "refused_until_us", "requested_us", "reset_us",
                 "scarce", "scarce_size", "size", "source", "start_us", "terms", "used")
    # fmt: on

    def __init__(self, terms: LeaseTerms, key: str, now_us: cython.longlong) -> None:
        if not cython.compiled:
            self.left = self.start_us = self.end_us = self.charged_at = self.source = self.requested_us = 0
            self.next_left = self.next_size = self.next_start_us = self.next_end_us = 0
            self.next_charged_at = self.next_source = self.next_requested_us = 0
            self.refused_min = self.refused_max = self.refused_until_us = self.refused_left = self.refusals = 0
            self.recheck_us = self.reset_us = self.observed_us = self.used = 0
            self.parent_left = self.generation = self.check_us = 0
            self.rate = 0.0
            self.scarce = self.queued = self.oversized = False
        self.terms = terms
        self.key = key
        self.last_used_us = self.measured_us = now_us
        self.scarce_size = terms.scarce_batch
        self.low_mark = -1
        self.size = 1
        self.pending: PendingFetch | None = None

    # Spending --------------------------------------------------------------------------------------------------

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def held(self, now_us: cython.longlong) -> cython.longlong:
        """How much can be spent now."""
        found: cython.longlong = 0
        if now_us < self.end_us and now_us >= self.start_us:
            found = self.left
        if now_us < self.next_end_us and now_us >= self.next_start_us:
            found += self.next_left
        return found

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def take(self, now_us: cython.longlong, cost: cython.longlong) -> cython.bint:
        """Spends all of the cost or nothing."""
        if self.left >= cost and now_us < self.end_us and now_us >= self.start_us:
            self.left -= cost
            return True
        return self.take_from_both(now_us, cost)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def take_from_both(self, now_us: cython.longlong, cost: cython.longlong) -> cython.bint:
        """Spends what is left of the first batch, then of the second."""
        if self.held(now_us) < cost or cost <= 0:
            return False
        if now_us < self.end_us and now_us >= self.start_us:
            first: cython.longlong = self.left if self.left < cost else cost
            self.left -= first
            cost -= first
        self.next_left -= cost
        if self.left == 0:
            self.promote_next()
        return True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def promote_next(self) -> cython.void:
        """Makes the second batch the first."""
        self.left = self.next_left
        self.size = self.next_size
        self.start_us = self.next_start_us
        self.end_us = self.next_end_us
        self.charged_at = self.next_charged_at
        self.source = self.next_source
        self.requested_us = self.next_requested_us
        self.next_left = self.next_size = self.next_start_us = self.next_end_us = 0

    def withdraw(self, now_us: cython.longlong, most: cython.longlong) -> int:
        """Takes as much as is held, up to `most`, and returns how much that was."""
        found: cython.longlong = self.held(now_us)
        if found > most:
            found = most
        self.take(now_us, found)
        return found

    def put_back(self, now_us: cython.longlong, spent_us: cython.longlong, cost: cython.longlong) -> int:
        """Takes back what was spent at `spent_us` if the batch it came from may still be spent; returns how much it took."""
        if self.requested_us <= spent_us and now_us < self.end_us and self.left + cost <= self.size:
            self.left += cost
            return cost
        return 0

    # Batches ---------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another batch may be fetched: when the one that is being spent runs low or tokens are scarce."""
        if self.left == 0 and self.next_left > 0:
            self.promote_next()
        return bool(self.next_left == 0 and (self.scarce or self.left <= max(0, self.low_mark)))

    def add_batch(
        self,
        size: cython.longlong,
        start_us: cython.longlong,
        end_us: cython.longlong,
        charged_at: cython.longlong,
        source: str,
        requested_us: cython.longlong,
    ) -> None:
        self.next_left = self.next_size = size
        self.next_start_us = start_us
        self.next_end_us = end_us
        self.next_charged_at = charged_at
        self.next_source = SOURCES.index(source)
        self.next_requested_us = requested_us
        if self.left == 0:
            self.promote_next()

    def take_unspent(self, now_us: cython.longlong, all_of_it: cython.bint = False) -> list[Unspent]:
        """Takes out what may no longer be spent, or everything."""
        second: cython.longlong = 0
        first: cython.longlong = 0
        if all_of_it or now_us >= self.next_end_us:
            second = self.next_left
            self.next_left = 0
        if all_of_it or now_us >= self.end_us:
            first = self.left
            self.left = self.end_us = 0
        parts = []
        if second:
            parts.append(Unspent(self, second, self.next_size, self.next_charged_at, SOURCES[self.next_source]))
        if first:
            parts.append(Unspent(self, first, self.size, self.charged_at, SOURCES[self.source]))
            if self.next_left:
                self.promote_next()
        return parts

    def drop(self) -> None:
        """Forgets the batches and the refusal."""
        self.left = self.next_left = 0
        self.forget_refusal()

    # Refusals --------------------------------------------------------------------------------------------------

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def refuses(self, now_us: cython.longlong, cost: cython.longlong) -> cython.bint:
        """Whether this cost is known to be refused until `refused_until_us`."""
        return now_us < self.refused_until_us and cost >= self.refused_min and cost <= self.refused_max

    def refuse(self, min_cost: int, max_cost: int, until_us: int, recheck_us: int, remaining: int = 0) -> None:
        """Keeps a refusal. After `recheck_us` the parent is asked again, since other nodes may have given back."""
        self.refused_min, self.refused_max, self.refused_until_us, self.refused_left = min_cost, max_cost, until_us, remaining
        self.recheck_us = min(until_us, recheck_us)

    def forget_refusal(self) -> None:
        """Forgets the refusal, because the key's state at the parent was changed by another call than a fetch."""
        self.refused_until_us = self.recheck_us = 0
        self.generation += 1

    # Demand ----------------------------------------------------------------------------------------------------

    def measure(self, now_us: int) -> None:
        """Updates the rate of demand: a plain mean at first, then an exponential one over two lives."""
        elapsed = now_us - self.measured_us
        if elapsed > 0:
            self.observed_us = min(self.observed_us + elapsed, 2 * self.terms.life_us)
            self.rate += (float(self.used) / elapsed - self.rate) * min(1.0, elapsed / float(self.observed_us))
            self.used = 0
            self.measured_us = now_us

    def exclude_wait(self, sent_us: int, now_us: int, used: int) -> None:
        """Leaves the time that a lone caller waited for the parent out of the measurement: it says nothing about demand."""
        if self.used == used and self.measured_us <= sent_us:
            self.measured_us += now_us - sent_us

    def next_batch(self, now_us: int, cost: int, round_trip_us: int) -> int:
        """The size of the next batch, at most four times the last: a first estimate of demand may be far off."""
        self.measure(now_us)
        terms: LeaseTerms = self.terms
        if terms.fixed_batch and not self.oversized:
            return max(cost, int(terms.fixed_batch))
        by_demand = int(self.rate * terms.life_us * 0.75)
        return max(cost, 1, min(terms.largest_batch(round_trip_us), 4 * int(self.size), by_demand))

    def set_low_mark(self, round_trip_us: int) -> None:
        """Sets the level below which the next batch is fetched; a single token is fetched when a call needs it."""
        size = max(int(self.size), int(self.next_size))
        self.low_mark = -1 if size <= 1 else max(1, min(size // 4, int(self.rate * 2 * round_trip_us) + 1))

    def set_scarce_size(self, size: int, wait_us: int, round_trip_us: int) -> None:
        """Sets the batch to ask for while tokens are scarce: half of what fits into a life behind the nodes queued ahead."""
        terms: LeaseTerms = self.terms
        ahead = wait_us * terms.tokens_per_us - size
        fits = int((terms.life_us * terms.tokens_per_us - ahead) / 2)
        self.scarce_size = max(1, min(terms.largest_batch(round_trip_us), fits))

    def adapt(self, size: int, wanted: int, wait_us: int, remaining: int, round_trip_us: int) -> None:
        """Learns from a grant of `size`, `wait_us` from now, whether tokens are scarce, and what to request next if so."""
        terms: LeaseTerms = self.terms
        was_scarce = self.scarce
        if wait_us:
            self.scarce = True
            self.set_scarce_size(size, wait_us, round_trip_us)
        elif terms.continuous:
            self.scarce = size < wanted
            if self.scarce and was_scarce:  # granted at once: there is more than estimated
                self.scarce_size = min(terms.largest_batch(round_trip_us), 2 * self.scarce_size)
        elif was_scarce:
            self.scarce = remaining < size
            self.scarce_size = min(terms.scarce_batch, self.scarce_size + 1)
        else:
            self.scarce = size < wanted // 2 and not terms.windowed

    def needs_early_fetch(self, round_trip_us: int) -> bool:
        """Whether a scarce batch is spent before a reply comes, so that the next must be requested as it begins."""
        return bool(self.scarce and self.rate * 8 * round_trip_us > self.size)

    def is_refilled_anyway(self, amount: int) -> bool:
        """Whether giving this back is not worth a call: the parent is half full, and gains as much within a lease life."""
        terms: LeaseTerms = self.terms
        plenty = 2 * self.parent_left >= terms.limit.capacity
        return bool(terms.continuous and plenty and amount <= terms.tokens_per_us * terms.life_us)
