"""The gate: a policy at work. Facts about a request go in, a Passage comes out.

    plan       which rules the path is meant by (edition.py)
    claims     for each of them: its key, its limits, its cost (clause.py)
    decision   all of them together in one question to the store: all are charged, or none
    passage    counted, told to listeners, and handed to whoever writes the answer

`quick` answers on the spot whatever this process can answer alone; `ask` and `aask` are the two colours of the rest. What is not on
the way of every request has a file of its own: waiting (queue.py), charging once (once.py), a store that fails (failing.py),
what is settled when the response is known (settle.py), who is shut out (shut_out.py), how a refusal is told (refusing.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_bytes
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from headgate import _plain as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.headgate.algorithms.claim import Claim
    from cython.cimports.headgate.decision import Decision
    from cython.cimports.headgate.monotonic import monotonic_us
    from cython.cimports.headgate.policy.clause import Clause
    from cython.cimports.headgate.policy.edition import Edition, Plan
    from cython.cimports.headgate.policy.facts import Facts
    from cython.cimports.headgate.policy.passage import Entry, Passage
    from cython.cimports.headgate.stores.contract import Store
else:
    from ..algorithms.claim import Claim
    from ..clock import monotonic_us
    from ..decision import Decision
    from ..stores.contract import Store
    from .clause import Clause
    from .edition import Edition, Plan
    from .facts import Facts
    from .passage import Entry, Passage

from ..clock import SYSTEM
from ..errors import ConfigurationError, StoreError
from ..observe.events import Publisher
from ..observe.offenders import Offenders
from ..observe.tally import DECISION_BOUNDS_US, RESPONSE_BOUNDS_MS, Histogram, Tally
from ..stores.guarded import GuardedStore
from ..stores.urls import store_from_url
from ..verbs import is_off
from . import once, refusing, settle
from .explain import Explained, explain
from .failing import Failing
from .match import host_is_meant
from .model import Policy
from .queue import Queue
from .shut_out import Shutter

log = logging.getLogger("headgate")
ALERT, SHADOW, RELOADED, RELOAD_REFUSED = "alert", "shadow", "reloaded", "reload refused"
REFUSED, SHUT_OUT_EVENT, STORE_FAILED = "refused", "shut out", "store failed"
GATE_KINDS = (REFUSED, SHADOW, ALERT, SHUT_OUT_EVENT, RELOADED, RELOAD_REFUSED, STORE_FAILED)


@cython.cclass
class Asking:
    """What every request goes through; `Gate` adds what happens around it."""

    # fmt: off
    __slots__ = ("__weakref__", "_publisher", "allowed_requests", "edition", "exempt_requests", "failing", "far", "latency",
                 "latency_sum", "offenders", "queue", "refused_requests", "requests", "shutter", "store", "unlimited_requests")
    # fmt: on

    # Preparing -------------------------------------------------------------------------------------------------

    @cython.cfunc
    def prepare(self, facts: Facts) -> Passage:
        """What a request asks for: the entries, keys and costs of all rules that are meant."""
        edition: Edition = self.edition
        passage: Passage = Passage(self, edition)
        passage.began_us = monotonic_us()
        passage.facts = facts
        plan: Plan = edition.plan(facts)
        if plan.exempt or is_off():
            return passage
        excused: object = None
        if plan.pardons:
            excused = edition.pardoned(plan, facts)
            if excused is True:
                return passage
        entries: list = []  # type: ignore[type-arg]
        keys: list = []  # type: ignore[type-arg]
        costs: list = []  # type: ignore[type-arg]
        passage.entries = entries
        passage.keys = keys
        passage.costs = costs
        i: cython.Py_ssize_t
        clause: Clause
        hosts: object = plan.hosts
        for i in range(len(plan.clauses)):
            clause = plan.clauses[i]
            if hosts is not None and hosts[i] and not host_is_meant(hosts[i], facts.host()):
                continue
            if (excused is not None and clause.name in excused) or not clause.meant(facts):  # type: ignore[operator]
                continue
            key = clause.key_for(facts)
            if key is None:
                continue
            self.add(passage, clause, facts, key)  # type: ignore[arg-type]
        return passage

    @cython.cfunc
    def add(self, passage: Passage, clause: Clause, facts: Facts, key: str) -> cython.int:
        """One rule's entries, to be asked with all others; in shadow, or once, on its own."""
        limits: tuple = clause.limits_for(facts, key)  # type: ignore[type-arg]
        if not limits:
            return 0
        cost: cython.longlong = clause.cost_for(facts)
        if clause.shadow:
            passage.special = True
            if passage.shadow is None:
                passage.shadow = []
            passage.shadow.append([Claim(entry.named, key, cost) for entry in limits])
            passage.shadow.append(clause)
            return 0
        if clause.rule.once is not None:
            told = facts.header(clause.rule.once.header)
            if told:
                passage.special = True
                if passage.onces is None:
                    passage.onces = []
                passage.onces.append((clause, limits, key, cost, told))
                return 0
        for entry in limits:
            passage.entries.append(entry)
            passage.keys.append(key)
            passage.costs.append(cost)
        if clause.owes:
            passage.owes = True
        return 0

    @cython.cfunc
    def claims(self, passage: Passage) -> list:  # type: ignore[type-arg]
        """The claims of a passage, made when they are first needed."""
        if passage.claims is None:
            found: list = []  # type: ignore[type-arg]
            i: cython.Py_ssize_t
            for i in range(len(passage.entries)):
                entry: Entry = passage.entries[i]
                found.append(Claim(entry.named, passage.keys[i], passage.costs[i]))
            passage.claims = found
        return passage.claims  # type: ignore[no-any-return]

    @cython.cfunc
    def decide(self, passage: Passage) -> Decision:
        """One question for all entries, asked of a store in this process (or waited for)."""
        if len(passage.entries) == 1 and not passage.owes:
            entry: Entry = passage.entries[0]
            return self.store.one(entry.named, passage.keys[0], passage.costs[0], 0, True)
        return self.store.decide(self.claims(passage), 0, True)

    # Concluding ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def passed(self, passage: Passage, decision: Decision) -> Passage:
        """Counts a request that every rule let pass."""
        passage.decision = decision
        passage.allowed = True
        i: cython.Py_ssize_t
        entry: Entry
        clause: Clause
        n: cython.Py_ssize_t = len(passage.entries)
        if n == 1:
            entry = passage.entries[0]
            self.count_one(passage, entry, decision, 0)
        else:
            parts: tuple = decision.decisions  # type: ignore[type-arg]
            for i in range(n):
                self.count_one(passage, passage.entries[i], parts[i], i)
        self.timed(passage)
        self.requests += 1
        self.allowed_requests += 1
        return passage

    @cython.cfunc
    def count_one(self, passage: Passage, entry: Entry, part: Decision, i: cython.Py_ssize_t) -> cython.int:
        clause: Clause = entry.clause
        if entry.label is clause.name:
            clause.passed += 1
        if part.remaining * 5 < part.limit:
            clause.near += 1
        if clause.alert >= 0:
            used: cython.longlong = part.limit - part.remaining
            cost: cython.longlong = passage.costs[i]
            if used >= part.limit * clause.alert and used - cost < part.limit * clause.alert:
                clause.alerts += 1
                self.alerted(passage, entry, part, i)
        return 0

    @cython.cfunc
    def timed(self, passage: Passage) -> cython.int:
        """Counts how long the decision took."""
        took: cython.longlong = monotonic_us() - passage.began_us - passage.wait_us
        i: cython.Py_ssize_t = 0
        while i < BOUNDS and took > DECISION_BOUNDS_US[i]:
            i += 1
        self.latency[i] += 1
        self.latency_sum += took
        return 0

    @cython.cfunc
    def free(self, passage: Passage) -> Passage:
        """A request that nothing limits."""
        self.requests += 1
        self.allowed_requests += 1
        if passage.costs is None:
            self.exempt_requests += 1
        else:
            self.unlimited_requests += 1
        return passage

    def alerted(self, passage: Passage, entry: Entry, part: Decision, i: int) -> None:
        """A key's use has crossed its rule's mark."""
        log.warning("%s: a key has used %d of %d", entry.label, part.limit - part.remaining, part.limit)
        self.tell(ALERT, passage)

    def tell(self, kind: str, passage: Any, error: Any = None) -> None:
        if self._publisher is not None:
            cost = passage.costs[0] if passage is not None and passage.costs else 1
            keys = tuple(passage.keys) if passage is not None else None
            self._publisher.publish(kind, self.edition.policy.name, keys, cost, passage, error)

    # The three ways to ask ---------------------------------------------------------------------------------------

    def quick(self, facts: Facts) -> Passage | None:
        """The answer, when this process can give it without waiting for anything; otherwise None, and nothing was done."""
        passage: Passage
        decision: Decision
        if self.shutter is not None:
            shut = self.shutter.shut(self, facts)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        passage = self.prepare(facts)
        if self.far:
            return self.quick_far(passage)
        if passage.special:
            return self.quick_special(passage)
        if not passage.entries:
            return self.free(passage)
        try:
            decision = self.decide(passage)
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        if decision.allowed:
            return self.passed(passage, decision)
        if refusing.may_wait(passage, decision):
            return None
        return refusing.refused(self, passage, decision)  # type: ignore[no-any-return]

    @cython.cfunc
    def quick_far(self, passage: Passage) -> Passage:
        """A far store can answer one plain hit at once when it holds a lease for it."""
        if passage.special:
            return None  # type: ignore[return-value]
        if not passage.entries:
            return self.free(passage)
        if len(passage.entries) > 1 or passage.owes:
            return None  # type: ignore[return-value]
        entry: Entry = passage.entries[0]
        found = self.store.at_once(entry.named, passage.keys[0], passage.costs[0])
        if found is None:
            return None  # type: ignore[return-value]
        decision: Decision = found
        if self.failing.has_failed(decision):
            return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
        if decision.allowed:
            return self.passed(passage, decision)
        if refusing.may_wait(passage, decision):
            return None  # type: ignore[return-value]
        return refusing.refused(self, passage, decision)  # type: ignore[no-any-return]

    def quick_special(self, passage: Passage) -> Passage | None:
        """Rules in shadow and charges made once, on a store in this process."""
        try:
            once.marked(self, passage)
            if not passage.entries:
                return self.shadowed(self.free(passage))
            decision: Decision = self.decide(passage)
            if not decision.allowed:
                once.unmarked(self, passage)
                if refusing.may_wait(passage, decision):
                    return None
                return refusing.refused(self, passage, decision)  # type: ignore[no-any-return]
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        return self.shadowed(self.passed(passage, decision))

    def ask(self, facts: Facts) -> Passage:
        """The answer, waited for: in a rule's queue, or for a store that is far away."""
        if self.shutter is not None:
            shut = self.shutter.shut(self, facts)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        passage: Passage = self.prepare(facts)
        if passage.costs is None:
            return self.free(passage)
        try:
            once.marked(self, passage)
            if not passage.entries:
                return self.shadowed(self.free(passage))
            decision: Decision = self.decide(passage)
            if self.failing.has_failed(decision):
                return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
            if not decision.allowed:
                if refusing.may_wait(passage, decision):
                    decision = self.queue.wait(self, passage, decision)
                if not decision.allowed:
                    once.unmarked(self, passage)
                    return refusing.refused(self, passage, decision)  # type: ignore[no-any-return]
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        return self.shadowed(self.passed(passage, decision))

    async def aask(self, facts: Facts) -> Passage:
        """The same, awaited. Nothing blocks the loop."""
        if self.shutter is not None:
            shut = self.shutter.shut(self, facts)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        passage: Passage = self.prepare(facts)
        if passage.costs is None:
            return self.free(passage)
        try:
            await once.amarked(self, passage)
            if not passage.entries:
                return await self.ashadowed(self.free(passage))
            if self.far:
                decision: Decision = await self.store.adecide(self.claims(passage), 0, True)
            else:
                decision = self.decide(passage)
            if self.failing.has_failed(decision):
                return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
            if not decision.allowed:
                if refusing.may_wait(passage, decision):
                    decision = await self.queue.await_(self, passage, decision)
                if not decision.allowed:
                    await once.aunmarked(self, passage)
                    return refusing.refused(self, passage, decision)  # type: ignore[no-any-return]
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        return await self.ashadowed(self.passed(passage, decision))

    # In shadow -------------------------------------------------------------------------------------------------

    def shadowed(self, passage: Passage) -> Passage:
        """Asks the rules in shadow, once the others have let the request pass; their answers are counted, and change nothing."""
        if not passage.shadow:
            return passage
        try:
            told = self.store.decide_many(passage.shadow[::2], 0)
        except StoreError:
            return passage
        return self.shadows_told(passage, told)

    async def ashadowed(self, passage: Passage) -> Passage:
        if not passage.shadow:
            return passage
        try:
            told = await self.store.adecide_many(passage.shadow[::2], 0)
        except StoreError:
            return passage
        return self.shadows_told(passage, told)

    def shadows_told(self, passage: Passage, told: list[Decision]) -> Passage:
        clause: Clause
        for decision, clause in zip(told, passage.shadow[1::2], strict=True):
            if decision.allowed:
                clause.passed += 1
            elif not self.failing.has_failed(decision):
                clause.shadow_refused += 1
                passage.shadows = (*passage.shadows, clause.name)
        if passage.shadows:
            self.tell(SHADOW, passage)
        return passage

    # Responses -------------------------------------------------------------------------------------------------

    def count_response(self, passage: Passage, status: cython.int) -> None:
        """Counts a response and its time under every rule that let the request pass."""
        took: cython.longlong = monotonic_us() - passage.began_us
        i: cython.Py_ssize_t = 0
        while i < RESPONSE_BOUNDS and took > RESPONSE_BOUNDS_MS[i] * 1000:
            i += 1
        family: cython.Py_ssize_t = status // 100 if 100 <= status < 600 else 0
        k: cython.Py_ssize_t
        for k in range(len(passage.entries)):
            entry: Entry = passage.entries[k]
            clause: Clause = entry.clause
            if entry.label is clause.name:
                clause.times[i] += 1
                clause.statuses[family] += 1
                clause.sum_ms += took / 1000.0


