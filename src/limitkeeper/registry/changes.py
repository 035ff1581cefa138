"""What happened to the names of a registry, told to whoever listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..observe.events import Event, Publisher, log


@dataclass(frozen=True, slots=True)
class Change(Event):
    """Something happened to the name `limiter`: `entry` came (or, "removed", went), `replaced` stood there before."""

    entry: Any = None
    replaced: Any = None


class Changes(Publisher):
    """A publisher of a registry's changes."""

    def tell(self, change: Change) -> None:
        for listener in self._listeners.get(change.kind, ()):
            try:
                listener(change)
            except Exception:
                self.failures += 1
                log.exception("a listener for %r of %r failed; the registry stands", change.kind, change.limiter)
