"""How batches are fetched from a parent, and how they go back.

When the whole batch is not there, what is there is taken. When nothing is there:

    bucket, meter        tokens come one by one, so a batch is asked for that begins within a lease life. One answer says that
                         nothing comes before then, and that a batch comes then; however many are refused meanwhile, the
                         parent hears nothing. Nodes stand in the parent's line, so they get their batches in turn
    log, counter         the batch's own retry is the moment until which everything is refused here
    fixed window         the window says itself when it begins again

Under scarcity each node asks for half of what fits into a lease life behind those ahead of it, so n nodes come to equal parts of
rate × life / (n + 1), whatever each had before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...algorithms.claim import Claim
from ...decision import Decision
from ...errors import StoreError
from .flight import Flight, Plan
from .lease import Lease
from .lease_table import retire, tidy, watch
from .maintenance import running_loop

if TYPE_CHECKING:
    from .store import LeasedStore

#: A refusal is believed for ¾ of a lease life (then idle nodes have given back what they had), then for twice that, up to this.
TRUST_US = 1_000_000
#: So many keys are fetched in one call.
FETCHES = 64
#: So many keys go back in one call.
GROUP = 256
#: No more than this go back one by one, each to the moment at which it was charged.
FEW = 8


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
                answers = [(yield "decide", ([now[0][1][0]], late))]
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
            if lease.flight is flight:
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
        sent_us, turns, used = store.moment_us(), lease.turns, lease.used
        decision = yield Claim(terms.theirs, lease.key, size), ahead
        now_us = store.heard(decision, sent_us)
        lease.was_held_up(sent_us, now_us, used)
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
        if lease.dry and terms.paced:
            lease.stand_in_line(size, ahead + decision.retry_us, store.trip_us)
        elif lease.dry:
            lease.share = max(1, lease.share * 3 // 4)
            size = cost
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
    lease.denials = 0
    with store.lock:
        lease.put(size, start_us, end_us, decision.start_us, sent_us)
    if wait_us:
        lease.deny(1, size, start_us, start_us)
    adapt(lease, size, wanted, decision, store.trip_us)
    lease.watch_low(store.trip_us)
    watch(store, lease, end_us)
    if lease.hurries(store.trip_us):
        watch(store, lease, max(now_us + 1, start_us - 2 * store.trip_us))
    if store.attendant is not None:
        store.attendant.ring()


def adapt(lease: Lease, size: int, wanted: int, decision: Decision, trip_us: int) -> None:
    """Whether there is enough for all; if not, what to ask for next."""
    terms, was_dry = lease.terms, lease.dry
    if decision.wait_us:
        lease.dry = True
        lease.stand_in_line(size, decision.wait_us, trip_us)
    elif terms.paced:
        lease.dry = size < wanted
        if lease.dry and was_dry:  # it came at once: there is more than was thought
            lease.share = min(terms.ceiling(trip_us), 2 * lease.share)
    elif was_dry:
        lease.dry = decision.remaining < size
        lease.share = min(terms.fair, lease.share + 1)
    else:
        lease.dry = size < wanted // 2 and not terms.walled


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
    trust_us = min(TRUST_US, 3 * store.life_us // 4 << min(20, lease.denials))
    lease.denials += 1
    lease.deny(least, most, until_us, now_us + trust_us, decision.remaining if store.exact else 0)


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
                wants.append((lease, 1, lease.wanted(now_us, 1, store.trip_us)))
        if wants:
            yield from fetching(store, wants)
    store.backoff_us = 0
