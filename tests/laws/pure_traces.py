"""Traces for the two pure functions of a rule, in ticks, played on a model and a rule side by side."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from hypothesis import strategies as st

from limitkeeper import Limit
from limitkeeper.testing.strategies import HUGE, costs, limits, moments
from models import model_of

#: A moment far from zero and on no round window, in microseconds.
BEGIN_US = 1_700_000_123_456_789


class Pass(NamedTuple):
    """Time passes."""

    ticks: int


class Decide(NamedTuple):
    """`late` is how far behind now `not_before` lies: the common start of several limits."""

    cost: int
    max_wait: int
    late: int = 0


class GiveBack(NamedTuple):
    """`back`: which of the charges, the last is 0; `part`: how many of its units, None for all."""

    back: int
    part: int | None = None


class Refund(NamedTuple):
    """Gives a charge that has begun back without saying when it was made."""

    back: int


def steps(limit: Limit, late: bool = True, gives: bool = True) -> st.SearchStrategy[Any]:
    ticks = moments([limit]).map(lambda us: us // limit.tick)
    cost = costs([limit]).filter(lambda cost: 0 < cost < HUGE)
    wait = st.just(0) | ticks | st.just(10**15)
    not_before = st.just(0) | (ticks if late and limit.reserves else st.just(0))
    made = [st.builds(Pass, ticks), st.builds(Decide, cost, wait, not_before), st.builds(Decide, cost, wait, not_before)]
    if gives:
        made.append(st.builds(GiveBack, st.integers(0, 3), st.none() | st.integers(-3, 3)))
    if gives and limit.refunds:
        made.append(st.builds(Refund, st.integers(0, 3)))
    return st.one_of(made)


@cache
def pure_traces(limit: Limit, max_size: int = 16, **kinds: bool) -> st.SearchStrategy[list[Any]]:
    return st.lists(steps(limit, **kinds), min_size=1, max_size=max_size)


class Rule:
    """A rule played from its pure functions, with the interface of a model."""

    def __init__(self, limit: Limit, birth: int = 0) -> None:
        self.limit, self.birth = limit, birth
        self.state = limit.new(birth * limit.tick)

    def decide(self, now: int, cost: int, max_wait: int, not_before: int = 0) -> tuple[Any, ...]:
        *self.state, start, retry, remaining, reset = self.limit.decide(tuple(self.state), now, cost, max_wait, not_before)
        return (start if start >= 0 else None, None if start == -2 else retry, remaining, reset)

    def give_back(self, now: int, cost: int, charged_at: int | None, charged: int) -> None:
        at = -1 if charged_at is None else charged_at
        self.state = self.limit.give_back(tuple(self.state), now, cost, at, charged)

    def sweep(self, now: int) -> None:
        """Drops a state that reports itself as new, as stores do."""
        if not self.limit.logs and self.look(now)[1] <= now:
            self.state = self.limit.new(self.birth * self.limit.tick)

    def look(self, now: int) -> tuple[int, int]:
        """Remaining and reset, without a charge."""
        return tuple(self.limit.decide(tuple(self.state), now, 0, 0)[5:])  # type: ignore[return-value]


class Played:
    """A trace played on a rule. `admitted` and `returned` are the quantities of law 3; `charges` is what can be given back."""

    def __init__(self, limit: Limit, trace: list[Any], swept: bool = False) -> None:
        self.limit, self.swept = limit, swept
        self.now = BEGIN_US // limit.tick
        self.rule = Rule(limit, self.now)
        self.charges: list[tuple[int, int]] = []
        self.admitted: list[tuple[int, int]] = []
        self.returned: list[tuple[int, int]] = []
        self.begin()
        for step in trace:
            self.step(step)
            if swept:
                self.rule.sweep(self.now)

    def begin(self) -> None:
        """Hook for subclasses."""

    def step(self, step: Any) -> None:
        if isinstance(step, Pass):
            self.now += step.ticks
        elif isinstance(step, Decide):
            wanted = self.now + step.late if step.late else 0
            result = self.decide(self.now, step.cost, max(step.max_wait, step.late), wanted)
            if result[0] is not None:
                self.charges.append((result[0], step.cost))
                self.admitted.append((result[0], step.cost))
        elif step.back < len(self.charges):
            at, charged = self.charges[-1 - step.back]
            if isinstance(step, GiveBack) or at <= self.now:
                self.charges.pop(-1 - step.back)
                self.take_back(step, at, charged)

    def take_back(self, step: Any, at: int, charged: int) -> None:
        part = charged if isinstance(step, Refund) or step.part is None else min(step.part, charged)
        self.give_back(self.now, part, None if isinstance(step, Refund) else at, charged)
        if at > self.now:  # what had not begun was never admitted
            self.admitted.remove((at, charged))
            self.admitted += [(at, charged - max(0, part))] if part < charged else []
        else:
            self.returned += [(self.now, part)] if part > 0 else []

    def decide(self, *arguments: int) -> Any:
        return self.rule.decide(*arguments)

    def give_back(self, *arguments: Any) -> None:
        self.rule.give_back(*arguments)

    def saturate(self, cost: int, calls: int = 12) -> None:
        """Takes all that is available, each unit as early as possible."""
        for _ in range(calls):
            start, retry_at, *_ = self.decide(self.now, cost, 0)
            if start is not None:
                self.admitted.append((start, cost))
            elif retry_at is not None:
                self.now = retry_at


class Compared(Played):
    """A trace played on a rule and on its model: after every step their results must be equal."""

    def begin(self) -> None:
        self.model = model_of(self.limit, self.now)

    def step(self, step: Any) -> None:
        super().step(step)
        result, expected = self.rule.look(self.now), tuple(self.model.decide(self.now, 0, 0)[2:])
        assert result == expected, f"after {step}: the rule's result is {result} for remaining and reset, the model {expected}"

    def decide(self, *arguments: int) -> Any:
        result, expected = self.rule.decide(*arguments), self.model.decide(*arguments)
        seen = slice(4) if result[0] is None or expected[0] is None else slice(0, 4, 2)
        assert result[seen] == expected[seen], f"decide{arguments}: the rule's result is {result}, the model {tuple(expected)}"
        return result

    def give_back(self, *arguments: Any) -> None:
        self.rule.give_back(*arguments)
        self.model.give_back(*arguments)
        if hasattr(self.model, "settle_on"):
            self.model.settle_on(self.rule.state, self.limit.gain, self.now)


def with_traces(*algorithms: type[Limit], max_size: int = 16, **kinds: bool) -> st.SearchStrategy[tuple[Limit, list[Any]]]:
    """A limit of one of these rules, and a trace for it."""
    return limits(*algorithms).flatmap(lambda limit: st.tuples(st.just(limit), pure_traces(limit, max_size, **kinds)))
