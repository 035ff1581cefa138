"""The answer to a claim: a Decision is true when allowed, and says when to come back when not.

Times are kept in integer microseconds and become seconds only when somebody looks. A Decision holds nothing that
could point back at it, so the garbage collector never has to visit one.
"""

from __future__ import annotations

from math import inf
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

#: Where answers come from: the store itself. Wrappers set other sources.
STORE = "store"


@cython.cclass
class Decision:
    """What a limiter answered.

    `allowed` (also its truth value), `limit` (the largest cost that could ever pass at once), `remaining` (whole units
    that a hit could take now), `retry_after` (seconds until this same call would be accepted; inf: never),
    `reset_after` (seconds until the key is as new), `wait` (seconds from now to its start), `name` (the limit that
    decided), `source` (what answered: "store", "lease", "local_share", "open" or "closed"; ignored by `==`), `decisions`
    (one for each limit, where there are several).
    """

    __slots__ = ("allowed", "limit", "name", "remaining", "reset_us", "retry_us", "source", "start_us", "wait_us")

    def __init__(
        self,
        allowed: bool | int,
        limit: int = 0,
        remaining: int = 0,
        retry_us: int = 0,
        reset_us: int = 0,
        wait_us: int = 0,
        start_us: int = 0,
        name: str | None = "",
        source: str = STORE,
    ) -> None:
        """Made by stores; `retry_us` below zero means never."""
        self.allowed = bool(allowed)
        self.limit = limit
        self.remaining = remaining
        self.retry_us = retry_us
        self.reset_us = reset_us
        self.wait_us = wait_us
        self.start_us = start_us
        self.name = str(name)
        self.source = source

    def __setattr__(self, name: str, value: object) -> None:
        if cython.compiled or hasattr(self, name):
            raise AttributeError(f"a Decision is what was decided: {name!r} can't be changed")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Decision is what was decided: {name!r} can't be deleted")

    @property
    def retry_after(self) -> float:
        return self.retry_us / 1_000_000.0 if self.retry_us >= 0 else inf

    @property
    def reset_after(self) -> float:
        return self.reset_us / 1_000_000.0

    @property
    def wait(self) -> float:
        return self.wait_us / 1_000_000.0

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return (self,)

    def __bool__(self) -> bool:
        return self.allowed

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for logs and JSON."""
        return {
            "allowed": self.allowed,
            "limit": self.limit,
            "remaining": self.remaining,
            "retry_after": self.retry_after,
            "reset_after": self.reset_after,
            "wait": self.wait,
            "name": self.name,
            "source": self.source,
        }

    def _fields(self) -> Any:
        return (
            self.allowed,
            self.limit,
            self.remaining,
            self.retry_us,
            self.reset_us,
            self.wait_us,
            self.start_us,
            self.name,
            self.source,
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Decision):
            return type(self) is type(other) and bool(self._fields()[:6] == other._fields()[:6] and self.name == other.name)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((*self._fields()[:6], self.name))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items() if name != "decisions")
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> Any:
        return Decision, self._fields()


if not cython.compiled:

    class Blank(Decision):
        """A Decision that is being filled in; then its class becomes Decision."""

        __slots__ = ()
        __setattr__ = object.__setattr__  # type: ignore[assignment]
        __delattr__ = object.__delattr__  # both, or filling one in takes the slow way


@cython.cfunc
def fresh(name: str) -> Decision:
    """A Decision to be filled in by a store."""
    decision: Decision
    if cython.compiled:
        decision = Decision.__new__(Decision)
    else:
        decision = Blank.__new__(Blank)
    decision.name = name
    decision.source = STORE
    return decision


@cython.cclass
class Decisions(Decision):
    """The answer of several limits together: the fields are those of the limit that decided."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Decision, ...] | list[Decision], *fields: Any) -> None:
        Decision.__init__(self, *fields)
        self.parts = tuple(parts)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.parts

    def to_dict(self) -> dict[str, Any]:
        return {**Decision.to_dict(self), "decisions": [part.to_dict() for part in self.parts]}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Decisions):
            return bool(Decision.__eq__(self, other)) and self.parts == other.parts
        return NotImplemented

    def __hash__(self) -> int:
        return Decision.__hash__(self)

    def __reduce__(self) -> Any:
        return Decisions, (self.parts, *self._fields())
