"""Plays the steps of a trace on a LimiterModel, as `testing.limiter_trace_player.TracePlayer` plays them on a limiter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from limitkeeper.testing.strategies import Cancel, Refund, Settle

from .limiter_model import REMEMBERED_US, UNKNOWN, Ask, LimiterModel, Turn


class WorldPlayer:
    def __init__(self, limits: Any, now_us: int) -> None:
        self.world = LimiterModel(limits, now_us)
        self.now_us = now_us
        self.clock_us = now_us
        self.names = list(limits)
        self.last: Any = None
        self.turns: list[Turn] = []
        self.hits: list[list[Ask]] = []

    def asks(self, key: Any, cost: Any) -> list[Ask]:
        keys = key if isinstance(key, tuple) else (key,) * len(self.names)
        costs = cost if isinstance(cost, tuple) else (cost,) * len(self.names)
        return [Ask(name, one, many) for name, one, many in zip(self.names, keys, costs, strict=True) if one is not None]

    def record(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.last = answer
        return answer

    def step(self, step: Any) -> Any:
        return getattr(self, type(step).__name__.lower())(*step)

    def wait(self, us: int) -> None:
        """Time in a store never goes back: when a clock does, it continues from its last time."""
        self.now_us += max(0, us)

    def until(self, what: str, beside: int) -> None:
        if self.last is not None and (after := self.last.get(what + "_after", self.last["wait"])) != float("inf"):
            self.wait(max(0, round(after * 1e6) + beside))

    def hit(self, key: Any, cost: Any) -> Any:
        asks = self.asks(key, cost)
        answer, start_us = self.world.decide(asks, self.now_us)
        if start_us is not None:
            self.hits.append(asks)
        return self.record(answer)

    def peek(self, key: Any, cost: Any) -> Any:
        return self.record(self.world.decide(self.asks(key, cost), self.now_us, commit=False)[0])

    def hitmany(self, keys: Sequence[Any], cost: int) -> Any:
        return [self.record(self.world.decide(self.asks(key, cost), self.now_us)[0]) for key in keys]

    def acquire(self, key: Any, cost: Any, timeout_us: int | None) -> Any:
        asks = self.asks(key, cost)
        if all(self.world.limits[name].reserves for name in self.names):
            answer, start_us = self.world.decide(asks, self.now_us, timeout_us)
            self.now_us = start_us or self.now_us
            return self.record(answer)
        deadline = None if timeout_us is None else self.now_us + timeout_us
        while True:  # waits in the queue and decides again at retry_after
            answer, _ = self.world.decide(asks, self.now_us)
            after = answer["retry_after"]
            if (
                answer["allowed"]
                or after == float("inf")
                or (deadline is not None and self.now_us + round(after * 1e6) > deadline)
            ):
                return self.record(answer)
            self.wait(round(after * 1e6))

    def reserve(self, key: Any, cost: Any, max_wait_us: int | None) -> Any:
        asks = self.asks(key, cost)
        patience = max_wait_us if all(self.world.limits[name].reserves for name in self.names) else 0
        answer, start_us = self.world.decide(asks, self.now_us, patience)
        turn = Turn(asks, start_us, None if patience is None else self.now_us + patience, start_us is not None)
        self.turns.append(turn)
        self.world.turns.append(turn)
        return self.record(answer)

    def cancel(self, back: int) -> bool | None:
        return self.decided(back, lambda ask: ask)

    def settle(self, back: int, used: int) -> bool | None:
        return self.decided(back, lambda ask: ask._replace(cost=ask.cost - used))

    def decided(self, back: int, part: Callable[[Ask], Ask]) -> bool | None:
        """The first settle or cancel decides; a refused reservation has nothing to decide."""
        if back >= len(self.turns):
            return None
        turn = self.turns[-1 - back]
        if not turn.open or turn.start_us is None:
            return False
        turn.open = False
        left = [ask for ask in turn.asks if ask[:2] not in turn.resets]
        if left or not turn.asks:
            self.world.leave(turn, [part(ask) for ask in left], self.now_us)
        return bool(left) or not turn.asks

    def refund(self, back: int) -> None:
        if back < len(self.hits):
            asks = self.hits.pop(-1 - back)
            self.world.give_back(asks, self.now_us, None, [ask.cost for ask in asks])

    def reset(self, key: Any) -> None:
        for ask in self.asks(key, 1):
            self.world.reset(ask, self.now_us)

    def open_to_choice(self, step: Any) -> bool:
        """Whether a store may do one or the other. A rule may give back less than all that is free: a refund, or a part, while
        others are still to start; what was counted in a window before this one, if other calls were counted since. Undefined:
        which waiters move up when their key was reset, and what a reservation gives back long after a reset."""
        waiting = [turn for turn in self.turns if turn.open and turn.start_us is not None and turn.start_us > self.now_us]
        if isinstance(step, Refund | Settle) and waiting:
            return True
        if not isinstance(step, Cancel | Settle) or step.back >= len(self.turns):
            return False
        left = self.turns[-1 - step.back]
        if any(turn.resets for turn in waiting if turn is not left):
            return True
        if left.start_us is not None and any(self.world.is_window_over(ask, left.start_us, self.now_us) for ask in left.asks):
            return True
        return any(at == UNKNOWN or self.now_us - at > REMEMBERED_US for at in left.resets.values())
