"""What is asked of a lease's parent, told apart from how: plans that both colours follow.

A plan is a generator. It yields a call for the parent, `(verb, arguments)`, or a `Flight` to wait for, and is sent the answer.
`run` drives it with the parent's sync face, `arun` with its async one.

    cold      a key without demand: the call itself goes to the parent, and its answer comes back as it is
    filling   a batch. When the whole batch is not there, what is there; when nothing is and tokens come one by one, a batch that
              begins later: then this node knows that nothing comes before, and the parent is asked once for a batch however
              many are refused meanwhile. Windows say themselves when they begin again
    waiting   what may wait goes to the parent whole, after everything in hand was given back: nobody overtakes
    several   all limits from their leases, or all of it from the parent
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..algorithms.claim import Claim
from ..algorithms.verdict import MAX_WAIT
from ..decision import Decision, Decisions
from ..errors import StoreError
from .attendant import running_loop
from .lease import Lease, Terms

if TYPE_CHECKING:
    from .leased import LeasedStore

Plan = Generator[Any, Any, Any]
_turns = itertools.count()
#: A refusal is believed for so long; then the parent is asked again, since others may have given back.
TRUST_US = 1_000_000
#: So many keys go back in one call.
GROUP = 256
#: So many keys are fetched in one call.
FETCHES = 64
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
                    step.wait()
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
                    await step.await_it()
                else:
                    answer = await getattr(store.store, "a" + step[0])(*step[1])
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value


# One limit -------------------------------------------------------------------------------------------------------------


def deciding(store: LeasedStore, claims: list[Claim], wait_us: int, commit: bool) -> Plan:
    """One decision that RAM could not make."""
    patient = wait_us > 0 and not any(not claim.limit.limit.reserves for claim in claims)
    if store.exact and len(claims) > 1:
        return (yield from through(store, claims, wait_us, commit))
    if patient and commit:
        return (yield from waiting(store, claims, wait_us))
    if patient:
        return (yield from through(store, claims, wait_us, commit))
    if len(claims) > 1:
        return (yield from several(store, claims, commit))
    claim = claims[0]
    return (yield from asking(store, store.agreed(claim.limit), claim.key, claim.cost, commit))


def waiting(store: LeasedStore, claims: list[Claim], wait_us: int) -> Plan:
    """What may wait stands in the parent's line, with nothing of this node ahead of it."""
    yield from returning(store, all_in_hand(store, claims))
    return (yield from through(store, claims, wait_us, True))


def through(store: LeasedStore, claims: Sequence[Claim], wait_us: int, commit: bool) -> Plan:
    """The parent's own answer to the claims as they are."""
    if commit:
        store.touch(claims)
    theirs = store.theirs(claims)
    return (yield "decide", (theirs, None if wait_us >= MAX_WAIT else wait_us, commit))


def asking(store: LeasedStore, terms: Terms, key: str, cost: int, commit: bool) -> Plan:
    """One limit, one key, now."""
    if not terms.leased or cost <= 0:
        return (yield from through(store, [Claim(terms.named, key, cost)], 0, commit))
    lease: Lease | None = terms.leases.get(key)
    if not commit:
        return (yield from peeking(store, terms, lease, key, cost))
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
        found = store.told(terms, lease, store.moment_us(), cost)
        if found is not None:
            return found
    return (yield from cold(store, terms, lease, key, cost))


def peeking(store: LeasedStore, terms: Terms, lease: Lease | None, key: str, cost: int) -> Plan:
    """What a hit would be told: what is in hand counts, the parent is asked about the rest."""
    hand = 0 if lease is None else lease.in_hand(store.moment_us())
    decision = yield "decide", ([Claim(terms.theirs, key, max(0, cost - hand))], 0, False)
    return with_hand(terms, decision, hand)


def cold(store: LeasedStore, terms: Terms, lease: Lease | None, key: str, cost: int) -> Plan:
    """The call itself, less what is in hand; the parent's answer."""
    held = turns = 0
    if lease is not None:
        turns = lease.turns
        now_us = store.moment_us()
        with store.lock:
            held = lease.withdraw(now_us, cost)
    sent_us = store.moment_us() if not store.controlled else 0
    try:
        decision = yield "decide", ([Claim(terms.theirs, key, cost - held)], 0, True)
    except BaseException:
        put_back(store, lease, held)
        raise
    now_us = store.heard(decision, sent_us)
    if not decision.allowed:
        put_back(store, lease, held)
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
            watch(store, lease, now_us + store.life_us)
        return lease