BOUNDS = len(DECISION_BOUNDS_US)
RESPONSE_BOUNDS = len(RESPONSE_BOUNDS_MS)


class Gate(Asking):
    """`Gate("headgate.yaml")`, `Gate(Policy.of(…), store=MemoryStore())`: a policy, its store, and what was counted.

    `handlers` are the degrade handlers that a policy names without saying where they are. `clock` is for tests of stores that are
    far away. `show_keys` shows keys of offenders as they are rather than as a keyed hash.
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
    ) -> None:
        if not isinstance(policy, Policy):
            policy = Policy.load(policy)
        self.handlers = dict(handlers or {})
        self.edition = Edition(policy, self.handlers)
        self._given = store
        self._opened: dict[str, Store] = {}
        self._clock = clock
        self.secret = token_bytes(16) if secret is None else secret
        self.store = self._store_of(policy)
        self.far = not self.store.local
        self.clock = clock if clock is not None else self.store.clock if self.store.local else SYSTEM
        self.failing = Failing(self.clock)
        self.queue = Queue(self.store)
        self.shutter = None if policy.shut_out is None else Shutter(policy, self.clock)
        self.offenders = Offenders(show_keys=show_keys, secret=self.secret)
        self._publisher: Any = None
        self.requests = self.allowed_requests = self.refused_requests = self.exempt_requests = self.unlimited_requests = 0
        self.latency: list[int] = [0] * (BOUNDS + 1)
        self.latency_sum = 0
        self.reloads = self.reloads_refused = 0
        self._watch: Any = None
        self._know()

    def __repr__(self) -> str:
        return f"<Gate {self.policy.name!r}: {len(self.policy.rules)} rules, {self.store!r}>"

    # What it stands on -----------------------------------------------------------------------------------------

    def _store_of(self, policy: Policy) -> Store:
        """The store of a policy; one that is far away answers within the policy's budget, or the rules' on_failure does."""
        store: Store | None = self._given
        if store is None:
            store = self._opened.get(policy.store)
        if store is None:
            store = self._opened[policy.store] = store_from_url(policy.store)
        if store.local or isinstance(store, GuardedStore):
            return store
        guarded = GuardedStore(store, budget=policy.budget_us / 1e6, on_failure="closed", clock=self._clock, name=policy.name)
        self._opened[f"guard of {policy.store}"] = guarded
        return guarded

    def _know(self) -> None:
        for clause in self.edition.clauses:
            for entries in clause.made.values():
                for entry in entries:
                    self.store.know(entry.named)

    @property
    def policy(self) -> Policy:
        policy: Policy = self.edition.policy
        return policy

    @property
    def events(self) -> Publisher:
        """Where to listen: `gate.events.on("refused", listener)`."""
        if self._publisher is None:
            self._publisher = Publisher(GATE_KINDS)
        publisher: Publisher = self._publisher
        return publisher

    # Settling, explaining --------------------------------------------------------------------------------------

    def settle(self, passage: Passage, status: int, size: int) -> None:
        """Gives back, or charges more, now that the response is known."""
        settle.settled(self, passage, status, size)

    async def asettle(self, passage: Passage, status: int, size: int) -> None:
        await settle.asettled(self, passage, status, size)

    def explain(self, facts: Facts) -> list[Explained]:
        """What every rule of the policy says to a request. Nothing is charged."""
        return explain(self, facts)

    # Versions --------------------------------------------------------------------------------------------------

    def reload(self, policy: Policy) -> None:
        """From the next request on, this policy holds. Counters and states of rules that keep their names go on."""
        edition = Edition(policy, self.handlers)
        before = {clause.name: clause for clause in self.edition.clauses}
        for clause in edition.clauses:
            if clause.name in before:
                clause.inherit(before[clause.name])
        store = self.store if policy.store == self.policy.store else self._store_of(policy)
        old, self.edition = self.edition, edition
        if store is not self.store:
            self.store, self.far, self.queue = store, not store.local, Queue(store)
        if policy.shut_out != old.policy.shut_out:
            self.shutter = None if policy.shut_out is None else Shutter(policy, self.clock)
        self._know()
        self.reloads += 1
        for clause in old.clauses:
            if clause.overrides is not None and all(clause.overrides is not new.overrides for new in edition.clauses):
                clause.overrides.close()
        self.tell(RELOADED, None)

    def reload_refused(self, error: BaseException) -> None:
        """A new version could not be read: the old one stays."""
        self.reloads_refused += 1
        log.error("the policy %r stays as it was; its new version has mistakes:\n%s", self.policy.name, error)
        self.tell(RELOAD_REFUSED, None, error)

    def watch(self, interval: Any = "1s") -> None:
        """Follows the policy's file: a new version takes over, a bad one is refused."""
        if self.policy.source is None:
            raise ConfigurationError("this policy was not read from a file, so there is nothing to watch; use Policy.load(path)")
        if self._watch is None:
            from .watch import watch_policy

            self._watch = watch_policy(self, interval=interval)

    # Numbers ---------------------------------------------------------------------------------------------------

    def tally(self) -> Tally:
        """Everything that was counted since the gate was made."""
        return Tally(
            self.policy.name,
            rules=tuple([clause.tally() for clause in self.edition.clauses]),
            requests=self.requests,
            allowed=self.allowed_requests,
            refused=self.refused_requests,
            unlimited=self.unlimited_requests,
            exempt=self.exempt_requests,
            shut_out=0 if self.shutter is None else self.shutter.refused,
            shut_out_now=0 if self.shutter is None else len(self.shutter),
            decisions=Histogram(DECISION_BOUNDS_US, tuple(self.latency), float(self.latency_sum)),
            reloads=self.reloads,
            reloads_refused=self.reloads_refused,
            offenders=tuple(self.offenders.top(10)),
            store=self.store.stats() if isinstance(self.store, GuardedStore) else None,
        )

    # The end ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self.edition.close()

    def close(self) -> None:
        """Stops watching, and closes the stores that this gate opened."""
        self._end()
        for store in reversed(self._opened.values()):
            store.close()

    async def aclose(self) -> None:
        self._end()
        for store in reversed(self._opened.values()):
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
