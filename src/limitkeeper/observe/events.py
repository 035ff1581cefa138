"""Events and their publisher. Listeners can't change a decision, nor break a caller.

An event object is created only when its kind has a listener. An exception of a listener is logged and counted, and the call that
caused the event goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..algorithms.no_key import NO_KEY

log = logging.getLogger("limitkeeper")

#: Kinds of a limiter's events.
ALLOWED = "allowed"
REFUSED = "refused"
WAITED = "waited"
DRAINED = "drained"
OVERFLOW = "overflow"
GIVE_BACK_FAILED = "give back failed"
LISTENER_KINDS = (ALLOWED, REFUSED, WAITED, DRAINED, OVERFLOW, GIVE_BACK_FAILED)
#: Kinds of a bulkhead's events; `limiter` is then the bulkhead's name, and `cost` of "resized" its new size.
FINISHED = "finished"
RESIZED = "resized"
BULKHEAD_KINDS = (ALLOWED, REFUSED, WAITED, FINISHED, RESIZED)
#: Kinds of a guarded store's events; `limiter` is then the store's name.
OPENED = "opened"
HALF_OPENED = "half open"
BREAKER_CLOSED = "closed"
PROBE_FAILED = "probe failed"
GIVE_BACK_DROPPED = "give back dropped"
STORE_KINDS = (OPENED, HALF_OPENED, BREAKER_CLOSED, PROBE_FAILED, GIVE_BACK_DROPPED)
#: Kinds of a policy gate's events; `limiter` is then the policy's name, `decision` the Evaluation if there is one.
SHADOW = "shadow"
ALERT = "alert"
PENALTY_BOX = "penalty box"
RELOADED = "reloaded"
RELOAD_REFUSED = "reload refused"
STORE_FAILED = "store failed"
#: Kinds of a spend guard's events; `limiter` is then the budget's name, `cost` the units of the call.
BUDGET_KINDS = (ALERT, REFUSED)
GATE_KINDS = (REFUSED, SHADOW, ALERT, PENALTY_BOX, RELOADED, RELOAD_REFUSED, STORE_FAILED)
#: Kinds of a registry's events.
ADDED = "added"
REPLACED = "replaced"
REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of one limiter (or, in a registry, of one entry)."""

    kind: str
    limiter: str
    key: Any = None
    cost: Any = 1
    decision: Any = None
    error: BaseException | None = None


Listener = Callable[[Event], object]


@dataclass(slots=True, eq=False)
class Publisher:
    """Calls listeners with events, in the order in which the listeners were added."""

    kinds: tuple[str, ...] = LISTENER_KINDS
    failures: int = 0
    _listeners: dict[str, tuple[Listener, ...]] = field(default_factory=dict)

    def on(self, kind: str, listener: Listener) -> Callable[[], None]:
        """Adds a listener for one kind ("*" is every kind); call the returned function to remove it."""
        if kind != "*" and kind not in self.kinds:
            raise ValueError(f"unknown event kind {kind!r}; expected one of {', '.join(self.kinds)}, or '*'")
        for each in self.kinds if kind == "*" else (kind,):
            self._listeners[each] = (*self._listeners.get(each, ()), listener)
        return lambda: self.off(kind, listener)

    def off(self, kind: str, listener: Listener) -> None:
        """Removes a listener."""
        for each in self.kinds if kind == "*" else (kind,):
            left = list(self._listeners.get(each, ()))
            if listener in left:
                left.remove(listener)
            if left:
                self._listeners[each] = tuple(left)
            else:
                self._listeners.pop(each, None)

    def wants(self, kind: str) -> bool:
        """Whether a kind has a listener."""
        return kind in self._listeners

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def publish(
        self, kind: str, limiter: str, key: object = None, cost: object = 1, decision: object = None, error: Any = None
    ) -> None:
        """Creates an event and sends it, if its kind has a listener."""
        if kind in self._listeners:
            self.send(Event(kind, limiter, None if key is NO_KEY else key, cost, decision, error))

    def send(self, event: Event) -> None:
        """Calls the listeners of the event's kind."""
        for listener in self._listeners.get(event.kind, ()):
            try:
                listener(event)
            except Exception:
                self.failures += 1
                log.exception("a listener for %r of %r failed; the call goes on", event.kind, event.limiter)