# Batches ---------------------------------------------------------------------------------------------------------------


def leading(store: LeasedStore, terms: Terms, lease: Lease, cost: int, wanted: int) -> Plan:
    """Fetches a batch for everybody who needs it, and answers its own call from it."""
    yield from fetching(store, [(lease, cost, wanted)])
    found = store.told(terms, lease, store.moment_us(), cost)
    return found if found is not None else (yield from cold(store, terms, lease, lease.key, cost))


def fetching(store: LeasedStore, wants: Iterable[tuple[Lease, int, int]]) -> Plan:
    """Batches for some leases, those that are asked for in the same way in one call."""
    flights = [(lease, Flight(running_loop())) for lease, _, _ in wants]
    for lease, flight in flights:
        lease.flight = flight
    try:
        asks = [(plan, plan.send(None)) for plan in (filling(store, *want) for want in wants)]
        while asks:
            late = asks[0][1][1]
            now = [ask for ask in asks if ask[1][1] == late]
            asks = [ask for ask in asks if ask[1][1] != late]
            if len(now) == 1:
                answers = [(yield "decide", ([now[0][1][0]], late, True))]
            else:
                answers = yield "decide_many", ([[ask[1][0]] for ask in now], late)
            for (plan, _), answer in zip(now, answers, strict=True):
                try:
                    asks.append((plan, plan.send(answer)))
                except StopIteration:
                    pass
    except StoreError as error:
        for _, flight in flights:
            flight.error = error
        raise
    finally:
        for lease, flight in flights:
            lease.flight = None
            flight.land()


