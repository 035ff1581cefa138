"""SpendGuard: a budget of money or units for outgoing calls, for all processes together, with an alert and a hard stop.

    guard = SpendGuard("50", per="1d", store="redis://…")        50 dollars a day; a day begins at 00:00 UTC
    with guard.spend("0.02") as charge:
        charge.settle("0.017")

A fixed window in the store counts whole units of `unit`, costs rounded up: the sum of the estimates never exceeds the budget. A
call that settles above its estimate may; the next one is refused. The alert is published once a window for all processes: the
first process that sees the mark crossed takes the only unit of a second window. Rejected: floats, which lose cents.
"""

from __future__ import annotations

import logging
from decimal import ROUND_CEILING, Decimal, InvalidOperation

from ..algorithms import FixedWindow
from ..errors import ConfigurationError, InvalidCost, RateLimited, StoreError
from ..observe.events import ALERT, BUDGET_KINDS, REFUSED, Publisher
from ..observe.snapshot import BudgetSnapshot, Snapshot
from ..rate import MAX_COUNT, Duration
from ..stores import Store
from ..stores.sans_io import Call, CallToEnd, Plan, arun, run
from .errors import BudgetSpent
from .sync_and_async_limiter import Charge, LimiterPair

log = logging.getLogger("limitkeeper")
Amount = str | int | Decimal


def decimal(amount: object) -> Decimal:
    """An exact amount; InvalidCost for a float, a negative one, and what is no number."""
    try:
        exact = Decimal(amount) if isinstance(amount, (str, int, Decimal)) and not isinstance(amount, bool) else Decimal(-1)
    except InvalidOperation:
        exact = Decimal(-1)
    if not exact.is_finite() or exact < 0:
        raise InvalidCost(f"expected an amount of at least 0 as a string, an int or a Decimal, got {amount!r}; write '0.02'")
    return exact


class SpendGuard:
    """`amount` for each period `per`, for all that use the same store and name. `unit` is the smallest part that is counted.
    `guard.events.on("alert", …)` is called when `alert` (0.8) of the budget is spent, `"refused"` at the hard stop."""

    def __init__(
        self,
        amount: Amount,
        per: Duration = "1d",
        *,
        unit: Amount = "0.0001",
        store: Store | str | None = None,
        name: str = "spend",
        alert: float = 0.8,
    ) -> None:
        self.unit, self.name = decimal(unit), name
        if not self.unit:
            raise ConfigurationError(f"unit must be more than 0, got {unit!r}")
        count = decimal(amount) / self.unit
        if count != int(count) or not 1 <= count <= MAX_COUNT:
            raise ConfigurationError(f"{amount!r} must be 1 to {MAX_COUNT} whole units of {unit!r}; choose another unit")
        if not 0 < alert <= 1:
            raise ConfigurationError(f"alert is a share of the budget between 0 and 1, got {alert!r}")
        self.limit = FixedWindow(int(count), per=per)
        self._pair = LimiterPair({name: self.limit}, store, name)
        self._alerts = LimiterPair({"alert": FixedWindow(1, per=per)}, self._pair.sync.store, f"{name}.alert")
        spent = (count * Decimal(str(alert))).to_integral_value(ROUND_CEILING)
        self._mark = int(count - spent)  # an alert when no more than this is left
        self._left, self._reset_us, self._alerted_us = int(count), 0, 0
        self._counted = {ALERT: 0, REFUSED: 0}
        self.events = Publisher(BUDGET_KINDS)

    def __repr__(self) -> str:
        return f"<SpendGuard {self.name!r}: {self.remaining} of {self.amount} left>"

    def _now_us(self) -> int:
        return self._pair.sync.store.clock.now_us()  # which `testing.use_clock` changes

    @property
    def amount(self) -> Decimal:
        return self.unit * self.limit.count

    @property
    def remaining(self) -> Decimal:
        """What is left of this window, as of the last call of this process."""
        return self.amount if self._now_us() >= self._reset_us else self.unit * max(0, self._left)

    def units(self, amount: object) -> int:
        """An amount in whole units, rounded up."""
        return min(MAX_COUNT, int((decimal(amount) / self.unit).to_integral_value(ROUND_CEILING)))

    def snapshot(self) -> Snapshot:
        """The budget, for metrics sinks."""
        left, alerts, refused = self.remaining, self._counted[ALERT], self._counted[REFUSED]
        return Snapshot("", budgets=(BudgetSnapshot(self.name, float(self.amount), float(left), alerts, refused),))

    def spend(self, amount: Amount) -> SpendContext:
        """A context manager, sync and async, for one call of an estimated cost; an exception gives it back."""
        return SpendContext(self, decimal(amount))

    def reserve(self, amount: Amount) -> Charge:
        """Charges an estimate; raises BudgetSpent when it exceeds what is left."""
        return run(self._reserve(self.units(amount)))

    async def areserve(self, amount: Amount) -> Charge:
        return await arun(self._reserve(self.units(amount)))

    def _reserve(self, units: int) -> Plan[Charge]:
        try:
            charge: Charge = yield Call(self._pair, "reserve", (self.name, units, 0))
        except RateLimited as refusal:
            self._count(REFUSED, units, refusal.decision)
            raise BudgetSpent(refusal.decision) from None
        decision, now_us = charge.decision, self._now_us()
        if units:
            self._left, self._reset_us = decision.remaining, now_us + decision.reset_us
        if units and self._left <= self._mark and now_us >= self._alerted_us:
            call, first = CallToEnd(self._alerts, "hit", (self.name,)), False
            try:
                first = yield call
                self._alerted_us = self._reset_us
            except StoreError as error:  # the next call asks again; this one has its charge
                log.warning("the alert of %r: %s", self.name, error)
            except BaseException:  # the caller has no charge
                first = call.answer
                yield Call(charge, "cancel")
                raise
            finally:
                if first:
                    self._count(ALERT, units, decision)
        return charge

    def _count(self, kind: str, units: int, decision: object) -> None:
        self._counted[kind] += 1
        self.events.publish(kind, self.name, None, units, decision)

    def close(self) -> None:
        """Closes the store if it was not given as an object."""
        self._pair.close()

    async def aclose(self) -> None:
        await self._pair.aclose()


class SpendContext:
    """One call: `settle` sets what it has really cost."""

    def __init__(self, guard: SpendGuard, amount: Decimal) -> None:
        self._guard, self._amount = guard, amount
        self._charge: Charge | None = None

    def settle(self, amount: Amount) -> None:
        """Sets the cost, which is charged when the block ends."""
        self._amount = decimal(amount)

    def __enter__(self) -> SpendContext:
        self._charge = self._guard.reserve(self._amount)
        return self

    async def __aenter__(self) -> SpendContext:
        self._charge = await self._guard.areserve(self._amount)
        return self

    def _end(self, kind: object) -> Plan[None]:
        assert self._charge is not None
        if kind is not None:
            yield Call(self._charge, "cancel")
        elif (units := self._guard.units(self._amount)) != self._charge.cost:
            yield Call(self._charge, "settle", (units,))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        run(self._end(kind))

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await arun(self._end(kind))
