"""One lease: what a node has in hand for one key, and what it knows of its parent.

A batch of `size` tokens was charged at the parent at `charged_at`; they may be spent from `start_us` until `end_us`, which is
one lease life after they were asked for. A second batch waits behind the first, so that the next is there before the
first runs out. A refusal is kept too: until `denied_until_us` a cost between `denied_least` and `denied_most` is refused here.

    demand   rate ← rate + (used / elapsed − rate) · elapsed / min(age, 2 · life)               tokens per µs
    size     ¾ · rate · life, at least 1, at most a quarter of the capacity (or what comes in an eighth of a life or in four
             round trips, if that is more); or fixed, as long as it is spent within its life
    low      what is used during two round trips, at least 1, at most a quarter of the batch: below it, the next is fetched

Batches last ¾ of a life, so that a steady key spends them all before they expire. Held at once: a batch and a quarter.
Rejected: topping a lease up to its size (held is then the size exactly, but every fetch is smaller than a batch), and one
life for everything in hand (a token could be kept for ever by renewing it, and a bound by `rate × life` would be lost).
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import Limit
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, LimitHandle
else:
    from ...algorithms.claim import NamedLimit
    from ...algorithms.limit import Limit
    from ..cell_store import CellStore, LimitHandle

from ...algorithms.fixed_window import FixedWindow


@cython.cclass
class LeaseTerms(LimitHandle):
    """How one limit is leased: whether at all, in what sizes, and under which limit the parent knows it."""

    __slots__ = ("fair", "fixed", "leased", "leases", "life_us", "most", "named", "paced", "theirs", "tokens_us", "walled")

    def __init__(
        self, store: CellStore, named: NamedLimit, theirs: NamedLimit, fixed: cython.longlong, life_us: cython.longlong
    ) -> None:
        limit: Limit = theirs.limit
        super().__init__(store, named, 1, 0)
        self.named = named
        self.theirs = theirs
        self.leases: dict[str, Lease] = {}
        self.leased = limit.refunds  # a queue paces every single start: there is nothing to hand out ahead
        self.paced = limit.gain > 0  # tokens come one by one, not all at once when a window ends
        self.walled = isinstance(limit, FixedWindow)  # what is not spent when the window ends is worth nothing
        self.life_us = life_us
        self.tokens_us = float(limit.count) / float(limit.period)
        comes = self.tokens_us * life_us
        most = max(1, limit.capacity // 4, min(limit.capacity, int(comes / 8)))
        self.most = most if fixed == 0 else min(fixed, limit.capacity)
        self.fixed = 0 if fixed == 0 else self.most
        self.fair = max(1, min(self.most, int(comes / 2)))  # where there is not enough for all

    def ceiling(self, trip_us: int) -> int:
        """The largest batch: a far parent's is at least what comes in during four round trips."""
        if self.fixed:
            return int(self.fixed)
        return max(int(self.most), min(int(self.limit.capacity), int(4 * self.tokens_us * trip_us)))


