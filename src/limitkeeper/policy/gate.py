"""Gate: a policy, its store and its counters. A RequestContext goes in, an Evaluation comes out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import Any

from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..observe.events import GATE_KINDS, RELOAD_REFUSED, RELOADED, Publisher
from ..observe.offenders import Offenders
from ..observe.snapshot import DECISION_BOUNDS_US, Histogram, Snapshot
from ..rate import Duration
from ..stores import Store, store_from_url
from ..stores.guarded import GuardedStore
from .compiled_policy import CompiledPolicy
from .evaluation import Evaluator
from .explain import RuleExplanation, explain
from .file_watcher import FileWatcher, watch_policy
from .model import Policy
from .on_failure import FailureAnswers
from .overrides import HashOverrides
from .penalty_box import PenaltyBox
from .request_context import RequestContext
from .waiting_requests import WaitingRequests

log = logging.getLogger("limitkeeper")


class Gate(Evaluator):
    """Enforces a policy: `Gate("limitkeeper.yaml")`, `Gate(Policy.of(…), store=MemoryStore())`.

    `handlers` are the degrade handlers that a policy refers to by name. `clock` is the clock of guards, penalty box and offenders
    for a remote store, for tests. `show_keys` shows the keys of offenders instead of keyed hashes, `secret` is the hash's key.
    Without `imports`, callables that a policy names are imported at their first call: to explain a policy away from its
    application.
    """

    def __init__(
        self,
        policy: Policy | str | Path,
        *,
        store: Store | None = None,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        clock: Clock | None = None,
        show_keys: bool = False,
        secret: bytes | None = None,
        imports: bool = True,
    ) -> None:
        if not isinstance(policy, Policy):
            policy = Policy.load(policy)
        super().__init__()
        self.handlers = dict(handlers or {})
        self.secret = token_bytes(16) if secret is None else secret
        self.reloads = self.reloads_refused = 0
        self._imports = imports
        self._given_store = store
        self._given_clock = clock
        self._opened: dict[tuple[str, int], Store] = {}
        self._guards: dict[tuple[int, int], GuardedStore] = {}
        self._reloading = threading.RLock()
        self._watcher: FileWatcher | None = None
        self._boxed_before = 0  # refusals by the penalty boxes of earlier versions
        self.compiled = CompiledPolicy(policy, self.handlers, imports)
        self.store = self.compiled.store = self._store_of(policy)
        self.clock: Clock = clock if clock is not None else self.store.clock if self.store.local else SYSTEM
        self.offenders = Offenders(show_keys=show_keys, secret=self.secret, clock=self.clock)
        self._remote = not self.store.local
        self._on_failure = FailureAnswers(self.clock)
        self._waiting = WaitingRequests(self.store, self.clock)
        self._penalty_box = None if policy.penalty_box is None else PenaltyBox(policy, self.clock)
        reset_after_fork(self)
        self._register()

    def __repr__(self) -> str:
        return f"<Gate {self.policy.name!r}: {len(self.policy.rules)} rules, {self.store!r}>"

    def _reset_after_fork(self) -> None:
        """Creates the reload lock again and forgets the parent's waiting requests."""
        self._reloading = threading.RLock()
        for rule in self.compiled.rules:
            rule.waiting.count = 0

    @property
    def policy(self) -> Policy:
        """The version of the policy that is enforced now."""
        policy: Policy = self.compiled.policy
        return policy

    @property
    def events(self) -> Publisher:
        """Listeners of this gate: `gate.events.on("refused", listener)`."""
        if self._publisher is None:
            self._publisher = Publisher(GATE_KINDS)
        return self._publisher

    # Stores ----------------------------------------------------------------------------------------------------

    def _store_of(self, policy: Policy) -> Store:
        """The store of a policy; a remote one is guarded, so that it answers within the policy's budget or the rules'
        on_failure does."""
        store = self._open(policy) if self._given_store is None else self._given_store
        if store.local or isinstance(store, GuardedStore):
            return store
        guard = self._guards.get((id(store), policy.budget_us))
        if guard is None:
            guard = GuardedStore(
                store, budget=policy.budget_us / 1e6, on_failure="closed", clock=self._given_clock, name=policy.name
            )
            self._guards[id(store), policy.budget_us] = guard
        return guard

    def _open(self, policy: Policy) -> Store:
        """The store of a URL. The timeouts of a remote one are fixed, so another budget opens another store."""
        store = self._opened.get((policy.store, 0)) or self._opened.get((policy.store, policy.budget_us))
        if store is None:
            store = store_from_url(policy.store)
            self._opened[policy.store, 0 if store.local else policy.budget_us] = store
        return store

    def _register(self) -> None:
        """Starts reading overrides, and registers all limits with the store."""
        for rule in self.compiled.rules:
            if isinstance(rule.overrides, HashOverrides):
                rule.overrides.begin()
            for entries in rule.entries_by_limits.values():
                for entry in entries:
                    self.store.register(entry.named)

    # Rules -----------------------------------------------------------------------------------------------------

    def explain(self, context: RequestContext) -> list[RuleExplanation]:
        """Whether each rule of the policy applies to a request, and why; its limits and decision. Nothing is charged."""
        return explain(self, context)

    def for_rule(self, name: str) -> Gate:
        """A gate of one rule, without its match; it shares this gate's counters of the rule, events, offenders and queue.

        Its requests are not counted in this gate's totals. It does not follow a reload.
        """
        place = next((i for i, rule in enumerate(self.policy.rules) if rule.name == name), None)
        if place is None:
            names = ", ".join(rule.name for rule in self.policy.rules)
            raise ConfigurationError(f"the policy {self.policy.name!r} has no rule {name!r}; it has: {names}")
        policy = replace(self.policy, rules=(replace(self.policy.rules[place], match=()),))
        gate = Gate(policy, store=self.store, handlers=self.handlers, clock=self._given_clock, secret=self.secret)
        gate.compiled.close()  # it evaluates this gate's compiled rule, not its own
        gate.compiled.rules[0] = self.compiled.rules[place]
        gate.offenders, gate._penalty_box = self.offenders, self._penalty_box
        gate._on_failure, gate._waiting, gate._publisher = self._on_failure, self._waiting, self.events
        return gate

    # Versions --------------------------------------------------------------------------------------------------

    def reload(self, policy: Policy) -> None:
        """Enforces this policy from the next request on. Rules that keep their names keep their counters and states."""
        with self._reloading:
            self._reload(policy)
        self._publish(RELOADED, None)

    def _reload(self, policy: Policy) -> None:
        compiled = CompiledPolicy(policy, self.handlers, self._imports)
        before = {rule.name: rule for rule in self.compiled.rules}
        for rule in compiled.rules:
            if rule.name in before:
                rule.inherit(before[rule.name])
        store = compiled.store = self._store_of(policy)
        old, self.compiled = self.compiled, compiled
        if store is not self.store:
            self.store, self._remote, self._waiting = store, not store.local, WaitingRequests(store, self.clock)
        if policy.penalty_box != old.policy.penalty_box:
            self._boxed_before += 0 if self._penalty_box is None else self._penalty_box.refused
            self._penalty_box = None if policy.penalty_box is None else PenaltyBox(policy, self.clock)
        self._register()
        self.reloads += 1
        for rule in old.rules:
            if rule.overrides is not None and all(rule.overrides is not new.overrides for new in compiled.rules):
                rule.overrides.close()

    def reload_refused(self, error: BaseException) -> None:
        """Counts and logs that a new version could not be loaded; the old one stays in force."""
        self.reloads_refused += 1
        log.error("the policy %r stays in force; its new version has errors:\n%s", self.policy.name, error)
        self._publish(RELOAD_REFUSED, None, error)

    def watch(self, interval: Duration = "1s") -> None:
        """Reloads the policy when its file changes; a version with errors is refused."""
        if self.policy.source is None:
            raise ConfigurationError("this policy was not read from a file, so there is nothing to watch; use Policy.load(path)")
        if self._watcher is None:
            self._watcher = watch_policy(self, interval=interval)

    def snapshot(self) -> Snapshot:
        """All counters since the gate was created."""
        offered, offenders = self.offenders.look(10)
        box = self._penalty_box
        return Snapshot(
            self.policy.name,
            rules=tuple([rule.snapshot() for rule in self.compiled.rules]),
            requests=self._requests,
            allowed=self._allowed,
            refused=self._refused,
            unlimited=self._unlimited,
            exempt=self._exempt,
            penalty_box=self._boxed_before + (0 if box is None else box.refused),
            penalty_box_clients=0 if box is None else len(box),
            decisions=Histogram(DECISION_BOUNDS_US, tuple(self._latency), float(self._latency_sum)),
            reloads=self.reloads,
            reloads_refused=self.reloads_refused,
            offenders=tuple(offenders),
            offered=offered,
            store=self.store.stats() if isinstance(self.store, GuardedStore) else None,
        )

    # Closing ---------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        self.compiled.close()
        for guard in self._guards.values():
            guard.leave()

    def close(self) -> None:
        """Stops watching, and closes the stores that this gate opened."""
        self._stop()
        for store in self._opened.values():
            store.close()

    async def aclose(self) -> None:
        """As `close`, awaited."""
        self._stop()
        for store in self._opened.values():
            await store.aclose()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Gate:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def gate_of(policy: Policy | str | Path | Gate, **options: Any) -> Gate:
    """The gate of a middleware: a gate, or one for a policy or the path of a policy file, with these options of `Gate`."""
    if isinstance(policy, Gate):
        return policy
    if not isinstance(policy, (Policy, str, Path)):
        raise ConfigurationError(f"expected a Policy, a Gate or the path of a policy file as policy, got {policy!r}")
    return Gate(policy, **options)
