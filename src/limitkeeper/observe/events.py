"""What happened, told to whoever listens. Listeners hear; they cannot change a decision, nor break a caller.

An event is made only when somebody listens for its kind. A listener that raises is logged and counted, and the call that it
listened to goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("limitkeeper")

#: Kinds of a limiter's events.
ALLOWED = "allowed"
REFUSED = "refused"
WAITED = "waited"
DRAINED = "drained"
SHARED_CELL = "shared cell"
GIVE_BACK_FAILED = "give back failed"
LISTENER_KINDS = (ALLOWED, REFUSED, WAITED, DRAINED, SHARED_CELL, GIVE_BACK_FAILED)
#: Kinds of a guarded store's events; `limiter` is then the store's name.
OPENED = "opened"
HALF_OPENED = "half open"
BREAKER_CLOSED = "closed"
PROBE_FAILED = "probe failed"
GIVE_BACK_DROPPED = "give back dropped"
STORE_KINDS = (OPENED, HALF_OPENED, BREAKER_CLOSED, PROBE_FAILED, GIVE_BACK_DROPPED)
#: Kinds of a policy gate's events; `limiter` is then the policy's name, `decision` the Passage where there is one.
SHADOW = "shadow"
ALERT = "alert"
SHUT_OUT = "shut out"
RELOADED = "reloaded"
RELOAD_REFUSED = "reload refused"
STORE_FAILED = "store failed"
GATE_KINDS = (REFUSED, SHADOW, ALERT, SHUT_OUT, RELOADED, RELOAD_REFUSED, STORE_FAILED)
#: Kinds of a registry's events.
ADDED = "added"
REPLACED = "replaced"
REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one limiter (or, in a registry, to one entry)."""

    kind: str
    limiter: str
    key: Any = None
    cost: Any = 1
    decision: Any = None
    error: BaseException | None = None


Listener = Callable[[Event], object]


@dataclass(slots=True)
class Publisher:
    """Tells events to listeners, in the order in which they came."""

    kinds: tuple[str, ...] = LISTENER_KINDS
    failures: int = 0
    _listeners: dict[str, tuple[Listener, ...]] = field(default_factory=dict)

    def on(self, kind: str, listener: Listener) -> Callable[[], None]:
        """Listens for one kind ("*" is every kind); call what is returned to stop listening."""
        if kind != "*" and kind not in self.kinds:
            raise ValueError(f"no event is called {kind!r}; there are {', '.join(self.kinds)}, or '*'")
        for each in self.kinds if kind == "*" else (kind,):
            self._listeners[each] = (*self._listeners.get(each, ()), listener)
        return lambda: self.off(kind, listener)

    def off(self, kind: str, listener: Listener) -> None:
        """Stops listening."""
        for each in self.kinds if kind == "*" else (kind,):
            left = list(self._listeners.get(each, ()))
            if listener in left:
                left.remove(listener)
            if left:
                self._listeners[each] = tuple(left)
            else:
                self._listeners.pop(each, None)

    def wants(self, kind: str) -> bool:
        return kind in self._listeners

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def publish(self, kind: str, limiter: str, key: Any = None, cost: Any = 1, decision: Any = None, error: Any = None) -> None:
        """Tells an event to those who listen for its kind."""
        listeners = self._listeners.get(kind)
        if not listeners:
            return
        event = Event(kind, limiter, key, cost, decision, error)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                self.failures += 1
                log.exception("a listener for %r of limiter %r failed; the decision stands", kind, limiter)
