"""Refill: fetches batches of tokens from the parent store before a lease is empty, and gives back what was not spent.

When the whole batch is not available, what is available is taken. When nothing is:

    bucket, meter    a batch is requested that begins within a lease life: one reply says that nothing comes before then, and that
                     a batch comes then; refusals until then cost the parent nothing, and nodes get their batches in turn
    log, counter     everything is refused here until the batch's own retry
    fixed window     everything is refused here until the next window

While tokens are scarce, each node requests half of what fits into a lease life behind the nodes ahead of it, so n nodes converge
to equal batches of rate × life / (n + 1).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...algorithms.claim import Claim
from ...algorithms.constants import MAX_WAIT
from ...decision import STORE, Decision
from ...errors import StoreError
from ..contract import Store
from ..sans_io import Call, Pending, Plan, running_loop
from .key_lease import Lease, Unspent
from .lease_cache import LeaseCache

#: A refusal is trusted for ¾ of a lease life (by then idle nodes have given back), then for twice that, up to this.
MAX_RECHECK_US = 1_000_000
#: How many keys are given back in one call.
MAX_GIVEN_BACK = 256
#: Up to so many batches are given back one by one, each to the time at which it was charged.
FEW = 8


class PendingMove(Pending):
    """A fetch or a round of the background under way; its result is None or its error. Callers that need a batch wait for its
    fetch instead of asking the parent as well; a store that closes waits for both."""

    def __init__(self) -> None:
        super().__init__()
        self._loop, self._thread = running_loop(), threading.get_ident()

    def can_be_awaited(self) -> bool:
        """Whether the caller may wait: for a thread, or for its own event loop. Another one may have stopped, or wait for it."""
        return self._loop is None or self._loop is running_loop()

    def result(self, timeout: float | None = None) -> Any:
        """None at once in the thread that moves: a blocking call on its event loop, or of a signal handler, would wait for
        itself. The caller asks the parent then."""
        return None if self._thread == threading.get_ident() and not self.done else super().result(timeout)

    wait = result


class Want(NamedTuple):
    """A batch to fetch: `size` tokens, at least `cost`."""

    lease: Lease
    cost: int
    size: int


#: Requests of one batch: yields (claim, how much later it may begin in µs), is sent the parent's decision.
Requests = Generator[tuple[Claim, int], Decision, None]


class Refill:
    """Moves tokens between the parent and the leases.

    `parent_time`: leases are timed by the parent, so that a reply's time is the time here. `same_clock`: parent and leases read
    the same clock, so that there is no offset between them.
    """

    def __init__(self, parent: Store, cache: LeaseCache, parent_time: bool, same_clock: bool) -> None:
        self.parent = parent
        self.cache = cache
        self.replies = 0
        self._parent_time = parent_time
        self._same_clock = same_clock

    def record_reply(self, decision: Decision, sent_us: int) -> int:
        """Updates the round trip and the offset of the parent's clock; returns the time."""
        self.replies += 1
        cache, parent_us = self.cache, decision.start_us - decision.wait_us
        if self._parent_time:
            return parent_us
        now_us = cache.now_us()
        cache.round_trip_us += (now_us - sent_us - cache.round_trip_us) // 4
        if not self._same_clock:
            cache.clock_offset_us = parent_us - (now_us + sent_us) // 2
        return now_us

    def fetch(self, wants: Sequence[Want]) -> Plan[bool]:
        """Fetches batches; requests that may begin equally late are made in one call. False: all are being fetched already."""
        pending, error = PendingMove(), None
        try:
            with self.cache.lock:
                wants = [want for want in wants if want.lease.fetching() is None and self.cache.keep(want.lease)]
                for want in wants:
                    want.lease.pending = pending
            yield from self.return_expired([want.lease for want in wants])
            steps = [(requests, *next(requests)) for requests in map(self._request, wants)]
            while steps:
                wait_us = steps[0][2]
                batch = [step for step in steps if step[2] == wait_us]
                steps = [step for step in steps if step[2] != wait_us]
                decisions = yield from self._ask([claim for _, claim, _ in batch], wait_us)
                for (requests, _, _), decision in zip(batch, decisions, strict=True):
                    with suppress(StopIteration):
                        steps.append((requests, *requests.send(decision)))
        except StoreError as failure:
            error = failure
            raise
        finally:
            pending.value = error
            pending.done = True  # first, and without a call: a signal handler can't raise before it
            for want in wants:
                if want.lease.pending is pending:
                    want.lease.pending = None
            pending.wake()
        return bool(wants)

    def _ask(self, claims: list[Claim], wait_us: int) -> Plan[list[Decision]]:
        """The parent's decisions on batches."""
        if len(claims) == 1:
            return [(yield Call(self.parent, "decide", (claims, wait_us)))]
        return (yield Call(self.parent, "decide_many", ([[claim] for claim in claims], wait_us)))  # type: ignore[no-any-return]

    def _request(self, want: Want) -> Requests:
        """Requests a batch until something is granted or nothing is available."""
        lease, cost, wanted = want
        cache, terms = self.cache, lease.terms
        # What begins later goes back in vain, so it is only as much as is probably spent.
        most = lease.probably_spent() if terms.continuous else -1
        longest_us = terms.life_us if most >= 0 else 0
        size, wait_us, promised = wanted, 0, lease.promise_is_due(cache.now_us())
        if promised and not terms.continuous:  # what was refused until now; a part of it would cost more calls
            size = max(cost, min(wanted, lease.refused_max))
        elif lease.scarce and not promised:
            size, wait_us = max(cost, min(wanted, lease.scarce_batch(most))), longest_us
        for attempt in range(4):
            sent_us, generation, resets, used = cache.now_us(), lease.generation, lease.resets, lease.used
            claim = Claim(terms.parent_limit, lease.key, size)
            decision = yield claim, wait_us
            now_us = self.record_reply(decision, sent_us)
            lease.exclude_wait(sent_us, now_us, used)
            lease.reset_us, lease.parent_left = now_us + decision.reset_us, decision.remaining
            if decision.allowed and resets != lease.resets:  # the parent knows whether the reset came before this charge
                cache.unspent.append(Unspent(lease, size, size, decision.start_us, decision.source, claim.reset_id))
            elif decision.allowed:
                self._grant(want, claim, sent_us, now_us, decision)
            if decision.allowed or resets != lease.resets:
                return
            if decision.retry_us < 0 or generation != lease.generation:  # something else was charged or given back meanwhile
                return
            partly = (promised and terms.continuous) or not lease.scarce or self.last_chance_us(lease, now_us) <= now_us
            if partly and size > cost and decision.remaining >= cost:  # a part of it is available
                size = min(size - 1, decision.remaining)
                continue
            soon = wait_us == 0 and decision.retry_us <= terms.life_us and not terms.continuous
            if terms.windowed or (wait_us == longest_us and (size == cost or soon)):
                break
            if lease.scarce and terms.continuous:
                lease.set_scarce_size(size, wait_us + decision.retry_us, cache.round_trip_us)
            elif lease.scarce:
                lease.scarce_size = max(1, lease.scarce_size * 3 // 4)
                size = cost
            lease.scarce = lease.oversized = True
            size, wait_us = max(cost, min(size, lease.scarce_batch(most))), longest_us
            if terms.continuous and (attempt == 2 or not longest_us):
                size = cost  # what is kept is the refusal of the cost itself
        self.refuse(lease, cost, size, now_us, decision, wait_us)

    def _grant(self, want: Want, claim: Claim, sent_us: int, now_us: int, decision: Decision) -> None:
        """Adds a granted batch to its lease, to be spent from now or from a later start."""
        lease, cache, size, wait_us = want.lease, self.cache, claim.cost, decision.wait_us
        end_us = sent_us + wait_us + lease.terms.life_us
        if lease.terms.windowed:
            end_us = min(end_us, sent_us + decision.reset_us)
        start_us = now_us + wait_us if wait_us else sent_us
        cache.put_aside(lease, now_us)
        lease.refusals = 0
        if lease.terms.has_siblings:  # they are charged with this batch too
            cache.forget_refusals(lease.terms.named, lease.key, others=True)
        with cache.lock:
            cache.unspent.extend(lease.make_room())
            lease.add_batch(size, start_us, end_us, decision.start_us, decision.source, sent_us, claim.reset_id)
        lease.adapt(size, want.size, wait_us, decision.remaining, cache.round_trip_us)
        lease.set_low_mark(cache.round_trip_us)
        cache.check_at(lease, end_us)
        if lease.low_mark >= lease.size:  # scarce: checked as it begins, and so again half a life later, when it may be idle
            cache.check_at(lease, max(now_us + 1, start_us - 2 * cache.round_trip_us))
        if cache.wake is not None:
            cache.wake()

    def refuse(self, lease: Lease, cost: int, max_cost: int, now_us: int, decision: Decision, wait_us: int = 0) -> None:
        """Keeps a refusal of `cost` until the parent's retry. With lease=1 only a refusal that stays exactly true is kept."""
        terms, exact = lease.terms, self.cache.exact
        if exact and (terms.has_siblings or decision.remaining or cost > 1):
            return
        min_cost = cost
        if terms.windowed and not exact:
            max_cost = terms.limit.capacity
        elif max_cost > cost:
            min_cost = 1
        pause_us = min(MAX_RECHECK_US, 3 * terms.life_us // 4 << min(20, lease.refusals))
        lease.refusals += 1
        until_us = now_us + decision.retry_us + wait_us
        last_us = self.last_chance_us(lease, now_us)
        recheck_us = min(now_us + pause_us, last_us if last_us > now_us else MAX_WAIT)
        trusted_us = self.trusted_until(lease, cost, now_us, until_us, decision.remaining)
        lease.refuse(min_cost, max_cost, until_us, trusted_us, recheck_us, now_us, decision.remaining if exact else 0)

    def trusted_until(self, lease: Lease, cost: int, now_us: int, until_us: int, remaining: int) -> int:
        """Until when a refusal stays true whatever other nodes do: they can reserve the next token of a bucket one life before
        it comes. Kept for longer: logs and counters, where it would cost too many calls."""
        terms = lease.terms
        if self.cache.exact or not terms.continuous:
            return until_us
        behind = max(0, cost - 1 - self.cache.held(lease))  # tokens that come after the next one
        return now_us if remaining else until_us - int(behind / terms.tokens_per_us) - terms.life_us - 1

    def last_chance_us(self, lease: Lease, now_us: int) -> int:
        """When the last 1/256 of a sliding counter's window begins: what is not taken by its end is lost. Others: never."""
        terms = lease.terms
        if terms.limit.reserves:
            return MAX_WAIT
        window_us = terms.parent_limit.limit.period
        end_us = now_us - (now_us + self.cache.clock_offset_us) % window_us + window_us
        return end_us - max(2 * self.cache.round_trip_us, window_us >> 8)

    def return_expired(self, leases: Sequence[Lease]) -> Plan[bool]:
        """Gives back what may no longer be spent of these leases; False: nothing."""
        now_us = self.cache.now_us()
        expired = [part for lease in leases for part in self.cache.take_expired(lease, now_us)]
        yield from self.give_back(expired)
        return bool(expired)

    def give_back(self, parts: Sequence[Unspent]) -> Plan[None]:
        """Gives unspent batches back: a few each to the time at which it was charged, many of them together."""
        together = [part for part in parts if len(parts) > FEW and can_go_together(part)]
        calls = [([part], part.charged_at, part.source) for part in parts if len(parts) <= FEW or not can_go_together(part)]
        calls += [(together[i : i + MAX_GIVEN_BACK], -1, STORE) for i in range(0, len(together), MAX_GIVEN_BACK)]
        while calls:
            group, charged_at, source = calls.pop(0)
            try:
                yield Call(self.parent, "give_back", ([part.claim() for part in group], charged_at, source))
                for part in group:  # the key may have another lease by now
                    self.cache.forget_refusals(part.lease.terms.named, part.lease.key)
            except BaseException:  # whether this call was executed is unknown; the others were not made
                self.cache.unspent.extend(part for group, _, _ in calls for part in group)
                raise


def can_go_together(part: Unspent) -> bool:
    """Whether the time of the charge does not matter to the parent."""
    terms = part.lease.terms
    return bool(terms.continuous or terms.windowed) and part.source == STORE
