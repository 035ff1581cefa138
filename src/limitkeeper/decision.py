"""Decision: the result of a call. It is truthy when allowed and has the time to retry when refused.

Times are stored in integer microseconds and converted to seconds when read. A Decision can't be part of a reference
cycle, so it is not tracked by the garbage collector.
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

#: `source` of a Decision made by the store itself; wrappers set other sources.
STORE = "store"
#: The arguments of Decision, in order.
FIELDS = ("allowed", "limit", "remaining", "retry_us", "reset_us", "wait_us", "start_us", "name", "source")
SHOWN = ("allowed", "limit", "remaining", "retry_after", "reset_after", "wait", "name", "source")


@cython.cclass
class Decision:
    """The result of a call to a limiter. It is truthy when the call is allowed.

    Attributes:
        allowed: whether the call is allowed; also the truth value.
        limit: the largest cost that could ever pass at once.
        remaining: whole units that a hit could take now.
        retry_after: seconds until this same call would be accepted; 0.0 when allowed, `inf` when never.
        reset_after: seconds until the key's state is that of an unseen key.
        wait: seconds from now to the start of the call.
        name: the name of the limit that decided.
        source: what decided: "store", "lease", "local_share", "open" or "closed". `==` ignores it.
        decisions: one Decision for each limit, where there are several.
    """

    __slots__ = FIELDS

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
        """Stores create Decisions; a negative `retry_us` means never."""
        self.allowed, self.limit, self.remaining = bool(allowed), limit, remaining
        self.retry_us, self.reset_us, self.wait_us, self.start_us = retry_us, reset_us, wait_us, start_us
        self.name, self.source = str(name), source

    def __setattr__(self, name: str, value: object) -> None:
        if cython.compiled or hasattr(self, name):
            raise AttributeError(f"a Decision is immutable: can't set {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Decision is immutable: can't delete {name!r}")

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
        """The fields as a dict, for logs and JSON."""
        return {name: getattr(self, name) for name in SHOWN}

    def _fields(self) -> tuple:
        return tuple([getattr(self, name) for name in FIELDS])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Decision):
            return type(self) is type(other) and bool(self._fields()[:6] == other._fields()[:6] and self.name == other.name)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((*self._fields()[:6], self.name))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items() if name != "decisions")
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[object, ...]:
        return Decision, self._fields()


if not cython.compiled:
    #: The result of one limit: allowed, limit, remaining, retry_us, reset_us, wait_us.
    Fields = tuple[bool, int, int, int, int, int]

    class Blank(Decision):
        """A mutable Decision; the store sets its fields, then changes its class to Decision."""

        __slots__ = ()
        __setattr__ = object.__setattr__  # type: ignore[assignment]
        __delattr__ = object.__delattr__  # both: with only one of them, setting an attribute is slower


@cython.cfunc
def fresh(name: str) -> Decision:
    """A new Decision whose fields the store sets."""
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
    """Makes the Decision of one limit. Faster than calling the class, which took a third of a decision on five limits."""
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
    """Whether a limit decides rather than an earlier one (`other_…`). Allowed: the smaller remaining / limit decides. Refused:
    the longer retry, where a negative one (never) is the longest. On a tie the earlier limit decides."""
    if allowed:
        return remaining * other_limit < other_remaining * limit
    return other_retry_us >= 0 and (retry_us < 0 or retry_us > other_retry_us)


@cython.cclass
class Decisions(Decision):
    """The joined result of several limits; the fields are those of the limit that decided.

    Compiled, a store keeps the results of the limits as C integers (`fields`); `decisions` converts them when it is read,
    which most callers never do.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Decision], *fields: Any) -> None:
        Decision.__init__(self, *fields)
        self._parts = tuple(parts)

    def __dealloc__(self) -> None:
        free(self.fields)  # type: ignore[name-defined, attr-defined]  # compiled only

    @staticmethod
    def join(parts: Sequence[Decision], wait_us: int = 0) -> Decision:
        """Joins the Decisions of several limits, in order: allowed when all are, with the longest of their waits.

        Every store joins the results of several limits here; `is_deciding` selects the limit whose fields are shown. `wait_us`
        is a common wait that may be longer than the wait of any part. A single part is returned unchanged.
        """
        if len(parts) == 1:
            return parts[0]
        allowed = all(part.allowed for part in parts)
        best = parts[0]
        for part in parts:
            if is_deciding(allowed, part.limit, part.remaining, part.retry_us, best.limit, best.remaining, best.retry_us):
                best = part
            wait_us = max(wait_us, part.wait_us)
        wait_us = wait_us if allowed else 0
        start_us = parts[0].start_us - parts[0].wait_us + wait_us
        limit, remaining, retry_us, reset_us = best.limit, best.remaining, best.retry_us, best.reset_us
        return Decisions(parts, allowed, limit, remaining, retry_us, reset_us, wait_us, start_us, best.name, best.source)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        if cython.compiled:
            return self.parts_of()  # type: ignore[attr-defined, no-any-return]
        return self._parts

    def to_dict(self) -> dict[str, Any]:
        return {**Decision.to_dict(self), "decisions": [part.to_dict() for part in self.decisions]}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Decisions):
            return bool(Decision.__eq__(self, other)) and self.decisions == other.decisions
        return NotImplemented

    def __hash__(self) -> int:
        return Decision.__hash__(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Decisions, (self.decisions, *self._fields())
