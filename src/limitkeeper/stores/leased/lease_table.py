"""Which keys have a lease, when each is looked at again, and what of it has to go back.

A lease is looked at when a batch of it ends, and every half of a lease life: what may no longer be spent, or was not asked for
that long, is put aside for its parent; after a whole life without demand a key is forgotten. New keys do a little of that on
their way in, so that a flood of keys needs no thread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...algorithms.claim import Claim
from .lease import Lease, LeaseTerms

if TYPE_CHECKING:
    from .store import LeasedStore

_turns = itertools.count()


def remembered(store: LeasedStore, terms: LeaseTerms, key: str, cost: int, now_us: int) -> Lease | None:
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
            watch(store, lease, now_us + max(1, store.life_us // 2))
        return lease


def forget(store: LeasedStore, lease: Lease) -> None:
    with store.lock:
        if lease.terms.leases.get(lease.key) is lease:
            del lease.terms.leases[lease.key]
            store.keys -= 1


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
        idle_us = now_us - lease.seen_us
        retire(store, lease, now_us, 2 * idle_us >= store.life_us)
        if idle_us >= store.life_us and lease.trusted_until_us <= now_us and lease.flight is None:
            forget(store, lease)
            continue
        with store.lock:
            room = lease.has_room()
        if lease.hurries(store.trip_us) and not lease.queued:
            if room and lease.left and now_us >= lease.start_us - 2 * store.trip_us:
                store.ring(lease)
            elif lease.left:
                watch(store, lease, max(now_us + store.trip_us // 4, lease.start_us - 2 * store.trip_us) + 1)
        ends = [end for end in (lease.end_us * bool(lease.left), lease.next_end_us) if end > now_us]
        watch(store, lease, min([*ends, now_us + max(1, store.life_us // 2)]))


def retire(store: LeasedStore, lease: Lease, now_us: int, all_of_it: bool = False) -> None:
    """What may no longer be spent goes back, unless that is not worth a call."""
    with store.lock:
        parts = lease.spoiled(now_us, all_of_it)
    for part in parts:
        lease.thrifty = True
        if not lease.refills_by_itself(part[0]):
            store.spoiled.append((lease, *part))


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