def filling(store: LeasedStore, lease: Lease, cost: int, wanted: int) -> Plan:
    """Asks for a batch until something is granted or nothing is there: yields (claim, how late it may begin), is sent answers."""
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
            granted(store, lease, size, wanted, sent_us, now_us, decision)
            return
        if decision.retry_us < 0:
            return
        if not lease.dry and size > cost and decision.remaining >= cost:  # a part of it is there
            size = min(size - 1, decision.remaining)
            continue
        soon = ahead == 0 and decision.retry_us <= terms.life_us
        if terms.walled or (ahead == patience and (size == cost or soon)):
            break
        if lease.dry:
            lease.share = max(1, lease.share * 3 // 4)
            size = cost if not terms.paced else size
        lease.dry = lease.thrifty = True
        size, ahead = max(cost, min(size, int(lease.share))), patience
    refuse(store, lease, cost, size, now_us, decision, ahead)


def granted(store: LeasedStore, lease: Lease, size: int, wanted: int, sent_us: int, now_us: int, decision: Decision) -> None:
    """A batch is in hand, now or from a moment to come."""
    terms, wait_us = lease.terms, decision.wait_us
    end_us = sent_us + wait_us + terms.life_us
    if terms.walled:
        end_us = min(end_us, sent_us + decision.reset_us)
    start_us = now_us + wait_us if wait_us else sent_us
    retire(store, lease, now_us)
    with store.lock:
        lease.put(size, start_us, end_us, decision.start_us, sent_us)
    if wait_us:
        lease.dry = True
        lease.deny(1, size, start_us, start_us)
    elif not lease.dry and size < wanted // 2:
        lease.dry = not terms.walled
    elif terms.paced or decision.remaining >= size:
        lease.dry = False
    if lease.dry and 16 * wait_us > 15 * terms.life_us:
        lease.share = max(1, lease.share - 1)
    elif lease.dry and 4 * wait_us < 3 * terms.life_us:
        lease.share = min(terms.fair, lease.share + 1 + lease.share // 8)
    lease.watch_low(store.trip_us)
    watch(store, lease, end_us if not lease.hurries(store.trip_us) else max(now_us + 1, start_us - 2 * store.trip_us))
    if store.attendant is not None:
        store.attendant.ring()


# Several limits, several decisions -----------------------------------------------------------------------------------------


def several(store: LeasedStore, claims: list[Claim], commit: bool) -> Plan:
    """Several limits: what is in hand counts, the parent decides about the rest of all of them together."""
    held = hold(store, claims, store.moment_us(), commit)
    asked = claims if not any(held) else [less(claim, part) for claim, part in zip(claims, held, strict=True)]
    decision = None
    try:
        decision = yield from through(store, asked, 0, commit)
    finally:
        if commit and (decision is None or not decision.allowed):
            for claim, part in zip(claims, held, strict=True):
                put_back(store, store.agreed(claim.limit).leases.get(claim.key), part)
    if commit:
        notice(store, claims, decision)
    if not any(held) or (commit and decision.allowed):
        return decision
    return beside(decision, held)


def hold(store: LeasedStore, claims: Sequence[Claim], now_us: int, commit: bool) -> list[int]:
    """How much of each claim is in hand; taken out of it, to be spent or put back."""
    found = []
    for claim in claims:
        lease = store.agreed(claim.limit).leases.get(claim.key)
        part = 0
        if lease is not None and claim.cost > 0:
            with store.lock:
                part = lease.withdraw(now_us, claim.cost) if commit else min(lease.in_hand(now_us), claim.cost)
        found.append(part)
    return found


def put_back(store: LeasedStore, lease: Lease | None, part: int) -> None:
    """What was held, and is not spent after all."""
    if lease is not None and part:
        with store.lock:
            lease.put_back(store.moment_us(), MAX_WAIT, part)


def less(claim: Claim, part: int) -> Claim:
    return Claim(claim.limit, claim.key, claim.cost - part)


def notice(store: LeasedStore, claims: Sequence[Claim], decision: Decision) -> None:
    """These keys are in demand: from now on they have leases, and what was refused is known."""
    now_us = store.moment_us()
    for claim, part in zip(claims, decision.decisions, strict=True):
        terms = store.agreed(claim.limit)
        if not terms.leased or claim.cost <= 0:
            continue
        lease = terms.leases.get(claim.key) or remembered(store, terms, claim.key, claim.cost, now_us)
        if lease is None:
            continue
        if not part.allowed and part.retry_us > 0:
            refuse(store, lease, claim.cost, claim.cost, now_us, part)
        elif not lease.queued and lease.flight is None and lease.has_room() and lease.wanted(now_us, 1) > 1:
            store.ring(lease)


def beside(decision: Decision, hands: Sequence[int]) -> Decision:
    """A decision about several limits with what is in hand beside it."""
    parts = [more(part, hand) for part, hand in zip(decision.decisions, hands, strict=True)]
    at = [part.name for part in decision.decisions].index(decision.name)
    speaker = more(decision, hands[at])
    fields = (speaker.allowed, speaker.limit, speaker.remaining, speaker.retry_us, speaker.reset_us, speaker.wait_us)
    return Decisions(parts, *fields, speaker.start_us, speaker.name)


def more(decision: Decision, hand: int) -> Decision:
    times = (decision.retry_us, decision.reset_us, decision.wait_us, decision.start_us)
    return Decision(decision.allowed, decision.limit, decision.remaining + hand, *times, decision.name)


def deciding_many(store: LeasedStore, asks: list[list[Claim]], wait_us: int) -> Plan:
    """Each from RAM where that can be; the others go to the parent together."""
    found: list[Any] = [None] * len(asks)
    if not store.exact:
        for i, claims in enumerate(asks):
            found[i] = store.ram(claims, wait_us, True)[1]
    left = [i for i, decision in enumerate(found) if decision is None]
    if not left:
        return found
    for i in left:
        store.touch(asks[i])
    answers = yield "decide_many", ([store.theirs(asks[i]) for i in left], None if wait_us >= MAX_WAIT else wait_us)
    for i, decision in zip(left, answers, strict=True):
        found[i] = decision
        if not store.exact and not wait_us:
            notice(store, asks[i], decision)
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
        with store.lock:
            if lease is not None and cost < 0:
                cost += lease.withdraw(now_us, -cost)
            elif lease is not None and charged_at >= 0:
                cost -= lease.put_back(now_us, charged_at - store.apart_us, cost)
        if cost == claim.cost:
            yield "give_back", (store.theirs([claim]), charged_at)
        elif cost:
            yield "give_back", ([Claim(store.agreed(claim.limit).theirs, claim.key, cost, claim.charged)], charged_at)


# In the background ---------------------------------------------------------------------------------------------------------


def watch(store: LeasedStore, lease: Lease, at_us: int) -> None:
    """Has a lease looked at by then."""
    if not lease.watch_us or at_us < lease.watch_us:
        lease.watch_us = at_us
        heapq.heappush(store.watched, (at_us, next(_turns), lease))


def tidy(store: LeasedStore, now_us: int, budget: int) -> None:
    """Looks at leases that may have ended: what they still have is to go back, those that are idle are forgotten."""
    while store.watched and budget > 0 and store.watched[0][0] <= now_us:
        budget -= 1
        at_us, _, lease = heapq.heappop(store.watched)
        if at_us != lease.watch_us:  # it was looked at before
            continue
        lease.watch_us = 0
        idle = now_us - lease.seen_us >= store.life_us
        retire(store, lease, now_us, idle)
        if idle and lease.trusted_until_us <= now_us and lease.flight is None:
            forget(store, lease)
            continue
        if lease.dry and not lease.queued and lease.has_room():
            store.ring(lease)
        ends = [end for end in (lease.end_us * bool(lease.left), lease.next_end_us) if end > now_us]
        watch(store, lease, min([*ends, now_us + store.life_us]))


def retire(store: LeasedStore, lease: Lease, now_us: int, all_of_it: bool = False) -> None:
    """What may no longer be spent goes back, unless that is not worth a call."""
    with store.lock:
        parts = lease.spoiled(now_us, all_of_it)
    for part in parts:
        lease.thrifty = True
        if not lease.refills_by_itself(part[0]):
            store.spoiled.append((lease, *part))


def forget(store: LeasedStore, lease: Lease) -> None:
    with store.lock:
        if lease.terms.leases.get(lease.key) is lease:
            del lease.terms.leases[lease.key]
            store.keys -= 1


def everything(store: LeasedStore) -> list[Any]:
    """All that is in hand."""
    found: list[Any] = [store.spoiled.popleft() for _ in range(len(store.spoiled))]
    for terms in list(store.terms.values()):
        for lease in list(terms.leases.values()):
            with store.lock:
                found += [(lease, *part) for part in lease.spoiled(0, True)]
    return found


def all_in_hand(store: LeasedStore, claims: Sequence[Claim]) -> list[Any]:
    """Everything in hand for these keys, taken out."""
    leases = [store.agreed(claim.limit).leases.get(claim.key) for claim in claims]
    with store.lock:
        return [(lease, *part) for lease in leases if lease is not None for part in lease.spoiled(0, True)]


def returning(store: LeasedStore, spoiled: Iterable[Any]) -> Plan:
    """Gives batches back that were not spent: a few each to the moment it was charged at, many of them together."""
    parts = list(spoiled)
    alone = [part for part in parts if len(parts) <= FEW or not (part[0].terms.paced or part[0].terms.walled)]
    for lease, left, size, charged_at in alone:
        yield "give_back", ([Claim(lease.terms.theirs, lease.key, left, size)], charged_at)
    grouped = [] if len(alone) == len(parts) else [part for part in parts if part[0].terms.paced or part[0].terms.walled]
    for i in range(0, len(grouped), GROUP):
        claims = [Claim(lease.terms.theirs, lease.key, left, size) for lease, left, size, _ in grouped[i : i + GROUP]]
        yield "give_back", (claims, -1)


def tending(store: LeasedStore) -> Plan:
    """One round of the background."""
    now_us = store.moment_us()
    tidy(store, now_us, 1_000_000)
    if now_us < store.quiet_until_us:
        return
    spoiled = [store.spoiled.popleft() for _ in range(len(store.spoiled))]
    yield from returning(store, spoiled)
    while store.due:
        wants: list[tuple[Lease, int, int]] = []
        while store.due and len(wants) < FETCHES:
            lease = store.due.popleft()
            lease.queued = False
            if lease.flight is None and lease.has_room():
                wants.append((lease, 1, lease.wanted(now_us, 1)))
        if wants:
            yield from fetching(store, wants)
    store.backoff_us = 0
