"""FairAdmission: the virtual time of weighted fair queueing (Demers, Keshav, Shenker, 1989) as an admission test.

What was admitted drains like the queues of a fluid server of rate C that serves all tenants with a backlog at once, by weight:

    backlog of tenant i   q_i = w_i · (F_i − V)           V: virtual time, F_i: the tenant's finish time, both in units per weight
    dV/dt                 = c / Σ w_j over tenants with a backlog
    c                     = C − Σ g_j over guarantees that are not full
    admitted              when  cost ≤ B − Σ q_j   and   (q_i = 0  or  q_i + cost ≤ (B − Σ_{j≠i} q_j) / 2)

A tenant that always asks keeps a backlog, so it is served at its weighted max-min share; what others do not use is divided among
those that ask. The second condition (the dynamic threshold of Choudhury and Hahne, 1998) leaves room for tenants that come later:
n greedy tenants hold B / (n + 1) each. A guarantee is a token bucket of its own (rate g, size max(2, g · window)), asked first;
while it refills, the fluid server is slower by g, and a full one lends g to the others.

Admitted in any interval T ≤ C · T + B + Σ max(2, g · window). State: t, V, Σ q, Σ w, one F per tenant with a backlog (at most
e · B), and the time at which each guarantee is full. Tenants with a backlog are a binary heap by F, and each knows its place in
it, so a charge moves one tenant: O(log n). Looking ahead (a peek, the wait of a refusal) walks the heap without changing it.
Numbers are doubles, in the order of operations of `fair_share.lua`, which is compared with `==`.
Rejected: a bucket per tenant (the sum of the buckets bounds nothing), shares per round from the demand of the last round (a new
tenant waits for a round, and waits can't be predicted).
"""

from __future__ import annotations

import gc
from heapq import heappop, heappush

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

#: `retry_us` of a cost that can never be admitted.
NEVER: int = -1
#: A time after all others.
LATEST: float = 1e18
if not cython.compiled:
    from math import ceil

    #: allowed, remaining (whole units), retry_us (NEVER: never), reset_us.
    Answer = tuple[bool, int, int, int]
#: t, V, Σ q, Σ w, the finish times of all tenants with a backlog, and when each guarantee is full, in their order.
Dump = tuple[float, float, float, int, dict[str, float], list[float]]


@cython.cclass
class Tenant:
    """A tenant with a backlog (`place` is that in the heap, `finish` its F), or with a guarantee, which is full at `full_at`."""

    __slots__ = ("finish", "full_at", "guarantee", "name", "place", "weight")

    def __init__(self, name: str, weight: int, guarantee: float = 0.0) -> None:
        self.name, self.weight, self.guarantee = name, weight, guarantee
        self.finish = self.full_at = 0.0
        self.place = -1


