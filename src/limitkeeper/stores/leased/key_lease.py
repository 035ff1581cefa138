"""Lease: the batches of tokens that a node holds for one key, the refusal it knows of, and the key's demand.

A batch of `size` tokens, charged at the parent at `charged_at`, may be spent from `start_us` until `end_us`, one lease life after
it was requested. A second batch (`next_…`) follows it, so that it is there before the first runs out.

    demand     rate ← rate + (used / elapsed − rate) · elapsed / min(observed, 2 · life)           tokens per µs
    size       ¾ · rate · life, so that a steady key spends a batch before it expires; at least 1, at most a quarter of the
               capacity (or what the limit grants in four round trips, or while tokens are scarce an eighth of the demand in a
               life, if that is more: with smaller batches an overload would cost more calls); or fixed
    low mark   what is used during two round trips, at least 1, at most a quarter of the batch: a call that leaves less has the
               next one fetched. No batch is fetched without a call: it could take what another node was told to come for

Rejected: topping a lease up to its size (every fetch is then smaller than a batch), and one life for everything held (renewing
would keep a token for ever, and the bound `rate × life` would be lost).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import TOP, UNKNOWN
from ...algorithms.fixed_window import FixedWindow
from ...algorithms.limit import Limit
from ...decision import STORE, Decision

if TYPE_CHECKING:
    from .lease_refill import PendingMove

#: Sources of a charge at the parent; a lease keeps the index, which it can copy without the interpreter's lock.
SOURCES = (STORE, "lease", "local_share", "open", "closed")


class Unspent(NamedTuple):
    """What was not spent of a batch: `amount` of `size`, charged at `charged_at` by `source`; `end_us` is when the batch ends.
    `reset_id` as in Claim."""

    lease: Lease
    amount: int
    size: int
    charged_at: int
    source: str
    reset_id: int
    end_us: int = 0

    def claim(self) -> Claim:
        return Claim(self.lease.terms.parent_limit, self.lease.key, self.amount, self.size, self.reset_id)


def amount_of(parts: Iterable[Unspent]) -> int:
    return sum(part.amount for part in parts)


def less(claim: Claim, held: int) -> Claim:
    """The claim without what is held of its cost."""
    return Claim(claim.named, claim.key, max(0, claim.cost - held)) if held else claim


def add_held(decision: Decision, held: int) -> Decision:
    """The parent's decision with what is held added to what remains."""
    if not held:
        return decision
    times = (decision.retry_us, decision.reset_us, decision.wait_us, decision.start_us)
    remaining = decision.remaining + held
    return Decision(decision.allowed, decision.limit, remaining, *times, decision.name, decision.source)


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
        self.has_siblings = False  # other rates are used under this name: what they charge is charged to this one too
        self.users = -1  # how many have registered it; −1: none of its users does. At 0 it goes with its last lease
        self.leases: dict[str, Lease] = {}
        self.leasable = limit.refunds  # a queue paces every single start: there is nothing to spend ahead
        self.continuous = limit.gain > 0  # tokens come one by one, not all at once when a window ends
        self.windowed = isinstance(limit, FixedWindow)  # a batch ends with its window
        self.dated = not self.continuous and not self.windowed  # a charge is given back to its own time
        self.life_us = life_us
        self.tokens_per_us = float(limit.count) / float(limit.period)
        self.fixed_batch = min(fixed_batch, limit.capacity)
        # Derated (strict) buckets follow demand up to the fixed size: nodes could hold whole batches in turn while one refills.
        self.follows_demand = not fixed_batch or (self.continuous and parent_limit is not named)
        self.max_batch = self.fixed_batch or max(1, limit.capacity // 4)
        self.scarce_batch = max(1, min(self.max_batch, int(self.tokens_per_us * life_us / 2)))

    def largest_batch(self, round_trip_us: int, scarce_rate: float = 0.0) -> int:
        """The largest batch. Of a far parent at least what the limit grants in four round trips; while tokens are scarce, at
        least an eighth of what is used in a life at this rate."""
        if self.fixed_batch:
            return int(self.fixed_batch)
        least = max(4 * self.tokens_per_us * round_trip_us, min(scarce_rate, self.tokens_per_us) * self.life_us / 8)
        return max(int(self.max_batch), min(int(self.limit.capacity), int(least)))


@cython.cclass
class Lease:
    """What is held for one key. `reset_id` is that of the claims that charged its batches."""

    # fmt: off
    __slots__ = ("charged_at", "check_us", "end_us", "generation", "key", "last_used_us", "left", "low_mark", "measured_us",
                 "next_charged_at", "next_end_us", "next_left", "next_requested_us", "next_size", "next_source",
                 "next_start_us", "observed_us", "oversized", "parent_left", "pending", "promised_us", "queued", "rate",
                 "recheck_us", "refusals", "refused_held", "refused_left", "refused_max", "refused_min", "refused_until_us",
                 "requested_us", "reset_id", "reset_us", "resets", "scarce", "scarce_size", "size", "source", "start_us",
                 "terms", "trusted_us", "used")
    # fmt: on

    def __init__(self, terms: LeaseTerms, key: str, now_us: cython.longlong) -> None:
        if not cython.compiled:
            self.left = self.start_us = self.end_us = self.charged_at = self.source = self.requested_us = 0
            self.next_left = self.next_size = self.next_start_us = self.next_end_us = 0
            self.next_charged_at = self.next_source = self.next_requested_us = 0
            self.refused_min = self.refused_max = self.refused_until_us = self.refused_left = self.refusals = 0
            self.refused_held = self.trusted_us = self.promised_us = 0
            self.recheck_us = self.reset_us = self.observed_us = self.used = 0
            self.parent_left = self.generation = self.resets = self.check_us = 0
            self.rate = 0.0
            self.scarce = self.queued = self.oversized = False
        self.terms = terms
        self.key = key
        self.last_used_us = self.measured_us = now_us
        self.scarce_size = terms.scarce_batch
        self.low_mark = -1
        self.reset_id = UNKNOWN
        self.size = 1
        self.pending: PendingMove | None = None

    def fetching(self) -> PendingMove | None:
        """The fetch under way. One that is done may still be in `pending`: a signal handler raised before it was removed."""
        pending: PendingMove | None = self.pending
        return None if pending is None or pending.done else pending

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
        if not self.terms.dated:
            return self.take_from_both(now_us, cost)
        if self.next_left < cost or now_us >= self.next_end_us or now_us < self.next_start_us or cost <= 0:
            return False
        self.swap()
        self.left -= cost
        return True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def most_at_once(self, now_us: cython.longlong) -> cython.longlong:
        """The largest cost that one call can spend. A charge of a dated limit has one time, so it comes from one batch."""
        if not self.terms.dated:
            return self.held(now_us)
        first: cython.longlong = self.left if now_us < self.end_us and now_us >= self.start_us else 0
        second: cython.longlong = self.next_left if now_us < self.next_end_us and now_us >= self.next_start_us else 0
        return first if first > second else second

    def earliest(self, from_us: cython.longlong, cost: cython.longlong) -> int:
        """When one batch can be spent for a cost, `from_us` or later; TOP: none."""
        found: cython.longlong = TOP
        if self.left >= cost and from_us < self.end_us:
            found = max(from_us, self.start_us)
        if self.next_left >= cost and from_us < self.next_end_us:
            found = min(found, max(from_us, self.next_start_us))
        return found

    def take_at(self, at_us: cython.longlong, cost: cython.longlong) -> int:
        """Spends a cost of the batch that `earliest` found; returns when that was charged."""
        if self.left >= cost and self.start_us <= at_us < self.end_us:
            self.left -= cost
            return int(self.charged_at)
        self.next_left -= cost
        return int(self.next_charged_at)

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
    def swap(self) -> cython.void:
        """Exchanges the two batches; of an empty first one nothing is kept."""
        left: cython.longlong = self.left
        size: cython.longlong = self.size
        start_us: cython.longlong = self.start_us
        end_us: cython.longlong = self.end_us
        charged_at: cython.longlong = self.charged_at
        source: cython.longlong = self.source
        requested_us: cython.longlong = self.requested_us
        self.promote_next()
        if left > 0:
            self.next_left = left
            self.next_size = size
            self.next_start_us = start_us
            self.next_end_us = end_us
            self.next_charged_at = charged_at
            self.next_source = source
            self.next_requested_us = requested_us

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

    def promote_if_empty(self) -> None:
        """Makes the second batch the first if nothing is left of that."""
        if self.left == 0 and self.next_left > 0:
            self.promote_next()

    @cython.cfunc
    def take_parts(self, first: cython.longlong, second: cython.longlong) -> list[Unspent]:
        """Takes amounts out of the two batches. They are taken before their parts are made: making an object may let another
        thread run, which would spend them too. An empty batch stays in its place, so that `restore` finds it."""
        size: cython.longlong = self.size
        charged_at: cython.longlong = self.charged_at
        source: cython.longlong = self.source
        next_size: cython.longlong = self.next_size
        next_charged_at: cython.longlong = self.next_charged_at
        next_source: cython.longlong = self.next_source
        reset_id: cython.longlong = self.reset_id
        end_us: cython.longlong = self.end_us
        next_end_us: cython.longlong = self.next_end_us
        self.left -= first
        self.next_left -= second
        parts: list[Unspent] = []
        if first:
            parts.append(Unspent(self, first, size, charged_at, SOURCES[source], reset_id, end_us))
        if second:
            parts.append(Unspent(self, second, next_size, next_charged_at, SOURCES[next_source], reset_id, next_end_us))
        return parts

    def withdraw(self, now_us: cython.longlong, most: cython.longlong) -> list[Unspent]:
        """Takes as much as is held, up to `most`."""
        found: cython.longlong = min(self.held(now_us), most)
        first: cython.longlong = min(found, self.left) if self.start_us <= now_us < self.end_us else 0
        return self.take_parts(first, found - first)

    def restore(self, now_us: cython.longlong, charged_at: cython.longlong, cost: cython.longlong) -> int:
        """Takes back what was withdrawn from the batch charged at `charged_at` while that may be spent; returns how much."""
        back: cython.longlong = 0
        if charged_at == self.charged_at and now_us < self.end_us:
            back = min(cost, self.size - self.left)
            self.left += back
        elif charged_at == self.next_charged_at and now_us < self.next_end_us:
            back = min(cost, self.next_size - self.next_left)
            self.next_left += back
        return back

    def put_back(self, now_us: cython.longlong, spent_us: cython.longlong, charged_at: int, cost: cython.longlong) -> int:
        """Takes back what a caller spent at `spent_us` if the batch may still be spent; returns how much it took."""
        if self.requested_us > spent_us and not self.terms.dated:
            return 0
        own = self.terms.dated or spent_us > now_us  # a start to come goes back to the batch that begins then
        back = self.restore(now_us, charged_at if own else self.charged_at, cost)
        return back if back or spent_us <= now_us else self.add_to_later(spent_us, cost)

    def add_to_later(self, start_us: cython.longlong, cost: cython.longlong) -> int:
        """Adds a start to come that was given up to what was spent of a batch that begins after it: the parent could give nothing
        back, since that batch is reserved behind. It then ends one life after this start. Returns how much it took."""
        back: cython.longlong = 0
        end_us: cython.longlong = start_us + self.terms.life_us
        if start_us < self.start_us < min(self.end_us, end_us):
            back = min(cost, self.size - self.left)
            self.left += back
            self.end_us = min(self.end_us, end_us) if back else self.end_us
        elif start_us < self.next_start_us < min(self.next_end_us, end_us):
            back = min(cost, self.next_size - self.next_left)
            self.next_left += back
            self.next_end_us = min(self.next_end_us, end_us) if back else self.next_end_us
        return back

    def exchange(self, start_us: cython.longlong, charged_at: int, cost: cython.longlong) -> int:
        """Keeps a start to come that was given up in the place of as much of a batch that begins after it; returns when that was
        charged: it is reserved behind, so the parent can give it back."""
        end_us: cython.longlong = start_us + self.terms.life_us
        if start_us < self.next_start_us < min(self.next_end_us, end_us) and cost <= self.next_left:
            self.next_end_us = min(self.next_end_us, end_us)
            return int(self.next_charged_at)
        if start_us < self.start_us < min(self.end_us, end_us) and cost <= self.left:
            self.end_us = min(self.end_us, end_us)
            return int(self.charged_at)
        return charged_at

    def charged_from(self, charged_at: int) -> bool:
        """Whether a batch was charged at this start or a later one."""
        first = charged_at <= self.charged_at and self.end_us > 0
        return bool(first or (charged_at <= self.next_charged_at and self.next_end_us > 0))

    def has_room(self) -> bool:
        """Whether another batch may be fetched: when the one that is being spent runs low or tokens are scarce."""
        self.promote_if_empty()
        return bool(self.next_left == 0 and (self.scarce or self.left <= max(0, self.low_mark)))

    def make_room(self) -> list[Unspent]:
        """Takes out the second batch if both hold something, so that another can be added: the background of threads and that of
        an event loop may fetch for one lease, and a caller may put back while a batch is being fetched."""
        return self.take_parts(0, self.next_left if self.left else 0)

    def add_batch(
        self, size: int, start_us: int, end_us: int, charged_at: int, source: str, requested_us: int, reset_id: int
    ) -> None:
        """Adds a second batch. If it says that the key was reset after the first was charged, the first is void."""
        if reset_id > 0 and reset_id != self.reset_id:
            self.drop()
        self.promote_if_empty()
        self.refused_until_us = 0
        self.reset_id = reset_id
        self.next_left = self.next_size = size
        self.next_start_us = start_us
        self.next_end_us = end_us
        self.next_charged_at = charged_at
        self.next_source = SOURCES.index(source)
        self.next_requested_us = requested_us
        if self.left == 0:
            self.promote_next()

    def take_unspent(
        self, now_us: cython.longlong, all_of_it: cython.bint = False, latest_us: cython.longlong = TOP
    ) -> list[Unspent]:
        """Takes out what may no longer be spent, or everything that begins by `latest_us`."""
        second: cython.bint = (all_of_it and self.next_start_us <= latest_us) or now_us >= self.next_end_us
        first: cython.bint = (all_of_it and self.start_us <= latest_us) or now_us >= self.end_us
        if second:
            self.next_end_us = 0
        if first:
            self.end_us = 0
        parts = self.take_parts(self.left if first else 0, self.next_left if second else 0)
        if first:
            self.promote_if_empty()
        return parts[::-1]  # the later charge is given back first

    def drop(self) -> None:
        """Forgets the batches and the refusal, because the charges were deleted at the parent."""
        self.left = self.next_left = self.end_us = self.next_end_us = 0
        self.reset_id = UNKNOWN
        self.resets += 1
        self.forget_refusal()

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def refused_until(self, now_us: cython.longlong, cost: cython.longlong, fresh: cython.bint) -> cython.longlong:
        """Until when this cost is known to be refused; 0: unknown. A batch that begins later answers for what it holds. The
        parent's refusal holds while nothing of what was held then has been spent, and is trusted for a while, or if `fresh`."""
        until_us: cython.longlong = 0
        if now_us < self.start_us and cost <= self.left:
            until_us = self.start_us
        if now_us < self.next_start_us and cost <= self.next_left and (until_us == 0 or self.next_start_us < until_us):
            until_us = self.next_start_us
        if until_us or self.left + self.next_left != self.refused_held or cost < self.refused_min or cost > self.refused_max:
            return until_us
        known_us: cython.longlong = self.refused_until_us if fresh or now_us < self.trusted_us else 0
        return known_us if now_us < known_us else 0

    def refuse(
        self, min_cost: int, max_cost: int, until_us: int, trusted_us: int, recheck_us: int, now_us: int, remaining: int = 0
    ) -> None:
        """Keeps the parent's refusal. Until `trusted_us` it is answered here; after `recheck_us` the parent is asked meanwhile,
        since other nodes may have given back. What was promised is asked for as promised (`promised_us`)."""
        self.refused_min, self.refused_max, self.refused_until_us, self.refused_left = min_cost, max_cost, until_us, remaining
        self.refused_held = self.left + self.next_left
        self.trusted_us = min(until_us, trusted_us)
        self.recheck_us = min(until_us, recheck_us)
        if self.promised_us <= now_us or until_us < self.promised_us:
            self.promised_us = until_us

    def forget_refusal(self, changed: bool = True) -> None:
        """Forgets the refusal, because the key's state at the parent was changed by another call than a fetch. With `changed`
        also one that is on its way."""
        self.refused_until_us = self.recheck_us = 0
        self.generation += int(changed)

    def promise_is_due(self, now_us: int) -> bool:
        """Whether a call was refused until now or before, by the parent's word: then it is asked for at once. True once."""
        due = bool(0 < self.promised_us <= now_us)
        if due:
            self.promised_us = 0
        return due

    def reserves_ahead(self, now_us: int, cost: int) -> bool:
        """Whether a call that the parent has refused until later is made sure of by a batch that begins then."""
        return bool(self.terms.continuous and now_us < self.promised_us and self.probably_spent() >= cost)

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
        if not terms.follows_demand and not self.oversized:
            return max(cost, int(terms.fixed_batch))
        usable_us = min(terms.life_us, self.reset_us - now_us) if terms.windowed and self.reset_us > now_us else terms.life_us
        most = min(
            terms.largest_batch(round_trip_us, self.rate if self.scarce else 0.0),
            4 * int(self.size),
            int(self.rate * usable_us * 0.75),
        )
        few = self.probably_spent() < 0 and not self.scarce
        return max(cost, 1, min(most, int(self.parent_left) // 4) if few else most)

    def probably_spent(self) -> int:
        """How many of m expected calls come in a life even if few come: m − 1.5 √m (at random, 1 in 15 has fewer); or −1, also
        while demand was observed for less than a life: two calls that happen to meet are no demand."""
        expected = float(self.rate * min(int(self.observed_us), int(self.terms.life_us)))
        return int(expected - 1.5 * expected**0.5) if expected >= 6.25 else -1

    def scarce_batch(self, most: int) -> int:
        """The batch to ask for while tokens are scarce; `most` of one that may begin later, −1: it begins now."""
        return int(self.scarce_size) if most < 0 else min(int(self.scarce_size), most)

    def is_idle(self, now_us: int) -> bool:
        """Whether nothing came for half a life, since a batch that began later began; of a key in demand, although four calls
        were expected meanwhile."""
        begin_us = max(self.start_us if self.left else 0, self.next_start_us if self.next_left else 0)
        idle_us = now_us - max(int(self.last_used_us), begin_us)
        return bool(2 * idle_us >= self.terms.life_us and (self.probably_spent() < 0 or self.rate * idle_us >= 4))

    def set_low_mark(self, round_trip_us: int) -> None:
        """Sets the level below which the next batch is fetched; a single token is fetched when a call needs it. A scarce batch
        that is spent before a reply comes is followed from its first call on."""
        size = max(int(self.size), int(self.next_size))
        self.low_mark = -1 if size <= 1 else max(1, min(size // 4, int(self.rate * 2 * round_trip_us) + 1))
        if self.scarce and self.rate * 8 * round_trip_us > self.size:
            self.low_mark = size

    def set_scarce_size(self, size: int, wait_us: int, round_trip_us: int) -> None:
        """Sets the batch to ask for while tokens are scarce: half of what fits into a life behind the nodes queued ahead."""
        terms: LeaseTerms = self.terms
        ahead = wait_us * terms.tokens_per_us - size
        fits = int((terms.life_us * terms.tokens_per_us - ahead) / 2)
        self.scarce_size = max(1, min(terms.largest_batch(round_trip_us, self.rate), fits))

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
                self.scarce_size = min(terms.largest_batch(round_trip_us, self.rate), 2 * self.scarce_size)
        elif was_scarce:
            self.scarce = remaining < size
            self.scarce_size = min(terms.scarce_batch, self.scarce_size + 1)
        else:
            self.scarce = size < wanted // 2 and not terms.windowed
