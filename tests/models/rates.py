"""Several rates under one name, without regard to speed: a model for each rate that is in use on a key.

A call is decided by the model of its own rate. Its cost is charged to the models of the other rates too: at the same start where
it fits there, otherwise without regard to that rate's limit: in the window of that start, or as debt from now on. A rate that is
new to a key begins with the largest amount that any of the others holds, from its first call on, admitted or refused. Four rates
per key: a fifth replaces the one that is as new the soonest, first of those beside which another holds as much for as long.

A sliding log is different: what counts is when calls were made, which does not depend on the rate. One list serves all rates of a
key; entries older than the longest window that has been used on it are gone as soon as another entry is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import inf
from typing import Any

from . import model_of
from .answer import FOREVER
from .limiter_model import Ask, LimiterModel

MOST_RATES = 4


class RatesWorld(LimiterModel):
    """A LimiterModel whose limits change from call to call: `use(name, limit)` sets the rate of the next calls."""

    def __init__(self, limits: Mapping[str, Any], now_us: int) -> None:
        super().__init__(limits, now_us)
        #: (name, key) -> limit -> its model, in the order of their first use on that key.
        self.rates: dict[tuple[str, str], dict[Any, Any]] = {}

    def use(self, name: str, limit: Any) -> None:
        self.limits[name] = limit

    def cell(self, ask: Ask) -> Any:
        """The model of the active rate; for a rate that is new to the key a fresh one, which is not kept."""
        limit = self.limits[ask.name]
        present = self.rates.get(ask[:2], {})
        if limit in present:
            return present[limit]
        model = model_of(limit, self.birth_us // limit.tick)
        if limit.logs and present:
            model.entries = next(iter(present.values())).entries
        elif present:
            most = max(other.held(self.now_us // rate.tick) for rate, other in present.items())
            amount = min(most, limit.capacity)
            if amount:
                model.give_back(self.now_us // limit.tick, -amount, None, amount)
        return model

    def is_exact(self, name: str, key: str, now_us: int) -> bool:
        """Whether a rule that keeps three numbers can answer as this model. A rate that is new to a key starts with what the
        others hold, which a fixed window with charges far ahead does not know exactly."""
        present = self.rates.get((name, key), {})
        known = (model.held_is_known(now_us // limit.tick) for limit, model in present.items())
        return self.limits[name] in present or all(known)

    def decide(self, asks: Sequence[Ask], now_us: int, max_wait_us: int | None = 0, commit: bool = True) -> Any:
        self.now_us = now_us
        found, start_us = super().decide(asks, now_us, max_wait_us, commit)
        if start_us is None and commit and found["retry_after"] != inf:
            for ask in asks:
                self.begin(ask)
        return found, start_us

    def begin(self, ask: Ask) -> None:
        """A refused call is the first use of its rate too: the rate counts from here on, and does not begin again later."""
        limit, present = self.limits[ask.name], self.rates.get(ask[:2])
        if present and limit not in present and ask.cost:
            self.add(present, limit, self.cell(ask))

    def charge(self, ask: Ask, now_us: int, start_us: int) -> int:
        limit = self.limits[ask.name]
        present = self.rates.setdefault(ask[:2], {})
        model = self.cell(ask)
        if limit.logs:
            self.add(present, limit, model)
            kept = max(rate.window for rate in present)
            model.entries[:] = [entry for entry in model.entries if entry[0] > now_us - kept]
        elif limit not in present:
            self.add(present, limit, model)
        start = model.decide(now_us // limit.tick, ask.cost, FOREVER, start_us // limit.tick).start
        charged_us = int(start * limit.tick if start > now_us // limit.tick else now_us)
        for rate in [] if limit.logs else [rate for rate in present if rate != limit]:
            present[rate] = charged_too(rate, present[rate], now_us, charged_us, ask.cost)
        return charged_us

    def add(self, present: dict[Any, Any], limit: Any, model: Any) -> None:
        def until_new(rate: Any) -> int:
            now = self.now_us // rate.tick
            reset_at: int = present[rate].decide(now, 0, 0).reset_at
            return max(0, reset_at * rate.tick - self.now_us) if reset_at > now else 0

        if len(present) == MOST_RATES and limit not in present and not limit.logs:
            left = {rate: until_new(rate) for rate in present}
            held = {rate: present[rate].held(self.now_us // rate.tick) for rate in present}

            def is_covered(rate: Any) -> bool:
                return any(held[other] >= held[rate] and left[other] >= left[rate] for other in present if other != rate)

            del present[min(present, key=lambda rate: (not is_covered(rate), left[rate]))]
        present[limit] = model

    def forget(self, now_us: int) -> None:
        """Drops the keys of which every rate is as new."""
        for pair, present in list(self.rates.items()):
            if all(as_new(limit, model, self.birth_us, now_us) for limit, model in present.items()):
                del self.rates[pair]

    def reset(self, name: str, key: str) -> None:
        self.rates.pop((name, key), None)


def charged_too(limit: Any, model: Any, now_us: int, start_us: int, cost: int) -> Any:
    """The model of another rate after the name has admitted `cost` at `start_us`."""
    now, start = now_us // limit.tick, start_us // limit.tick
    tried = deepcopy(model)
    if tried.decide(now, cost, FOREVER, start).start == start:
        return tried
    model.give_back(now, -cost, start, 0)
    return model


def as_new(limit: Any, model: Any, birth_us: int, now_us: int) -> bool:
    now = now_us // limit.tick
    if now < birth_us // limit.tick + limit.ramp:
        return False
    return bool(model.decide(now, 0, 0).reset_at <= now)
