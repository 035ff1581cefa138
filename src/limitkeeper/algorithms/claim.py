"""What goes in at the waist: a Claim is a limit under its name, a key, and a cost."""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.limit import Limit
else:
    from .limit import Limit


@cython.cclass
class NamedLimit:
    """A limit under a name. State belongs to (limiter, name, algorithm) and a key; the rate may change under it."""

    __slots__ = ("identity", "limit", "limiter", "name", "place")

    def __init__(self, limiter: Any, name: Any, limit: Limit) -> None:
        if not limit.text:
            raise TypeError("a limit is made by calling its class, as in TokenBucket('5/s')")
        self.limiter = limiter
        self.name = name
        self.limit = limit
        self.identity = (limiter, name, type(limit).kind)
        self.place: Any = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NamedLimit):
            return self.identity == other.identity and self.limit == other.limit
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"NamedLimit({self.limiter!r}, {self.name!r}, {self.limit!r})"

    def __reduce__(self) -> Any:
        return NamedLimit, (self.limiter, self.name, self.limit)


@cython.cclass
class Claim:
    """`cost` of `limit` for `key`. `charged` is the whole charge when only a part of it is given back."""

    # The rest is scratch for one decision: the state as it was read, as it is to be written, where; and the answer.
    # fmt: off
    __slots__ = ("a", "b", "c", "cell", "charged", "cost", "key", "named", "new_a", "new_b", "new_c", "remaining", "reset",
                 "retry", "start", "undoable")
    # fmt: on

    def __init__(self, limit: NamedLimit, key: Any, cost: int = 1, charged: int = -1) -> None:
        if limit is None or key is None:
            raise TypeError("a claim needs a named limit and a key")
        self.named = limit
        self.key = key
        self.cost = cost
        self.charged = cost if charged < 0 else charged
        self.undoable = False  # whether the states before and after are those of a charge that was stored
        if not cython.compiled:
            self.a: Any = 0
            self.b = self.new_a = self.new_b = self.start = self.retry = self.remaining = self.reset = 0
            self.c = self.new_c = self.cell = self.a

    @property
    def limit(self) -> NamedLimit:
        return self.named

    def remember(self, before: Any, after: Any) -> None:
        """Keeps the states before and after a charge that was stored elsewhere, for whoever undoes it."""
        self.a, self.b, self.c = before
        self.new_a, self.new_b, self.new_c = after
        self.undoable = True

    def remembered(self) -> Any:
        """(before, after) of a charge that can be undone as if it had never been made; None when nobody knows."""
        if not self.undoable:
            return None
        return (self.a, self.b, self.c), (self.new_a, self.new_b, self.new_c)

    def __repr__(self) -> str:
        return f"Claim({self.named!r}, {self.key!r}, {self.cost})"
