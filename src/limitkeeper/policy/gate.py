"""The gate: a policy at work, its store, its versions, and what was counted. Facts about a request go in, a Evaluation comes out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import Any

from ..algorithms.claim import NamedLimit
from ..clock import SYSTEM
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..observe.events import GATE_KINDS, RELOAD_REFUSED, RELOADED, Publisher
from ..observe.offenders import Offenders
from ..observe.snapshot import DECISION_BOUNDS_US, Histogram, Snapshot
from ..stores import Store, store_from_url
from ..stores.guarded import GuardedStore
from . import settlement
from .compiled_policy import CompiledPolicy
from .evaluate import Evaluator
from .evaluation import Evaluation
from .explain import RuleExplanation, explain
from .model import Policy
from .on_failure import FailureAnswers
from .penalty_box import PenaltyBox
from .request_context import RequestContext
from .waiting_requests import WaitingRequests

log = logging.getLogger("limitkeeper")


class Gate(Evaluator):
    """`Gate("limitkeeper.yaml")`, `Gate(Policy.of(…), store=MemoryStore())`: a policy, its store, and what was counted.

    `handlers` are the degrade handlers that a policy names without saying where they are. `clock` is for tests of stores that are
    far away. `show_keys` shows keys of offenders as they are rather than as a keyed hash. Without `imports` the functions that a
    policy names are imported when they are first called: for whoever explains a policy away from its application.
    """

    def __init__(
        self,
        policy: Policy | str | Path,
        *,
        store: Store | None = None,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        clock: Any = None,
        show_keys: bool = False,
        secret: bytes | None = None,
        imports: bool = True,
    ) -> None:
        if not isinstance(policy, Policy):
            policy = Policy.load(policy)
        super().__init__()
        self.handlers = dict(handlers or {})
        self._imports = imports
        self.compiled = CompiledPolicy(policy, self.handlers, imports)
        self._given = store
        self._opened: dict[tuple[str, int], Store] = {}
        self._reloading = threading.RLock()
        self._guards: dict[tuple[int, int], GuardedStore] = {}
        self._clock = clock
        self.secret = token_bytes(16) if secret is None else secret
        self.store = self.compiled.store = self._store_of(policy)
        self.remote = not self.store.local
        self.clock = clock if clock is not None else self.store.clock if self.store.local else SYSTEM
        self.on_failure = FailureAnswers(self.clock)
        self.queue = WaitingRequests(self.store)
        self.penalty_box = None if policy.penalty_box is None else PenaltyBox(policy, self.clock)
        self._shut_out_before = 0  # by the shutters of earlier versions: a counter never goes back
        self.offenders = Offenders(show_keys=show_keys, secret=self.secret, clock=self.clock)
        self.marks: dict[Any, NamedLimit] = {}
        self.reloads = self.reloads_refused = 0
        self._watch: Any = None
        reset_after_fork(self)
        self._know()

    def _reset_after_fork(self) -> None:
        """Makes the reload lock anew and forgets the parent's waiting requests."""
        self._reloading = threading.RLock()
        for compiled_rule in self.compiled.rules:
            compiled_rule.waiting.waiting = 0

    def __repr__(self) -> str:
        return f"<Gate {self.policy.name!r}: {len(self.policy.rules)} rules, {self.store!r}>"

    # What it stands on -----------------------------------------------------------------------------------------

    def _store_of(self, policy: Policy) -> Store:
        """The store of a policy; one that is far away answers within the policy's budget, or the rules' on_failure does."""
        store = self._open(policy) if self._given is None else self._given
        if store.local or isinstance(store, GuardedStore):
            return store
        guard = self._guards.get((id(store), policy.budget_us))
        if guard is None:
            guard = GuardedStore(store, budget=policy.budget_us / 1e6, on_failure="closed", clock=self._clock, name=policy.name)
            self._guards[id(store), policy.budget_us] = guard
        return guard

    def _open(self, policy: Policy) -> Store:
        """The store of a URL. One that is far away has its patience for good, so that another budget opens another."""
        found = [self._opened.get((policy.store, budget_us)) for budget_us in (0, policy.budget_us)]
        store = found[1] if found[0] is None else found[0]
        if store is None:
            store = store_from_url(policy.store)
            self._opened[policy.store, 0 if store.local else policy.budget_us] = store
        return store

    def _know(self) -> None:
        for compiled_rule in self.compiled.rules:
            begin = getattr(compiled_rule.overrides, "begin", None)
            if begin is not None:  # those that are read in the background are read from the start
                begin()
            for entries in compiled_rule.made.values():
                for entry in entries:
                    self.store.register(entry.named)

    @property
    def policy(self) -> Policy:
        policy: Policy = self.compiled.policy
        return policy

    @property
    def events(self) -> Publisher:
        """Where to listen: `gate.events.on("refused", listener)`."""
        if self._publisher is None:
            self._publisher = Publisher(GATE_KINDS)
        publisher: Publisher = self._publisher
        return publisher

    # Settling, explaining --------------------------------------------------------------------------------------

    def settle(self, evaluation: Evaluation, status: int, size: int) -> None:
        """Gives back, or charges more, now that the response is known."""
        settlement.settled(self, evaluation, status, size)

    async def asettle(self, evaluation: Evaluation, status: int, size: int) -> None:
        await settlement.asettled(self, evaluation, status, size)

    def explain(self, context: RequestContext) -> list[RuleExplanation]:
        """What every rule of the policy says to a request. Nothing is charged."""
        return explain(self, context)

    def for_rule(self, name: str) -> Gate:
        """One rule of this policy on its own, whatever it matches; with its counters, and this gate's events, offenders, queue.

        Requests that ask it are not counted again in this gate's totals. It knows this version of the policy only.
        """
        place = next((i for i, rule in enumerate(self.policy.rules) if rule.name == name), None)
        if place is None:
            names = ", ".join(rule.name for rule in self.policy.rules)
            raise ConfigurationError(f"the policy {self.policy.name!r} has no rule {name!r}; it has: {names}")
        policy = replace(self.policy, rules=(replace(self.policy.rules[place], match=()),))
        gate = Gate(policy, store=self.store, handlers=self.handlers, clock=self._clock, secret=self.secret)
        gate.compiled.close()  # what it began of its own: the compiled_rule at work is this gate's
        gate.compiled.rules[0] = self.compiled.rules[place]
        gate.offenders, gate.penalty_box, gate.on_failure, gate.queue = (
            self.offenders,
            self.penalty_box,
            self.on_failure,
            self.queue,
        )
        gate._publisher = self.events
        return gate

    # Versions --------------------------------------------------------------------------------------------------

    def reload(self, policy: Policy) -> None:
        """From the next request on, this policy holds. Counters and states of rules that keep their names go on."""
        with self._reloading:  # two versions that come at once follow each other
            self._reload(policy)
        self.publish(RELOADED, None)

    def _reload(self, policy: Policy) -> None:
        compiled = CompiledPolicy(policy, self.handlers, self._imports)
        before = {compiled_rule.name: compiled_rule for compiled_rule in self.compiled.rules}
        for compiled_rule in compiled.rules:
            if compiled_rule.name in before:
                compiled_rule.inherit(before[compiled_rule.name])
        store = compiled.store = self._store_of(policy)
        old, self.compiled = self.compiled, compiled
        if store is not self.store:
            self.store, self.remote, self.queue = store, not store.local, WaitingRequests(store)
        if policy.penalty_box != old.policy.penalty_box:
            self._shut_out_before += 0 if self.penalty_box is None else self.penalty_box.refused
            self.penalty_box = None if policy.penalty_box is None else PenaltyBox(policy, self.clock)
        self._know()
        self.reloads += 1
        for compiled_rule in old.rules:
            if compiled_rule.overrides is not None and all(
                compiled_rule.overrides is not new.overrides for new in compiled.rules
            ):
                compiled_rule.overrides.close()

    def reload_refused(self, error: BaseException) -> None:
        """A new version could not be read: the old one stays."""
        self.reloads_refused += 1
        log.error("the policy %r stays as it was; its new version has mistakes:\n%s", self.policy.name, error)
        self.publish(RELOAD_REFUSED, None, error)

    def watch(self, interval: Any = "1s") -> None:
        """Follows the policy's file: a new version takes over, a bad one is refused."""
        if self.policy.source is None:
            raise ConfigurationError("this policy was not read from a file, so there is nothing to watch; use Policy.load(path)")
        if self._watch is None:
            from .file_watcher import watch_policy

            self._watch = watch_policy(self, interval=interval)

    # Numbers ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything that was counted since the gate was made."""
        offered, offenders = self.offenders.look(10)
        return Snapshot(
            self.policy.name,
            rules=tuple([compiled_rule.snapshot() for compiled_rule in self.compiled.rules]),
            requests=self.requests,
            allowed=self.allowed_requests,
            refused=self.refused_requests,
            unlimited=self.unlimited_requests,
            exempt=self.exempt_requests,
            penalty_box=self._shut_out_before + (0 if self.penalty_box is None else self.penalty_box.refused),
            penalty_box_clients=0 if self.penalty_box is None else len(self.penalty_box),
            decisions=Histogram(DECISION_BOUNDS_US, tuple(self.latency), float(self.latency_sum)),
            reloads=self.reloads,
            reloads_refused=self.reloads_refused,
            offenders=tuple(offenders),
            offered=offered,
            store=self.store.stats() if isinstance(self.store, GuardedStore) else None,
        )

    # The end ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self.compiled.close()
        for guard in self._guards.values():
            guard.leave()

    def close(self) -> None:
        """Stops watching, and closes the stores that this gate opened."""
        self._end()
        for store in self._opened.values():
            store.close()

    async def aclose(self) -> None:
        self._end()
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
    """A gate from what a middleware was given: a gate, a policy, or the path of a policy's file."""
    if isinstance(policy, Gate):
        return policy
    if not isinstance(policy, (Policy, str, Path)):
        raise ConfigurationError(f"policy must be a Policy, a Gate or the path of a policy's file, not {policy!r}")
    return Gate(policy, **options)