@cython.cclass
class Lease:
    """What is in hand for one key."""

    # fmt: off
    __slots__ = ("age_us", "charged_at", "denials", "denied_least", "denied_left", "denied_most", "denied_until_us", "dry",
                 "end_us", "flight", "key", "left", "low", "mark_us", "next_charged_at", "next_end_us", "next_left",
                 "next_since_us", "next_size", "next_start_us", "queued", "rate", "reset_us", "seen_us", "share", "since_us",
                 "size", "spare", "start_us", "terms", "thrifty", "trusted_until_us", "turns", "used", "watch_us")
    # fmt: on

    def __init__(self, terms: LeaseTerms, key: str, now_us: cython.longlong) -> None:
        self.terms = terms
        self.key = key
        self.seen_us = self.mark_us = now_us
        self.share = terms.fair
        self.low = -1
        self.size = 1
        if not cython.compiled:
            self.left = self.start_us = self.end_us = self.charged_at = self.since_us = 0
            self.next_left = self.next_size = self.next_start_us = self.next_end_us = self.next_charged_at = 0
            self.next_since_us = self.denied_least = self.denied_most = self.denied_until_us = self.denied_left = 0
            self.reset_us = self.used = self.age_us = self.denials = self.watch_us = self.spare = self.turns = (
                self.trusted_until_us
            ) = 0
            self.rate = 0.0
            self.dry = self.queued = self.thrifty = False
            self.flight: Any = None

    # Spending --------------------------------------------------------------------------------------------------

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def hand(self, now_us: cython.longlong) -> cython.longlong:
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
        """Spends from what is in hand, all of the cost or nothing."""
        if self.left >= cost and now_us < self.end_us and now_us >= self.start_us:
            self.left -= cost
            return True
        return self.take_across(now_us, cost)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def take_across(self, now_us: cython.longlong, cost: cython.longlong) -> cython.bint:
        """Spends what is left of the first batch and goes on with the second."""
        if self.hand(now_us) < cost or cost <= 0:
            return False
        if now_us < self.end_us and now_us >= self.start_us:
            first: cython.longlong = self.left if self.left < cost else cost
            self.left -= first
            cost -= first
        self.next_left -= cost
        if self.left == 0:
            self.move_up()
        return True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def move_up(self) -> cython.void:
        """The second batch becomes the first."""
        self.left = self.next_left
        self.size = self.next_size
        self.start_us = self.next_start_us
        self.end_us = self.next_end_us
        self.charged_at = self.next_charged_at
        self.since_us = self.next_since_us
        self.next_left = self.next_size = self.next_start_us = self.next_end_us = 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def retry_us(self, now_us: cython.longlong, cost: cython.longlong) -> cython.longlong:
        """How long a cost is refused without asking anybody; 0: it is not."""
        if now_us < self.denied_until_us and cost >= self.denied_least and cost <= self.denied_most:
            return self.denied_until_us - now_us
        return 0

    # What is known of the parent -------------------------------------------------------------------------------

    def in_hand(self, now_us: int) -> int:
        return self.hand(now_us)

    def withdraw(self, now_us: cython.longlong, most: cython.longlong) -> int:
        """Takes out as much as is in hand, up to `most`; how much that was."""
        found: cython.longlong = self.hand(now_us)
        if found > most:
            found = most
        self.take(now_us, found)
        return found

    def refused_us(self, now_us: int, cost: int) -> int:
        return self.retry_us(now_us, cost)

    def is_empty(self) -> bool:
        return bool(self.left == 0 and self.next_left == 0)

    def has_room(self) -> bool:
        """Whether another batch may be fetched: one behind the one that is being spent, when that runs low or is scarce."""
        if self.left == 0 and self.next_left > 0:
            self.move_up()
        return bool(self.next_left == 0 and (self.dry or self.left <= max(0, self.low)))

    def hurries(self, trip_us: int) -> bool:
        """Whether a scarce batch is gone before an answer comes, so that the next has to be asked for as it begins."""
        return bool(self.dry and self.rate * 8 * trip_us > self.size)

    def put(
        self,
        size: cython.longlong,
        start_us: cython.longlong,
        end_us: cython.longlong,
        charged_at: cython.longlong,
        since_us: cython.longlong,
    ) -> None:
        """A batch that the parent granted."""
        self.next_left = self.next_size = size
        self.next_start_us = start_us
        self.next_end_us = end_us
        self.next_charged_at = charged_at
        self.next_since_us = since_us
        if self.left == 0:
            self.move_up()

    def spoiled(self, now_us: cython.longlong, all_of_it: cython.bint = False) -> list[tuple[int, int, int]]:
        """Takes out what may no longer be spent (or everything), as (left, size, charged_at) of each batch."""
        later: cython.longlong = 0
        first: cython.longlong = 0
        if all_of_it or now_us >= self.next_end_us:
            later = self.next_left
            self.next_left = 0
        if all_of_it or now_us >= self.end_us:
            first = self.left
            self.left = self.end_us = 0
        parts = [(later, int(self.next_size), int(self.next_charged_at)), (first, int(self.size), int(self.charged_at))]
        if first and self.left == 0 and self.next_left:
            self.move_up()
        return [part for part in parts if part[0]]

    def deny(self, least: int, most: int, until_us: int, trusted_until_us: int, remaining: int = 0) -> None:
        """Nothing between these costs before a moment; the parent is asked again after a while, others may have given back."""
        self.denied_least, self.denied_most, self.denied_until_us, self.denied_left = least, most, until_us, remaining
        self.trusted_until_us = min(until_us, trusted_until_us)

    def forgive(self) -> None:
        """Something was given back, or charged elsewhere: what was refused is asked for again."""
        self.denied_until_us = self.trusted_until_us = 0
        self.turns += 1

    def drop(self) -> None:
        """Forgets everything in hand."""
        self.left = self.next_left = 0
        self.forgive()

    def put_back(self, now_us: cython.longlong, spent_us: cython.longlong, cost: cython.longlong) -> int:
        """Takes back what was spent at `spent_us`, if the batch it came from may still be spent; how much that was."""
        if self.since_us <= spent_us and now_us < self.end_us and self.left + cost <= self.size:
            self.left += cost
            return cost
        return 0

    # Demand ----------------------------------------------------------------------------------------------------

    def measure(self, now_us: int) -> None:
        """Brings the rate of demand up to date: a plain mean at first, then one that forgets over two lives."""
        elapsed = now_us - self.mark_us
        if elapsed > 0:
            self.age_us = min(self.age_us + elapsed, 2 * self.terms.life_us)
            self.rate += (float(self.used) / elapsed - self.rate) * min(1.0, elapsed / float(self.age_us))
            self.used = 0
            self.mark_us = now_us

    def wanted(self, now_us: int, cost: int, trip_us: int) -> int:
        """The size of the next batch. It grows at most fourfold from one to the next: a first guess may be far off."""
        self.measure(now_us)
        terms: LeaseTerms = self.terms
        if terms.fixed and not self.thrifty:
            return max(cost, int(terms.fixed))
        return max(cost, 1, min(terms.ceiling(trip_us), 4 * int(self.size), int(self.rate * terms.life_us * 0.75)))

    def was_held_up(self, sent_us: int, now_us: int, used: int) -> None:
        """Nobody else came while a caller waited for the parent: that time says nothing about demand."""
        if self.used == used and self.mark_us <= sent_us:
            self.mark_us += now_us - sent_us

    def stand_in_line(self, size: int, wait_us: int, trip_us: int) -> None:
        """The size to ask for next where nodes stand in line: half of what fits into a life behind those ahead of us."""
        terms: LeaseTerms = self.terms
        ahead = wait_us * terms.tokens_us - size
        self.share = max(1, min(terms.ceiling(trip_us), int((terms.life_us * terms.tokens_us - ahead) / 2)))

    def refills_by_itself(self, left: int) -> bool:
        """Whether giving so much back is not worth a call: the parent has plenty, and gains as much within a lease life."""
        terms: LeaseTerms = self.terms
        return bool(terms.paced and left <= terms.tokens_us * terms.life_us and 2 * self.spare >= terms.limit.capacity)

    def watch_low(self, trip_us: int) -> None:
        """Sets the level below which the next batch is fetched; single tokens are fetched when somebody comes."""
        size = max(int(self.size), int(self.next_size))
        self.low = -1 if size <= 1 else max(1, min(size // 4, int(self.rate * 2 * trip_us) + 1))
