"""The way of a call that RAM could not answer.

cold       a key without demand: the call itself goes to the parent, and its answer comes back as it is
leading    a batch is fetched; who comes meanwhile waits for it instead of asking as well
waiting    what may wait goes to the parent whole, after everything in hand was given back: nobody overtakes
several    what is in hand counts; the parent decides about the rest of all limits together
giving     into the hand it came from while that may be spent, else to the parent
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...algorithms.claim import Claim
from ...algorithms.constants import MAX_WAIT
from ...decision import Decision, Decisions
from .flight import Plan
from .lease import Lease, LeaseTerms
from .lease_table import all_in_hand, remembered
from .maintenance import running_loop
from .refill import fetching, refuse, returning

if TYPE_CHECKING:
    from .store import LeasedStore


# One limit -------------------------------------------------------------------------------------------------------------


def deciding(store: LeasedStore, claims: list[Claim], wait_us: int, commit: bool) -> Plan:
    """One decision that RAM could not make."""
    patient = wait_us > 0 and not any(not claim.limit.limit.reserves for claim in claims)
    if store.exact and len(claims) > 1:
        return (yield from through(store, claims, wait_us, commit))
    if patient and commit:
        decision = None if len(claims) > 1 else (yield from in_demand(store, claims[0]))
        return decision if decision else (yield from waiting(store, claims, wait_us))
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


def in_demand(store: LeasedStore, claim: Claim) -> Plan:
    """A key in demand is leased for those who may wait as well; None when that has no answer without waiting."""
    terms = store.agreed(claim.limit)
    if store.exact or not terms.leased or claim.cost <= 0:
        return None
    lease, now_us = terms.leases.get(claim.key), store.moment_us()
    if lease is None:
        remembered(store, terms, claim.key, claim.cost, now_us)
    elif (
        not lease.dry
        and not lease.refused_us(now_us, claim.cost)
        and lease.wanted(now_us, claim.cost, store.trip_us) > claim.cost
    ):
        return (yield from asking(store, terms, claim.key, claim.cost, True))
    return None


def through(store: LeasedStore, claims: Sequence[Claim], wait_us: int, commit: bool) -> Plan:
    """The parent's own answer to the claims as they are."""
    if commit:
        store.touch(claims)
    theirs = store.theirs(claims)
    return (yield "decide", (theirs, None if wait_us >= MAX_WAIT else wait_us), {"commit": commit})


def asking(store: LeasedStore, terms: LeaseTerms, key: str, cost: int, commit: bool) -> Plan:
    """One limit, one key, now."""
    if not terms.leased or cost <= 0 or cost > terms.limit.capacity:
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
        wanted = lease.wanted(now_us, cost, store.trip_us)
        if store.exact or wanted <= cost or lease.in_hand(now_us):
            break
        flight = lease.flight  # read once: another thread's may land meanwhile
        if flight is None:
            return (yield from leading(store, terms, lease, cost, wanted))
        loop = running_loop()
        if not flight.can_be_awaited(loop):
            break
        yield flight
        if flight.error is not None:
            raise flight.error
        found = store.told(terms, lease, store.moment_us(), cost)
        if found is not None:
            return found
    return (yield from cold(store, terms, lease, key, cost))


def leading(store: LeasedStore, terms: LeaseTerms, lease: Lease, cost: int, wanted: int) -> Plan:
    """Fetches a batch for everybody who needs it, and answers its own call from it."""
    yield from fetching(store, [(lease, cost, wanted)])
    found = store.told(terms, lease, store.moment_us(), cost)
    return found if found is not None else (yield from cold(store, terms, lease, lease.key, cost))


def peeking(store: LeasedStore, terms: LeaseTerms, lease: Lease | None, key: str, cost: int) -> Plan:
    """What a hit would be told: what is in hand counts, the parent is asked about the rest."""
    hand = 0 if lease is None else lease.in_hand(store.moment_us())
    decision = yield "decide", ([Claim(terms.theirs, key, max(0, cost - hand))], 0), {"commit": False}
    return with_hand(terms, decision, hand)


def cold(store: LeasedStore, terms: LeaseTerms, lease: Lease | None, key: str, cost: int) -> Plan:
    """The call itself, less what is in hand; the parent's answer."""
    held = turns = used = 0
    if lease is not None:
        turns, used = lease.turns, lease.used
        now_us = store.moment_us()
        with store.lock:
            held = lease.withdraw(now_us, cost)
    sent_us = 0 if store.controlled else store.moment_us()
    try:
        decision = yield "decide", ([Claim(terms.theirs, key, cost - held)], 0)
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
        lease.was_held_up(sent_us or now_us, now_us, used)
        lease.reset_us = now_us + decision.reset_us
        if decision.allowed:
            lease.denials = 0
        elif decision.retry_us > 0 and turns == lease.turns:
            refuse(store, lease, cost, cost, now_us, decision)
    hand = 0 if lease is None else lease.in_hand(now_us)
    return with_hand(terms, decision, hand)


def put_back(store: LeasedStore, lease: Lease | None, part: int) -> None:
    """What was held, and is not spent after all."""
    if lease is not None and part:
        with store.lock:
            lease.put_back(store.moment_us(), MAX_WAIT, part)


def with_hand(terms: LeaseTerms, decision: Decision, hand: int) -> Decision:
    """The parent's answer, with what is in hand beside it and under the limit's own name."""
    if not hand and terms.theirs is terms.named:
        return decision
    parts = (decision.retry_us, decision.reset_us, decision.wait_us, decision.start_us)
    return Decision(decision.allowed, decision.limit, decision.remaining + hand, *parts, terms.name)


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
        if lease is not None and 0 < claim.cost <= claim.limit.limit.capacity:
            with store.lock:
                part = lease.withdraw(now_us, claim.cost) if commit else min(lease.in_hand(now_us), claim.cost)
        found.append(part)
    return found


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
        elif not lease.queued and lease.flight is None and lease.has_room() and lease.wanted(now_us, 1, store.trip_us) > 1:
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
