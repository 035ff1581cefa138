"""Gate: a policy, its store and its counters. A RequestContext goes in, an Evaluation comes out."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import Any

from ..algorithms.claim import NamedLimit
from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError, LimitkeeperError
from ..fork import reset_after_fork
from ..observe.events import GATE_KINDS, RELOAD_REFUSED, RELOADED, Publisher
from ..observe.offenders import Offenders
from ..observe.snapshot import DECISION_BOUNDS_US, Histogram, Snapshot
from ..rate import Duration
from ..stores import Store, store_from_url
from ..stores.guarded import GuardedStore
from ..stores.sans_io import Plan, arun, run
from ..stores.urls import masked
from .application_overrides import HashOverrides
from .compiled_policy import CompiledPolicy
from .compiled_rule import CompiledRule, Entry, identity_of, key_of
from .evaluation import Evaluation, Evaluator
from .explain import RuleExplanation, explain
from .file_watcher import FileWatcher
from .model import Key, Policy
from .penalty_box import PenaltyBox
from .request_context import RequestContext
from .retry_amplification import AttemptCounter
from .rule_fair_share import RuleCapacity
from .settlement import UNKNOWN
from .store_lifetime import OpenedStore, PolicyVersion
from .waiting_requests import PLACES, WaitingRequests

log = logging.getLogger("limitkeeper")


class Gate(Evaluator):
    """Enforces a policy: `Gate("limitkeeper.yaml")`, `Gate(Policy.of(…), store=MemoryStore())`.

    `handlers` are the degrade handlers that a policy refers to by name. `clock` is the clock of guards, penalty box and offenders
    for a remote store, for tests. `show_keys` shows the keys of offenders instead of keyed hashes, `secret` is the hash's key.
    Without `imports`, callables are imported at their first call: to explain a policy away from its application. `open_store`
    opens the store of the policy's URL, also of a URL that a reload brings.
    """

    def __init__(
        self,
        policy: Policy | str | Path,
        *,
        store: Store | OpenedStore | None = None,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        clock: Clock | None = None,
        show_keys: bool = False,
        secret: bytes | None = None,
        imports: bool = True,
        open_store: Callable[[str], Store] = store_from_url,
    ) -> None:
        if not isinstance(policy, Policy):
            policy = Policy.load(policy)
        self.handlers = dict(handlers or {})
        secret = token_bytes(16) if secret is None else secret
        self.reloads = self.reloads_refused = 0
        self._imports = imports
        self._given_store = store
        self._given_clock = clock
        self._open_store = open_store
        self._memory: dict[str, OpenedStore] = {}  # stores of memory:// URLs, whose states a reload back finds again
        self._reloading = threading.RLock()
        self._watcher: FileWatcher | None = None
        self._boxed_before = 0  # refusals by the penalty boxes of earlier versions
        compiled = CompiledPolicy(policy, self.handlers, imports)
        self._opened = store if isinstance(store, OpenedStore) else self._open(policy)
        use_store(compiled, self._opened)
        self.clock: Clock = clock if clock is not None else SYSTEM if compiled.remote else compiled.store.clock
        offenders = Offenders(show_keys=show_keys, secret=secret, clock=self.clock)
        super().__init__(compiled, self.clock, offenders, secret)
        reset_after_fork(self)
        self._register(compiled)
        self.operator_overrides = self._opened.overrides_of(policy, self.clock)
        self.operator_overrides.follow(self, compiled)

    def __repr__(self) -> str:
        return f"<Gate {self.policy.name!r}: {len(self.policy.rules)} rules, {self.store!r}>"

    def _reset_after_fork(self) -> None:
        """Creates the reload lock again and forgets the parent's waiting requests."""
        self._reloading = threading.RLock()
        for rule in self.compiled.rules:
            rule.waiting.requests.clear()
            rule.waiting.clients.clear()

    @property
    def policy(self) -> Policy:
        """The version of the policy that is enforced now."""
        policy: Policy = self.compiled.policy
        return policy

    @property
    def store(self) -> Store:
        """The store of this version, with its guard."""
        return self.compiled.store

    @property
    def events(self) -> Publisher:
        """Listeners of this gate: `gate.events.on("refused", listener)`."""
        if self._publisher is None:
            self._publisher = Publisher(GATE_KINDS)
        return self._publisher

    @property
    def opened_store(self) -> OpenedStore:
        """The store for other gates, which keep it open while they use it: `Gate(policy, store=gate.opened_store)`."""
        return self._opened

    def _open(self, policy: Policy) -> OpenedStore:
        """The store of a policy: the present one, if that serves it."""
        if isinstance(self._given_store, OpenedStore):
            return self._given_store
        present: OpenedStore | None = getattr(self, "_opened", None)
        opened = present if present is not None and present.serves(policy) else self._memory.get(policy.store)
        if opened is None:
            opened = OpenedStore(policy, self._given_store, self._given_clock, self._open_store)
            if self._given_store is None and opened.url.startswith("memory:"):
                self._memory[opened.url] = opened
        return opened

    def _register(self, compiled: CompiledPolicy) -> None:
        """Starts reading overrides, and registers all limits with the store."""
        for rule in compiled.rules:
            if isinstance(rule.overrides, HashOverrides):
                rule.overrides.begin()
            if rule.overrides is not None:
                rule.register = self.register_override
            if rule.config.capacity is not None:
                rule.capacity = RuleCapacity(rule, rule.config.capacity, compiled.store, self.clock)
        for limit in limits_of(compiled):
            compiled.store.register(limit)

    def register_override(self, rule: CompiledRule, entries: tuple[Entry, ...]) -> bool:
        """Registers limits of single keys that came at run time. False, and an alert, when the store has no room for them."""
        try:
            for limit in named_limits(entries):
                self.store.register(limit)
        except ConfigurationError as error:
            self._alert_override(rule, error)
            return False
        return True

    def explain(self, context: RequestContext) -> list[RuleExplanation]:
        """Whether each rule of the policy applies to a request, and why; its limits and decision. Nothing is charged."""
        return explain(self, context)

    async def aask(self, context: RequestContext, in_thread: bool = False) -> Evaluation:
        """As `ask`, awaited. `in_thread`: a thread is held until this returns. A request that is cancelled while a remote store
        decides may have taken a place of those that run at a time: it is given back, or it would count until its `hold` ends."""
        asking = super().aask(context, in_thread)
        if not self.compiled.remote or not self.compiled.concurrent:
            return await asking
        task = asyncio.ensure_future(asking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._leave(task)))
            raise

    async def _leave(self, task: asyncio.Task[Evaluation]) -> None:
        """Ends a request that was cancelled: its decision is there after the budget of each call, and it enters no queue then;
        where it waits in one, it gives back by itself what it has charged."""
        PLACES.cancelled.add(task)
        if task in PLACES.tasks:
            task.cancel()
        with suppress(asyncio.CancelledError, LimitkeeperError):
            await (await task).asettle(UNKNOWN)

    def message_identities(self, context: RequestContext) -> dict[str, str | None]:
        """The identities that rules for messages need, when a connection begins (`context` is that of a message). They hold for
        all its messages: otherwise a client would be without a key, and without a limit, once its token has expired."""
        compiled, box = self.compiled, self.policy.penalty_box
        if compiled.limits_messages:
            matched = compiled.match(context)
            compiled.exempted_rules(matched, context)
            for rule in matched.rules:
                rule.applies(context)
                rule.key_for(context)
                if rule.tier_identity is not None:
                    identity_of(compiled.identities, context, rule.tier_identity)
            if box is not None:
                key_of(compiled.identities, context, box.key)
        return context.identities

    def for_rule(self, name: str, key: Key | None = None) -> Gate:
        """A gate of one rule, without its match, and with another `key` where that is given; it shares this gate's counters of
        the rule, events, offenders and queue, not its totals. It does not follow a reload."""
        place = next((i for i, rule in enumerate(self.policy.rules) if rule.name == name), None)
        if place is None:
            names = ", ".join(rule.name for rule in self.policy.rules)
            raise ConfigurationError(f"the policy {self.policy.name!r} has no rule {name!r}; it has: {names}")
        own, rule = self.compiled.rules[place], self.policy.rules[place]
        policy = replace(self.policy, rules=(replace(rule, match=(), key=rule.key if key is None else key),))
        gate = Gate(policy, store=self._opened, handlers=self.handlers, clock=self._given_clock, secret=self.secret)
        if key is None:
            gate.compiled.close()  # it evaluates this gate's compiled rule, not its own
            gate.compiled.rules[0] = own
        else:
            own.include(gate.compiled.rules[0])
        gate.offenders, gate._penalty_box, gate._attempts = self.offenders, self._penalty_box, None
        gate._on_failure, gate._waiting, gate._publisher = self._on_failure, self._waiting, self.events
        return gate

    def reload(self, policy: Policy) -> None:
        """Enforces this policy from the next request on. Rules that keep their names keep their counters and states."""
        with self._reloading:
            compiled, old = CompiledPolicy(policy, self.handlers, self._imports), self.compiled
            opened = self._open(policy)
            use_store(compiled, opened)
            try:
                self._register(compiled)
            except ConfigurationError:  # the store has no room for its limits: the old version stays in force
                compiled.close()
                raise
            overrides = opened.overrides_of(policy, self.clock)
            if overrides is not self.operator_overrides:
                self.operator_overrides.leave(self)
                self.operator_overrides = overrides
            overrides.follow(self, compiled)
            before = {rule.name: rule for rule in old.rules}
            for rule in compiled.rules:
                if rule.name in before:
                    rule.inherit(before[rule.name])
            if opened is self._opened:
                old.version.removed = limits_of(old)
            waiting = self._waiting if compiled.store is old.store else WaitingRequests(compiled.store, self.clock)
            self.compiled, self._opened, self._waiting = compiled, opened, waiting
            overrides.follow(self, compiled)  # again: they may have changed since
            if policy.penalty_box != old.policy.penalty_box:
                self._boxed_before += 0 if self._penalty_box is None else self._penalty_box.refused
                self._penalty_box = None if policy.penalty_box is None else PenaltyBox(policy, self.clock)
            if policy.retry_amplification != old.policy.retry_amplification:
                self._attempts = AttemptCounter.of(policy, self.secret, self.clock, self._attempts)
            self.reloads += 1
            for rule in old.rules:
                if rule.overrides is not None and all(rule.overrides is not new.overrides for new in compiled.rules):
                    rule.overrides.close()
            if policy.store != old.policy.store and self._given_store is not None:
                log.warning("the policy names the store %s now; this program chose its own, which stays", masked(policy.store))
        log.info("the policy %r was reloaded; number of rules: %d", policy.name, len(policy.rules))
        self._publish(RELOADED, None)

    def reload_refused(self, error: BaseException) -> None:
        """Counts and logs that a new version could not be loaded; the old one stays in force."""
        self.reloads_refused += 1
        log.error("the policy %r stays in force; its new version has errors:\n%s", self.policy.name, error)
        self._publish(RELOAD_REFUSED, None, error)

    def watch(self, interval: Duration = "1s") -> None:
        """Reloads the policy when its file, a file that it names, or SIGHUP says so; a version with errors is refused. A
        file that has changed since the policy was read is loaded at once."""
        from .reading.load import has_changed

        if self.policy.source is None:
            raise ConfigurationError("this policy was not read from a file, so there is nothing to watch; use Policy.load(path)")
        source = Path(os.path.abspath(self.policy.source))
        if self._watcher is None:
            self._watcher = FileWatcher(
                source,
                lambda: self.reload(Policy.load(source)),
                interval,
                on_error=self.reload_refused,
                more=lambda: self.policy.files,
                hang_up=True,
            )
            if has_changed(self.policy):
                self._watcher.wake()

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
            attempts=None if self._attempts is None else self._attempts.attempts,
            distinct_requests=None if self._attempts is None else self._attempts.distinct,
            decisions=Histogram(DECISION_BOUNDS_US, tuple(self._latency), float(self._latency_sum)),
            reloads=self.reloads,
            reloads_refused=self.reloads_refused,
            offenders=tuple(offenders),
            offered=offered,
            store=self.store.stats() if isinstance(self.store, GuardedStore) else None,
        )

    def _close(self) -> Plan[None]:
        if self._watcher is not None:
            self._watcher.stop()
        self.compiled.close()
        if not isinstance(self._given_store, OpenedStore):
            yield from self._opened.plan_close()

    def close(self) -> None:
        """Stops watching, and closes the stores that this gate opened."""
        run(self._close())

    async def aclose(self) -> None:
        """As `close`, awaited."""
        await arun(self._close())

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Gate:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def use_store(compiled: CompiledPolicy, opened: OpenedStore) -> None:
    """Lets a version of a policy decide by a store, which it keeps open."""
    compiled.version, compiled.store, compiled.remote = PolicyVersion(opened), opened.store, not opened.store.local


def limits_of(compiled: CompiledPolicy) -> list[NamedLimit]:
    """All limits that a version has used so far."""
    entries = [entry for rule in compiled.rules for found in rule.entries_by_limits.values() for entry in found]
    return named_limits(entries) + [rule.idempotent for rule in compiled.rules if rule.idempotent is not None]


def named_limits(entries: Iterable[Entry]) -> list[NamedLimit]:
    """The limits of entries in the store, with those for repetitions."""
    return [limit for entry in entries for limit in (entry.named, entry.replays) if limit is not None]


def gate_of(policy: Policy | str | Path | Gate, **options: Any) -> Gate:
    """The gate of a middleware: a gate, or one for a policy or the path of a policy file, with these options of `Gate`."""
    if isinstance(policy, Gate):
        return policy
    if not isinstance(policy, (Policy, str, Path)):
        raise ConfigurationError(f"expected a Policy, a Gate or the path of a policy file as policy, got {policy!r}")
    return Gate(policy, **options)
