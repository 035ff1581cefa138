"""The answer to a claim: a Decision is true when allowed, and says when to come back when not.

Times are kept in integer microseconds and become seconds only when somebody looks. A Decision holds nothing that
could point back at it, so the garbage collector never has to visit one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.libc.stdlib import free

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
    #: The answer of one limit: allowed, limit, remaining, retry_us, reset_us, wait_us.
    Fields = tuple[bool, int, int, int, int, int]

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
    decision.source = "store"  # the constant: reading STORE would cost a lookup for each decision
    return decision


@cython.cfunc
def filled(name: str, fields: Fields, now_us: cython.longlong) -> Decision:
    """The Decision of one limit. Faster than calling the class: of five limits that would be a third of the whole decision."""
    decision: Decision = fresh(name)
    decision.allowed, decision.limit, decision.remaining, decision.retry_us, decision.reset_us, decision.wait_us = fields
    decision.start_us = now_us + decision.wait_us
    if not cython.compiled:
        decision.__class__ = Decision
    return decision


@cython.cfunc
@cython.exceptval(check=False)
def is_deciding(
    allowed: cython.bint,
    limit: cython.longlong,
    remaining: cython.longlong,
    retry_us: cython.longlong,
    other_limit: cython.longlong,
    other_remaining: cython.longlong,
    other_retry_us: cython.longlong,
) -> cython.bint:
    """Whether a limit decides rather than one before it in order. Allowed: the smaller remaining / limit. Refused: the longer
    retry, below zero (never) being the longest. Ties go to the one before."""
    if allowed:
        return remaining * other_limit < other_remaining * limit
    return other_retry_us >= 0 and (retry_us < 0 or retry_us > other_retry_us)


@cython.cclass
class Decisions(Decision):
    """The answer of several limits together: the fields are those of the limit that decided.

    Compiled, a store leaves the answers of the limits as plain integers (`fields`); they become Decisions when `decisions` is
    read, which most callers never do.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Decision], *fields: Any) -> None:
        Decision.__init__(self, *fields)
        self._parts = tuple(parts)

    def __dealloc__(self) -> None:
        free(self.fields)  # type: ignore[name-defined, attr-defined]  # compiled only

    @staticmethod
    def join(parts: Sequence[Decision], wait_us: int = 0) -> Decision:
        """One Decision of several limits, in order: allowed when all of them are, at the longest of their waits.

        Every store that asks several limits joins their answers here: `is_deciding` says whose fields are shown. `wait_us` is a
        common wait that may be longer than the wait of any part. A single part is returned as it is.
        """
        if len(parts) == 1:
            return parts[0]
        allowed = all(part.allowed for part in parts)
        deciding = parts[0]
        for part in parts:
            if is_deciding(
                allowed, part.limit, part.remaining, part.retry_us, deciding.limit, deciding.remaining, deciding.retry_us
            ):
                deciding = part
            wait_us = max(wait_us, part.wait_us)
        wait_us = wait_us if allowed else 0
        return Decisions(
            parts,
            allowed,
            deciding.limit,
            deciding.remaining,
            deciding.retry_us,
            deciding.reset_us,
            wait_us,
            parts[0].start_us - parts[0].wait_us + wait_us,
            deciding.name,
            deciding.source,
        )

    @property
    def parts(self) -> tuple[Decision, ...]:
        if cython.compiled:
            return self.parts_of()  # type: ignore[attr-defined, no-any-return]
        return self._parts

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
