"""Refill: fetches batches from the parent store and gives back what was not spent of them.

When the whole batch is not available, what is available is taken. When nothing is:

    bucket, meter    tokens come one by one, so a batch is requested that begins within a lease life. One reply says that nothing
                     comes before then, and that a batch comes then; refusals until then cost the parent nothing. Nodes queue at
                     the parent, so they get their batches in turn
    log, counter     everything is refused here until the batch's own retry
    fixed window     everything is refused here until the next window

While tokens are scarce, each node requests half of what fits into a lease life behind the nodes ahead of it, so n nodes converge
to equal batches of rate × life / (n + 1), whatever each had before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ...algorithms.claim import Claim
from ...decision import STORE, Decision
from ...errors import StoreError
from ..contract import Store
from ..sans_io import Call, Plan
from .lease import Lease, Unspent
from .lease_cache import LeaseCache

#: A refusal is trusted for ¾ of a lease life (by then idle nodes have given back), then for twice that, up to this.
MAX_RECHECK_US = 1_000_000
#: How many keys are given back in one call.
MAX_GIVEN_BACK = 256
#: Up to so many batches are given back one by one, each to the time at which it was charged.
FEW = 8


class PendingFetch:
    """A fetch under way. Callers that need its batch wait for it instead of asking the parent as well (a sans_io Waitable)."""

    def __init__(self) -> None:
        self._loop = running_loop()
        self._done: Future[StoreError | None] = Future()
        self._done.set_running_or_notify_cancel()  # from here on a cancelled waiter can't cancel it

    def finish(self, error: StoreError | None) -> None:
        self._done.set_result(error)

    def can_be_awaited(self) -> bool:
        """Whether the caller may wait: a thread must not wait for an event loop, which may be its own."""
        return self._loop is None or running_loop() is not None

    def wait(self) -> StoreError | None:
        return self._done.result()

    async def await_(self) -> StoreError | None:
        return await asyncio.wrap_future(self._done)


class Want(NamedTuple):
    """A batch to fetch: `size` tokens, at least `cost`."""

    lease: Lease
    cost: int
    size: int


#: Requests of one batch: yields (size, how much later it may begin in µs), is sent the parent's decision.
Requests = Generator[tuple[int, int], Decision, None]


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

    # Fetching --------------------------------------------------------------------------------------------------

    def fetch(self, wants: Sequence[Want]) -> Plan[bool]:
        """Fetches batches; requests that may begin equally late are made in one call. False: all are being fetched already."""
        pending, error = PendingFetch(), None
        with self.cache.lock:
            wants = [want for want in wants if want.lease.pending is None]
            for want in wants:
                want.lease.pending = pending
        try:
            steps = [(want.lease, requests, next(requests)) for want in wants for requests in [self._request(want)]]
            while steps:
                wait_us = steps[0][2][1]
                batch = [step for step in steps if step[2][1] == wait_us]
                steps = [step for step in steps if step[2][1] != wait_us]
                decisions = yield from self._ask([(lease, size) for lease, _, (size, _) in batch], wait_us)
                for (lease, requests, _), decision in zip(batch, decisions, strict=True):
                    try:
                        steps.append((lease, requests, requests.send(decision)))
                    except StopIteration:
                        pass
        except StoreError as failure:
            error = failure
            raise
        finally:
            for want in wants:
                want.lease.pending = None
            pending.finish(error)
        return bool(wants)

    def _ask(self, batches: list[tuple[Lease, int]], wait_us: int) -> Plan[list[Decision]]:
        """The parent's decisions on batches of these sizes."""
        if len(batches) == 1:
            lease, size = batches[0]
            return [(yield Call(self.parent, "decide_one", (lease.terms.parent_limit, lease.key, size, wait_us, True)))]
        claims = [[Claim(lease.terms.parent_limit, lease.key, size)] for lease, size in batches]
        return (yield Call(self.parent, "decide_many", (claims, wait_us)))  # type: ignore[no-any-return]

    def _request(self, want: Want) -> Requests:
        """Requests a batch until something is granted or nothing is available."""
        lease, cost, wanted = want
        cache, terms = self.cache, lease.terms
        longest_us = terms.life_us if terms.continuous else 0
        size, wait_us = wanted, 0
        if lease.scarce:
            size, wait_us = max(cost, min(wanted, int(lease.scarce_size))), longest_us
        for _ in range(4):
            sent_us, generation, used = cache.now_us(), lease.generation, lease.used
            decision = yield size, wait_us
            now_us = self.record_reply(decision, sent_us)
            lease.exclude_wait(sent_us, now_us, used)
            lease.reset_us, lease.parent_left = now_us + decision.reset_us, decision.remaining
            if generation != lease.generation:  # reset meanwhile: whether before or after this charge is unknown
                return
            if decision.allowed:
                self._grant(want, size, sent_us, now_us, decision)
                return
            if decision.retry_us < 0:
                return
            if not lease.scarce and size > cost and decision.remaining >= cost:  # a part of it is available
                size = min(size - 1, decision.remaining)
                continue
            soon = wait_us == 0 and decision.retry_us <= terms.life_us
            if terms.windowed or (wait_us == longest_us and (size == cost or soon)):
                break
            if lease.scarce and terms.continuous:
                lease.set_scarce_size(size, wait_us + decision.retry_us, cache.round_trip_us)
            elif lease.scarce:
                lease.scarce_size = max(1, lease.scarce_size * 3 // 4)
                size = cost
            lease.scarce = lease.oversized = True
            size, wait_us = max(cost, min(size, int(lease.scarce_size))), longest_us
        self.refuse(lease, cost, size, now_us, decision, wait_us)

    def _grant(self, want: Want, size: int, sent_us: int, now_us: int, decision: Decision) -> None:
        """Adds a granted batch to its lease, to be spent from now or from a later start."""
        lease, cache, wait_us = want.lease, self.cache, decision.wait_us
        end_us = sent_us + wait_us + lease.terms.life_us
        if lease.terms.windowed:
            end_us = min(end_us, sent_us + decision.reset_us)
        start_us = now_us + wait_us if wait_us else sent_us
        cache.put_aside(lease, now_us)
        lease.refusals = 0
        with cache.lock:
            lease.add_batch(size, start_us, end_us, decision.start_us, decision.source, sent_us)
        if wait_us:
            lease.refuse(1, size, start_us, start_us)
        lease.adapt(size, want.size, wait_us, decision.remaining, cache.round_trip_us)
        lease.set_low_mark(cache.round_trip_us)
        cache.check_at(lease, end_us)
        if lease.needs_early_fetch(cache.round_trip_us):
            cache.check_at(lease, max(now_us + 1, start_us - 2 * cache.round_trip_us))
        if cache.wake is not None:
            cache.wake()

    def refuse(self, lease: Lease, cost: int, max_cost: int, now_us: int, decision: Decision, wait_us: int = 0) -> None:
        """Keeps a refusal of `cost` until the parent's retry. With lease=1 only a refusal that stays exactly true is kept."""
        terms, exact = lease.terms, self.cache.exact
        if exact and decision.remaining < cost - 1:
            return
        min_cost = cost
        if terms.windowed and not exact:
            max_cost = terms.limit.capacity
        elif max_cost > cost:
            min_cost = 1
        trusted_us = min(MAX_RECHECK_US, 3 * terms.life_us // 4 << min(20, lease.refusals))
        lease.refusals += 1
        until_us = now_us + decision.retry_us + wait_us
        lease.refuse(min_cost, max_cost, until_us, now_us + trusted_us, decision.remaining if exact else 0)

    # Giving back -----------------------------------------------------------------------------------------------

    def give_back(self, parts: Sequence[Unspent]) -> Plan[None]:
        """Gives unspent batches back: a few each to the time at which it was charged, many of them together."""
        together = [part for part in parts if len(parts) > FEW and can_go_together(part)]
        for part in parts:
            if len(parts) <= FEW or not can_go_together(part):
                yield Call(self.parent, "give_back", ([claim_of(part)], part.charged_at, part.source))
        for i in range(0, len(together), MAX_GIVEN_BACK):
            yield Call(self.parent, "give_back", ([claim_of(part) for part in together[i : i + MAX_GIVEN_BACK]], -1))


def can_go_together(part: Unspent) -> bool:
    """Whether the time of the charge does not matter to the parent."""
    terms = part.lease.terms
    return bool(terms.continuous or terms.windowed) and part.source == STORE


def claim_of(part: Unspent) -> Claim:
    return Claim(part.lease.terms.parent_limit, part.lease.key, part.amount, part.size)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