@cython.cclass
class FairAdmission:
    """The state of one capacity. `rate` and `guarantees` are in units per microsecond, `size` is B in units. `left` counts the
    tenants with a backlog; `ahead` is the frontier of a look ahead in the heap, None otherwise."""

    if not cython.compiled:
        # fmt: off
        __slots__ = ("ahead", "backlog", "collecting", "guaranteed", "guarantees", "heap", "left", "now", "rate", "rounding",
                     "saved", "size", "tenants", "virtual", "weight", "weights", "window")
        # fmt: on

    def __init__(self, rate: float, size: float, window: float, weights: dict[str, int], guarantees: dict[str, float]) -> None:
        self.rate, self.size, self.window = rate, size, window
        self.rounding = 1e-9 + 1e-12 * size  # errors of doubles, in units: more than those of a long history of charges
        self.weights, self.guarantees = weights, guarantees
        self.guaranteed = [Tenant(name, weights.get(name, 1), guarantee) for name, guarantee in guarantees.items()]
        self.saved: tuple[float, float, float, int, int] | None = None
        self.restore((0.0, 0.0, 0.0, 0, {}, [0.0] * len(guarantees)))

    def dump(self) -> Dump:
        """The state as values, for a store."""
        finish = {tenant.name: tenant.finish for tenant in self.heap}
        return self.now, self.virtual, self.backlog, self.weight, finish, [tenant.full_at for tenant in self.guaranteed]

    def restore(self, state: Dump) -> None:
        """Replaces the state by a dumped one."""
        self.now, self.virtual, self.backlog, self.weight, finish, full_at = state
        for tenant, at in zip(self.guaranteed, full_at, strict=True):
            tenant.full_at, tenant.finish, tenant.place = at, 0.0, -1
        self.tenants = {tenant.name: tenant for tenant in self.guaranteed}
        self.heap: list[Tenant] = []
        for name, at in sorted(finish.items(), key=lambda pair: pair[1]):  # a sorted list is a heap
            tenant = self.tenants.setdefault(name, Tenant(name, self.weights.get(name, 1)))
            tenant.finish, tenant.place = at, len(self.heap)
            self.heap.append(tenant)
        self.left = len(self.heap)
        self.ahead: list[tuple[float, int]] | None = None

    def recount(self) -> None:
        """Computes the sums and the heap from the tenants, after an exception that may have come in the middle of a change."""
        if self.ahead is not None:
            self._look_back()
        queued = [tenant for tenant in self.tenants.values() if tenant.finish > self.virtual]
        finish = {tenant.name: tenant.finish for tenant in queued}
        backlog = sum(tenant.weight * (tenant.finish - self.virtual) for tenant in queued)
        weight = sum(tenant.weight for tenant in queued)
        self.restore((self.now, self.virtual, backlog, weight, finish, [tenant.full_at for tenant in self.guaranteed]))

    # Virtual time --------------------------------------------------------------------------------------------

    @cython.ccall
    def advance(self, now: cython.double) -> cython.int:
        """Serves backlogs up to `now`; an earlier time changes nothing."""
        while self.now < now:
            self._serve(self._until(now), self._rate_now())
        return 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _rate_now(self) -> cython.double:
        """The rate of the fluid server: that of the capacity, less what the guarantees refill with."""
        rate: cython.double = self.rate
        tenant: Tenant
        for tenant in self.guaranteed:
            if tenant.full_at > self.now:
                rate -= tenant.guarantee
        return rate

    @cython.cfunc
    @cython.exceptval(check=False)
    def _until(self, until: cython.double) -> cython.double:
        """How long that rate lasts: until the next guarantee is full."""
        tenant: Tenant
        for tenant in self.guaranteed:
            if self.now < tenant.full_at < until:
                until = tenant.full_at
        return until

    @cython.cfunc
    def _serve(self, until: cython.double, rate: cython.double) -> cython.int:
        first: cython.double
        amount: cython.double
        at: cython.double
        tenant: Tenant
        while self.left and rate > 0.0:
            first = self._first()
            amount = (first - self.virtual) * self.weight
            at = self.now + amount / rate
            if at > until:
                amount = (until - self.now) * rate
                self.virtual += amount / self.weight
                self.backlog -= amount
                break
            tenant = self._pop()
            self.virtual = first
            self.now = at
            self.weight -= tenant.weight
            self.backlog -= amount
        if not self.left:
            self.backlog = self.virtual = 0.0  # nothing refers to the virtual time: no error adds up
            self.weight = 0
        self.now = until
        return 0

    # The heap -------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _first(self) -> cython.double:
        """The finish time of the tenant whose backlog ends first."""
        tenant: Tenant
        if self.ahead is not None:
            return self.ahead[0][0]
        tenant = self.heap[0]
        return tenant.finish

    @cython.cfunc
    def _pop(self) -> Tenant:
        """Takes that tenant out of the heap; in a look ahead it is only passed."""
        child: cython.Py_ssize_t
        if self.ahead is None:
            tenant: Tenant = self.heap[0]
            self._remove(tenant)
            return tenant
        place: cython.Py_ssize_t = heappop(self.ahead)[1]
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(self.heap):
                other: Tenant = self.heap[child]
                heappush(self.ahead, (other.finish, child))
        self.left -= 1
        return self.heap[place]

    @cython.cfunc
    def _remove(self, tenant: Tenant) -> cython.int:
        """Takes a tenant out of the heap, and forgets it unless it has a guarantee."""
        last: Tenant = self.heap.pop()
        place: cython.Py_ssize_t = tenant.place
        self.left -= 1
        tenant.place = -1
        tenant.finish = 0.0
        if last is not tenant:
            self._rise(last, self._sink(last, place))
        if tenant.guarantee == 0.0:
            del self.tenants[tenant.name]
        return 0

    @cython.cfunc
    def _sink(self, tenant: Tenant, place: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Puts a tenant at a place, or below it where others end first; its place."""
        heap: list[Tenant] = self.heap
        size: cython.Py_ssize_t = len(heap)
        child: cython.Py_ssize_t = 2 * place + 1
        while child < size:
            lower: Tenant = heap[child]
            if child + 1 < size:
                right: Tenant = heap[child + 1]
                if right.finish < lower.finish:
                    lower = right
            if lower.finish >= tenant.finish:
                break
            child = lower.place
            heap[place] = lower
            lower.place = place
            place = child
            child = 2 * place + 1
        heap[place] = tenant
        tenant.place = place
        return place

    @cython.cfunc
    def _rise(self, tenant: Tenant, place: cython.Py_ssize_t) -> cython.int:
        """Moves a tenant up from its place, above those that end later."""
        heap: list[Tenant] = self.heap
        while place > 0:
            upper: Tenant = heap[(place - 1) // 2]
            if upper.finish <= tenant.finish:
                break
            heap[place] = upper
            upper.place, place = place, (place - 1) // 2
        heap[place] = tenant
        tenant.place = place
        return 0

    # Looking ahead --------------------------------------------------------------------------------------------

    @cython.cfunc
    def _look_ahead(self) -> cython.int:
        """From here on time passes only for a moment: `_look_back` restores the state."""
        self.collecting = gc.isenabled()
        gc.disable()  # a finaliser may hit or refund
        self.saved = (self.now, self.virtual, self.backlog, self.weight, self.left)
        frontier: list[tuple[float, int]] = []
        if self.heap:
            tenant: Tenant = self.heap[0]
            frontier.append((tenant.finish, 0))
        self.ahead = frontier
        return 0

    @cython.cfunc
    def _look_back(self) -> cython.int:
        self.now, self.virtual, self.backlog, self.weight, self.left = self.saved  # type: ignore[misc]
        self.ahead = None
        if self.collecting:
            gc.enable()
        return 0

    # Decisions ------------------------------------------------------------------------------------------------

    @cython.ccall
    def decide(self, name: str, cost: cython.longlong, now: cython.double, commit: cython.bint = True) -> Answer:
        """Admits or refuses. `commit`: what is admitted is charged; otherwise nothing changes."""
        answer: Answer
        if not commit:
            self._look_ahead()
        try:
            self.advance(now)
            answer = self._answer(name, cost, commit)
        finally:
            if self.ahead is not None:
                self._look_back()
        return answer

    @cython.cfunc
    def _answer(self, name: str, cost: cython.longlong, commit: cython.bint) -> Answer:
        now: cython.double = self.now
        tenant: Tenant = self.tenants.get(name)  # type: ignore[assignment]
        known: cython.bint = tenant is not None
        weight: cython.longlong = tenant.weight if known else self.weights.get(name, 1) if self.weights else 1
        guarantee: cython.double = tenant.guarantee if known else 0.0
        queued: cython.double = self._queued(tenant) if known else 0.0
        full_at: cython.double = tenant.full_at if known else 0.0
        full_at = full_at if full_at > now else now
        window: cython.double = (
            max(self.window, 2.0 / guarantee) if guarantee > 0.0 else self.window
        )  # it holds one unit at least
        reserved: cython.double = (now + window - full_at) * guarantee
        free: cython.double = self._free(queued)
        allowed: cython.bint = True
        if guarantee > 0.0 and cost <= reserved + self.rounding:
            if commit:
                full_at = full_at + cost / guarantee
                tenant.full_at = full_at
                reserved -= cost
        elif cost == 0 or cost <= free + self.rounding:
            if commit and cost > 0:
                queued += cost
                self._charge(tenant, name, weight, cost)
                free = self._free(queued)
        else:
            allowed = False
        left: cython.double = max(reserved, free, 0.0) + self.rounding
        drained: cython.double = self.backlog / self.rate
        reset: cython.longlong = whole(drained if drained > full_at - now else full_at - now)
        retry: cython.longlong = 0 if allowed else self._retry(tenant, weight, cost, full_at, guarantee)
        return (allowed, cython.cast(cython.longlong, int(left)), retry, reset)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _queued(self, tenant: Tenant) -> cython.double:
        """The backlog of a tenant; 0 or less when it has ended in a look ahead."""
        return tenant.weight * (tenant.finish - self.virtual) if tenant.place >= 0 and self.left else 0.0

    @cython.cfunc
    @cython.exceptval(check=False)
    def _free(self, queued: cython.double) -> cython.double:
        """What a tenant with this backlog may add now."""
        room: cython.double = self.size - self.backlog
        own: cython.double = self.size / 2 if queued <= self.rounding else (room - queued) / 2  # (B − others − 2·own) / 2
        return own if own < room else room

    @cython.cfunc
    def _charge(self, tenant: Tenant, name: str, weight: cython.longlong, cost: cython.longlong) -> cython.int:
        amount: cython.double = cython.cast(cython.double, cost) / weight
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, weight)
        self.backlog += cost
        if tenant.place >= 0:
            tenant.finish += amount
            self._sink(tenant, tenant.place)
            return 0
        self.weight += weight
        tenant.finish = self.virtual + amount
        self.heap.append(tenant)
        self.left += 1
        self._rise(tenant, len(self.heap) - 1)
        return 0

    @cython.ccall
    def refund(self, name: str, cost: cython.double, now: cython.double) -> cython.int:
        """Gives a charge back: from the backlog first, then to the guarantee. What has drained gives nothing."""
        self.advance(now)
        tenant: Tenant = self.tenants.get(name)  # type: ignore[assignment]
        if tenant is None:
            return 0
        if tenant.place >= 0:
            amount: cython.double = min(cost, tenant.weight * (tenant.finish - self.virtual))
            self.backlog -= amount
            cost -= amount
            finish: cython.double = tenant.finish - amount / tenant.weight
            if finish <= self.virtual or cost > 0.0:
                self.weight -= tenant.weight
                self._remove(tenant)
            else:
                tenant.finish = finish
                self._rise(tenant, tenant.place)
        if cost > 0.0 and tenant.guarantee > 0.0:
            tenant.full_at -= cost / tenant.guarantee
        return 0

    # Waits ----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _retry(
        self, tenant: Tenant, weight: cython.longlong, cost: cython.longlong, full_at: cython.double, guarantee: cython.double
    ) -> cython.longlong:
        """Microseconds until this cost is admitted if no other request comes; NEVER when it can't be."""
        at: cython.double = -1.0
        now: cython.double = self.now
        window: cython.double = max(self.window, 2.0 / guarantee) if guarantee > 0.0 else self.window
        if guarantee > 0.0 and cost <= guarantee * window + self.rounding:
            at = full_at + cost / guarantee - window
        if cost <= self.size / 2:
            share_at: cython.double = self._share_at(tenant, weight, cost, at)
            at = share_at if at < 0.0 or share_at < at else at
        return NEVER if at < 0.0 else max(1, whole(at - now - self.rounding / 2 / self.rate))

    @cython.cfunc
    def _share_at(self, tenant: Tenant, weight: cython.longlong, cost: cython.longlong, before: cython.double) -> cython.double:
        """When the fair share admits a cost; anything later than `before` (if that is not negative) need not be exact."""
        rate: cython.double
        until: cython.double
        wait: cython.double
        end: cython.double
        while True:
            rate, until = self._rate_now(), self._until(LATEST)
            wait = self._wait(0.0 if tenant is None else self._queued(tenant), weight, cost, rate)
            if self.left and rate > 0.0:
                end = self.now + (self._first() - self.virtual) * self.weight / rate  # as in `_serve`
                until = end if end < until else until
            if self.now + wait <= until or 0.0 <= before <= until:
                return self.now + wait
            if self.ahead is None:
                self._look_ahead()
            self._serve(until, rate)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _wait(self, queued: cython.double, weight: cython.longlong, cost: cython.longlong, rate: cython.double) -> cython.double:
        """Until a cost fits while `rate` and the set of backlogged tenants stay as they are."""
        if rate <= 0.0:
            return LATEST
        wait: cython.double = max(0.0, cost - (self.size - self.backlog)) / rate
        if queued > 0.0:
            wait = max(wait, (queued + self.backlog + 2 * cost - self.size) / (rate + weight * rate / self.weight))
        return wait


@cython.cfunc
@cython.exceptval(check=False)
def whole(value: cython.double) -> cython.longlong:
    """A number of microseconds, rounded up."""
    return cython.cast(cython.longlong, ceil(value))  # type: ignore[no-any-return]
