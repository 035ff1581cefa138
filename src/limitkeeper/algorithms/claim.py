"""Claim and NamedLimit: the input of a decision, a named limit with a key and a cost."""

from __future__ import annotations

from itertools import count
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.limit import Limit
else:
    from .limit import Limit

from .limit import StateData

#: The order of charges in this process.
charge_numbers = count(1)
Others = tuple[tuple[int, ...], ...] | None


@cython.cclass
class NamedLimit:
    """A limit under a name. State belongs to (limiter, name, algorithm) and a key; several rates may use one name."""

    __slots__ = ("handle", "hashed", "identity", "limit", "limiter", "name")

    def __init__(self, limiter: str, name: str, limit: Limit) -> None:
        if not limit.text:
            raise TypeError("expected an initialised limit; create it by calling its class, as in TokenBucket('5/s')")
        self.limiter = limiter
        self.name = name
        self.limit = limit
        self.identity = (limiter, name, type(limit).kind)
        self.hashed = hash((limiter, name, limit))
        self.handle: object = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NamedLimit):
            return self.identity == other.identity and self.limit == other.limit
        return NotImplemented

    def __hash__(self) -> int:
        return self.hashed

    def __repr__(self) -> str:
        return f"NamedLimit({self.limiter!r}, {self.name!r}, {self.limit!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return NamedLimit, (self.limiter, self.name, self.limit)


@cython.cclass
class Claim:
    """`cost` units of `limit` for `key`. `charged` is the whole charge when only a part of it is given back. `reset_id` is set
    by a charge: the number of the key's last reset (0: none), so that a charge from before a reset gives nothing back. UNKNOWN:
    not a charge, or one whose store does not say. `number` orders charges that other processes stored by when their answers came;
    0: none."""

    # The other fields belong to one decision: the state read (a, b, c), the state to write (new_…), its cell, and the result.
    # fmt: off
    __slots__ = ("a", "b", "c", "cell", "charged", "cost", "key", "named", "new_a", "new_b", "new_c", "number", "others",
                 "remaining", "reset", "reset_id", "retry", "start", "undoable")
    # fmt: on

    def __init__(self, limit: NamedLimit, key: str, cost: int = 1, charged: int = -1, reset_id: int = -1) -> None:
        if limit is None or key is None:
            raise TypeError("a claim needs a named limit and a key")
        self.named = limit
        self.key = key
        self.cost = cost
        self.charged = cost if charged < 0 else charged
        self.reset_id = reset_id
        self.number = 0
        self.undoable = False  # whether (a, b, c) and (new_…) are the states before and after a stored charge
        if not cython.compiled:
            self.a: Any = 0
            self.b = self.new_a = self.new_b = self.start = self.retry = self.remaining = self.reset = 0
            self.c = self.new_c = self.cell = self.a
            self.others: Others = None  # of each other rate of the key its number, and its states before and after the charge

    @property
    def limit(self) -> NamedLimit:
        return self.named

    def remember(self, before: StateData, after: StateData, others: Others, start: int = 0) -> None:
        """Sets the states before and after a charge that another process stored, for an exact undo, and its start (µs)."""
        if not self.undoable:
            self.number = next(charge_numbers)
        self.a, self.b, self.c = before
        self.new_a, self.new_b, self.new_c = after
        self.others = others
        self.start = start
        self.undoable = True

    def charged_at(self) -> int:
        """The start of a charge that was stored and is not undone (µs); −1 when there is none."""
        return self.start if self.undoable else -1

    def forget_charge(self) -> None:
        """Notes that its charge is given back, or was refused: it must not be given back again."""
        self.undoable = False

    def remembered(self) -> tuple[StateData, StateData, Others] | None:
        """The states (before, after, of other rates) of a stored charge, for an exact undo; None when they are not known."""
        if not self.undoable:
            return None
        return (self.a, self.b, self.c), (self.new_a, self.new_b, self.new_c), self.others

    def charge(self) -> tuple[Any, ...]:
        """Everything that it knows of its charge, for `set_charge`."""
        states = self.a, self.b, self.c, self.new_a, self.new_b, self.new_c
        return self.reset_id, self.undoable, self.start, *states, self.others

    def set_charge(self, charge: tuple[Any, ...]) -> None:
        if not self.undoable:
            self.number = next(charge_numbers)
        self.reset_id, self.undoable, self.start, *states, self.others = charge
        self.a, self.b, self.c, self.new_a, self.new_b, self.new_c = states

    def __repr__(self) -> str:
        return f"Claim({self.named!r}, {self.key!r}, {self.cost})"
