"""Lifetime of the store of a gate: it is closed when the last version of the policy that uses it has ended.

A request keeps the version of the policy that it began with, and that version its store: settlements and waiting requests need it
after a reload. So a store that a reload replaced (another URL, another budget) is closed, and limits that it removed leave the
store, when the last request of the old version has ended, which is when the last reference to its `PolicyVersion` goes.
Rejected: closing after a delay, which is too short for some request or keeps connections for longer than any needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from ..algorithms.claim import NamedLimit
from ..clock import Clock
from ..stores import Store, store_from_url
from ..stores.guarded import GuardedStore
from ..stores.sans_io import Call, Plan, run
from .model import Policy
from .operator_overrides import OperatorOverrides, overrides_in


class OpenedStore:
    """A store of a policy. A remote one is guarded: it answers within the policy's budget, or on_failure does. `given`: a store
    that others close; otherwise `open` opens that of a URL."""

    def __init__(
        self,
        policy: Policy,
        given: Store | None = None,
        clock: Clock | None = None,
        open: Callable[[str], Store] = store_from_url,
    ) -> None:
        self.url, self.budget_us = policy.store, policy.budget_us
        self._given = given
        self.store = self._inner = open(policy.store) if given is None else given
        self._open = True
        self._overrides: dict[str, OperatorOverrides] = {}
        if not self.store.local and not isinstance(self.store, GuardedStore):
            budget = policy.budget_us / 1e6
            self.store = GuardedStore(self._inner, budget=budget, on_failure="closed", clock=clock, name=policy.name)

    def overrides_of(self, policy: Policy, clock: Clock) -> OperatorOverrides:
        """The overrides of operators for policies of this name, shared by all gates over this store."""
        if policy.name not in self._overrides:
            self._overrides[policy.name] = overrides_in(self.store.open_hash(f"overrides:{policy.name}"), clock)
        return self._overrides[policy.name]

    def serves(self, policy: Policy) -> bool:
        """Whether a policy can use it. The timeouts of a remote one are fixed, so another budget opens another store."""
        same_budget = self.store is self._inner or policy.budget_us == self.budget_us
        return same_budget and (self._given is not None or policy.store == self.url)

    def plan_close(self) -> Plan[None]:
        if self._open:
            self._open = False
            for overrides in self._overrides.values():
                overrides.close()
            if isinstance(self.store, GuardedStore) and self.store is not self._inner:
                self.store.leave()
            if self._given is None:
                yield Call(self._inner, "close")

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be ending
            run(self.plan_close())


class PolicyVersion:
    """What a version of a policy holds of its store. `removed` are limits that the next version does not use."""

    def __init__(self, opened: OpenedStore) -> None:
        self.opened = opened
        self.removed: Iterable[NamedLimit] = ()

    def __del__(self) -> None:
        with suppress(Exception):
            for limit in self.removed:
                self.opened.store.unregister(limit)
