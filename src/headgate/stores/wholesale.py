"""What is asked of a lease's parent, told apart from how: plans that both colours follow.

A plan is a generator. It yields a call for the parent, `(verb, arguments)`, or a `Flight` to wait for, and is sent the answer. `run`
drives it with the parent's sync face, `arun` with its async one.

    cold      a key without demand: the call itself goes to the parent, and its answer comes back as it is
    filling   a batch. When the whole batch is not there, what is there; when nothing is and tokens come one by one, a batch that
              begins later: then this node knows that nothing comes before, and the parent is asked once for a batch however
              many are refused meanwhile. Windows say themselves when they begin again
    waiting   what may wait goes to the parent whole, after everything in hand was given back: nobody overtakes
    several   all limits from their leases, or all of it from the parent
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..algorithms.claim import Claim
from ..algorithms.verdict import MAX_WAIT
from ..decision import Decision
from ..errors import StoreError
from .lease import Lease, Terms

if TYPE_CHECKING:
    from .leased import LeasedStore

Plan = Generator[Any, Any, Any]
#: A refusal is believed for so long; then the parent is asked again, since others may have given back.
TRUST_US = 1_000_000
#: So many keys go back in one call.
GROUP = 256
#: Fewer than this go back one by one, each to the moment at which it was charged.
FEW = 8


class Flight:
    """A batch on its way. Others who need it wait for it instead of asking as well."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.error: StoreError | None = None
        self._landed = threading.Event()
        self._waiters: list[tuple[Any, Any]] = []

    def land(self) -> None:
        self._landed.set()
        while self._waiters:
            loop, future = self._waiters.pop()
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop is gone, and whoever waited in it
                pass

    def can_be_awaited(self, loop: Any) -> bool:
        """A thread must not wait for a loop: it may be that loop's own."""
        return loop is not None or self.loop is None

    def wait(self) -> None:
        self._landed.wait()

    async def await_it(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiters.append((loop, future))
        if self._landed.is_set():
            self.land()
        await future


def _wake(future: Any) -> None:
    if not future.done():
        future.set_result(None)


# Driving ---------------------------------------------------------------------------------------------------------------


def run(store: LeasedStore, plan: Plan) -> Any:
    """Follows a plan with the parent's sync face."""
    answer: Any = None
    try:
        step = plan.send(None)
        while True:
            try:
                if isinstance(step, Flight):
                    answer = step.wait()
                else:
                    answer = getattr(store.store, step[0])(*step[1])
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value


async def arun(store: LeasedStore, plan: Plan) -> Any:
    """Follows a plan with the parent's async face."""
    answer: Any = None
    try:
        step = plan.send(None)
        while True:
            try:
                if isinstance(step, Flight):
                    answer = await step.await_it()
                else:
                    answer = await getattr(store.store, "a" + step[0])(*step[1])
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value


def running_loop() -> Any:
    """The loop whose turn this is, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


# One limit -------------------------------------------------------------------------------------------------------------


def deciding(store: LeasedStore, claims: list[Claim], wait_us: int, commit: bool) -> Plan:
    """One decision that RAM could not make."""
    if len(claims) > 1:
        return (yield from through(store, claims, wait_us, commit))
    claim = claims[0]
    terms = store.agreed(claim.limit)
    if not terms.leased or (store.exact and wait_us):
        return (yield from through(store, claims, wait_us, commit))
    return (yield from asking(store, terms, claim.key, claim.cost, wait_us, commit))


def through(store: LeasedStore, claims: Sequence[Claim], wait_us: int, commit: bool) -> Plan:
    """The parent's own answer to the claims as they are."""
    if commit:
        store.touch(claims)
    theirs = store.theirs(claims)
    return (yield "decide", (theirs, None if wait_us >= MAX_WAIT else wait_us, commit))


def asking(store: LeasedStore, terms: Terms, key: str, cost: int, wait_us: int, commit: bool) -> Plan:
    """One limit, one key."""
    if not terms.leased or cost <= 0:
        return (yield from through(store, [Claim(terms.named, key, cost)], wait_us, commit))
    lease: Lease | None = terms.leases.get(key)
    if not commit:
        return (yield from peeking(store, terms, lease, key, cost, wait_us))
    if wait_us and terms.limit.reserves:
        return (yield from waiting(store, terms, lease, key, cost, wait_us))
    for _ in range(3):
        if lease is None and (store.exact or not terms.fixed):
            break
        if lease is None:
            lease = remembered(store, terms, key, cost, store.moment_us())
        if lease is None:
            break
        now_us = store.moment_us()
        wanted = lease.wanted(now_us, cost)
        if store.exact or wanted <= cost or lease.in_hand(now_us):
            break
        if lease.flight is None:
            return (yield from leading(store, terms, lease, cost, wanted))
        loop = running_loop()
        if not lease.flight.can_be_awaited(loop):
            break
        flight = lease.flight
        yield flight
        if flight.error is not None:
            raise flight.error
        found = store.told(terms, lease, store.moment_us(), cost, 0)
        if found is not None:
            return found
    return (yield from cold(store, terms, lease, key, cost))


def peeking(store: LeasedStore, terms: Terms, lease: Lease | None, key: str, cost: int, wait_us: int) -> Plan:
    """What a hit would be told: what is in hand counts, the parent is asked about the rest."""
    hand = 0 if lease is None else lease.in_hand(store.moment_us())
    claim = Claim(terms.theirs, key, max(0, cost - hand))
    decision = yield "decide", ([claim], None if wait_us >= MAX_WAIT else wait_us, False)
    return with_hand(terms, decision, hand)


def waiting(store: LeasedStore, terms: Terms, lease: Lease | None, key: str, cost: int, wait_us: int) -> Plan:
    """What may wait stands in the parent's line, with nothing of this node ahead of it."""
    if lease is not None:
        now_us = store.moment_us()
        yield from returning(store, [(lease, *part) for part in lease.spoiled(now_us, True)])
    return (yield from through(store, [Claim(terms.named, key, cost)], wait_us, True))


def cold(store: LeasedStore, terms: Terms, lease: Lease | None, key: str, cost: int) -> Plan:
    """The call itself, less what is in hand; the parent's answer."""
    held = turns = 0
    if lease is not None:
        turns = lease.turns
        now_us = store.moment_us()
        held = lease.in_hand(now_us)
        lease.spend(now_us, held)
    sent_us = store.moment_us() if not store.controlled else 0
    try:
        decision = yield "decide", ([Claim(terms.theirs, key, cost - held)], 0, True)
    except BaseException:
        if lease is not None and held:
            lease.put_back(store.moment_us(), MAX_WAIT, held)
        raise
    now_us = store.heard(decision, sent_us)
    if not decision.allowed and held and lease is not None:
        lease.put_back(now_us, MAX_WAIT, held)
    if lease is None:
        if store.exact and (decision.allowed or decision.retry_us < 0):
            return with_hand(terms, decision, 0)
        lease = remembered(store, terms, key, cost, now_us)
    if lease is not None:
        lease.reset_us = now_us + decision.reset_us
        if not decision.allowed and decision.retry_us > 0 and turns == lease.turns:
            refuse(store, lease, cost, cost, now_us, decision)
    hand = 0 if lease is None else lease.in_hand(now_us)
    return with_hand(terms, decision, hand)


def refuse(store: LeasedStore, lease: Lease, cost: int, most: int, now_us: int, decision: Decision, ahead_us: int = 0) -> None:
    """Nothing of such costs before the parent's moment. With lease=1 only what stays exactly true until then is kept."""
    if store.exact and decision.remaining < cost - 1:
        return
    until_us = now_us + decision.retry_us + ahead_us
    least = cost
    if lease.terms.walled and not store.exact:
        most = lease.terms.limit.capacity
    elif most > cost:
        least = 1
    lease.deny(least, most, until_us, now_us + TRUST_US, decision.remaining if store.exact else 0)


def with_hand(terms: Terms, decision: Decision, hand: int) -> Decision:
    """The parent's answer, with what is in hand beside it and under the limit's own name."""
    if not hand and terms.theirs is terms.named:
        return decision
    parts = (decision.retry_us, decision.reset_us, decision.wait_us, decision.start_us)
    return Decision(decision.allowed, decision.limit, decision.remaining + hand, *parts, terms.name)


def remembered(store: LeasedStore, terms: Terms, key: str, cost: int, now_us: int) -> Lease | None:
    """A lease for a key, with nothing in hand yet; None when there are too many keys."""
    tidy(store, now_us, 2)
    if store.keys >= store.max_keys:
        return None
    with store.lock:
        lease: Lease = terms.leases.get(key) or Lease(terms, key, now_us)
        if key not in terms.leases:
            terms.leases[key] = lease
            lease.used = cost
            store.keys += 1
            watch(store, lease, now_us)
        return lease


# Batches ---------------------------------------------------------------------------------------------------------------


def leading(store: LeasedStore, terms: Terms, lease: Lease, cost: int, wanted: int) -> Plan:
    """Fetches a batch for everybody who needs it, and answers its own call from it."""
    flight = lease.flight = Flight(running_loop())
    decision = None
    try:
        plan = filling(store, lease, cost, wanted)
        ask = next(plan)
        while True:
            decision = yield "decide", ([ask[0]], ask[1], True)
            ask = plan.send(decision)
    except StopIteration:
        pass
    except StoreError as error:
        flight.error = error
        raise
    finally:
        lease.flight = None
        flight.land()
    more = decision.remaining if decision is not None and decision.allowed else 0
    found = store.told(terms, lease, store.moment_us(), cost, more)
    return found if found is not None else (yield from cold(store, terms, lease, lease.key, cost))


def filling(store: LeasedStore, lease: Lease, cost: int, wanted: int) -> Plan:
    """Asks for a batch until something is granted or nothing is there: yields (claim, how late it may begin), is sent Decisions."""
    terms = lease.terms
    patience = terms.life_us if terms.paced else 0
    size, ahead = wanted, 0
    if lease.dry:
        size, ahead = max(cost, min(wanted, int(lease.share))), patience
    for _ in range(4):
        sent_us, turns = store.moment_us(), lease.turns
        decision = yield Claim(terms.theirs, lease.key, size), ahead
        now_us = store.heard(decision, sent_us)
        lease.reset_us, lease.spare = now_us + decision.reset_us, decision.remaining
        if turns != lease.turns:  # reset meanwhile: whether this was charged before or after, nobody knows
            return
        if decision.allowed:
            granted(store, lease, size, sent_us, now_us, decision)
            return
        if decision.retry_us < 0:
            return
        if not lease.dry and size > cost and decision.remaining >= cost:  # a part of it is there
            size = min(size - 1, decision.remaining)
            continue
        if terms.walled or (ahead == patience and (size == cost or (not ahead and decision.retry_us <= terms.life_us))):
            break
        if lease.dry:
            lease.share = max(1, lease.share * 3 // 4)
            size = cost if not terms.paced else size
        lease.dry = lease.thrifty = True
        size, ahead = max(cost, min(size, int(lease.share))), patience
    refuse(store, lease, cost, size, now_us, decision, ahead)


def granted(store: LeasedStore, lease: Lease, size: int, sent_us: int, now_us: int, decision: Decision) -> None:
    """A batch is in hand, now or from a moment to come."""
    terms, wait_us = lease.terms, decision.wait_us
    end_us = sent_us + wait_us + terms.life_us
    if terms.walled:
        end_us = min(end_us, sent_us + decision.reset_us)
    start_us = now_us + wait_us if wait_us else sent_us
    lease.put(size, start_us, end_us, decision.start_us, sent_us)
    if wait_us:
        lease.dry = True
        lease.deny(1, size, start_us, start_us)
        if 4 * wait_us > 3 * terms.life_us:
            lease.share = max(1, lease.share - 1)
        elif 2 * wait_us < terms.life_us:
            lease.share = min(terms.most, lease.share + 1 + lease.share // 8)
    elif terms.paced or decision.remaining >= size:
        lease.dry = False
    lease.watch_low(store.trip_us)
    watch(store, lease, now_us)
    if store.attendant is not None:
        store.attendant.ring()


# Several limits, several decisions -----------------------------------------------------------------------------------------


def deciding_many(store: LeasedStore, asks: list[list[Claim]], wait_us: int) -> Plan:
    """Each from RAM where that can be; the others go to the parent together."""
    found: list[Any] = [None] * len(asks)
    if not store.exact:
        for i, claims in enumerate(asks):
            if len(claims) == 1:
                found[i] = store.ram(claims, wait_us, True)[1]
    left = [i for i, decision in enumerate(found) if decision is None]
    if left:
        for i in left:
            store.touch(asks[i])
        theirs = [store.theirs(asks[i]) for i in left]
        answers = yield "decide_many", (theirs, None if wait_us >= MAX_WAIT else wait_us)
        for i, decision in zip(left, answers, strict=True):
            found[i] = decision
    return found


def giving_back(store: LeasedStore, claims: list[Claim], charged_at: int) -> Plan:
    """To where the charge was made: into the hand it came from while that may be spent, else to the parent."""
    store.touch(claims)
    if store.exact:
        yield "give_back", (store.theirs(claims), charged_at)
        return
    now_us = store.moment_us()
    for claim in claims:
        lease = store.agreed(claim.limit).leases.get(claim.key)
        cost = claim.cost
        if lease is not None and cost < 0:
            paid = min(lease.in_hand(now_us), -cost)
            lease.spend(now_us, paid)
            cost += paid
        elif lease is not None and charged_at >= 0:
            cost -= lease.put_back(now_us, charged_at - store.apart_us, cost)
        if cost == claim.cost:
            yield "give_back", (store.theirs([claim]), charged_at)
        elif cost:
            yield "give_back", ([Claim(store.agreed(claim.limit).theirs, claim.key, cost, claim.charged)], charged_at)


# In the background ---------------------------------------------------------------------------------------------------------


def watch(store: LeasedStore, lease: Lease, now_us: int) -> None:
    """Has a lease looked at when it ends."""
    if not lease.watched:
        lease.watched = True
        at = max(now_us + 1, min(lease.end_us, now_us + store.life_us)) if lease.left else now_us + store.life_us
        store.watched.append((at, lease))


def tidy(store: LeasedStore, now_us: int, budget: int) -> None:
    """Looks at leases that may have ended: what they still have is to go back, those that are idle are forgotten."""
    while store.watched and budget > 0 and store.watched[0][0] <= now_us:
        budget -= 1
        lease = store.watched.popleft()[1]
        lease.watched = False
        idle = now_us - lease.seen_us >= store.life_us
        for part in lease.spoiled(now_us, idle):
            lease.thrifty = True
            if not lease.refills_by_itself(part[0]):
                store.spoiled.append((lease, *part))
        if idle and lease.trusted_until_us <= now_us and lease.flight is None:
            with store.lock:
                if lease.terms.leases.pop(lease.key, None) is not None:
                    store.keys -= 1
        else:
            watch(store, lease, now_us)


def everything(store: LeasedStore) -> list[Any]:
    """All that is in hand."""
    found: list[Any] = []
    for terms in list(store.terms.values()):
        for lease in list(terms.leases.values()):
            found += [(lease, *part) for part in lease.spoiled(0, True)]
    return found


def returning(store: LeasedStore, spoiled: Iterable[Any]) -> Plan:
    """Gives batches back that were not spent."""
    for lease, left, size, charged_at in spoiled:
        claim = Claim(lease.terms.theirs, lease.key, left, size)
        yield "give_back", ([claim], charged_at)


def tending(store: LeasedStore) -> Plan:
    """One round of the background."""
    now_us = store.moment_us()
    tidy(store, now_us, 1_000_000)
    spoiled = list(store.spoiled)
    store.spoiled.clear()
    yield from returning(store, spoiled)
    while store.due:
        lease = store.due.popleft()
        lease.queued = False
        if lease.flight is None and lease.has_room(now_us):
            wanted = lease.wanted(now_us, 1)
            lease.flight = Flight(running_loop())
            try:
                plan = filling(store, lease, 1, wanted)
                ask = next(plan)
                while True:
                    decision = yield "decide", ([ask[0]], ask[1], True)
                    ask = plan.send(decision)
            except StopIteration:
                pass
            finally:
                flight, lease.flight = lease.flight, None
                flight.land()
