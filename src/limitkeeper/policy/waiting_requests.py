"""Waiting requests: rules with `on_refusal: wait up to 200ms` delay a request instead of refusing it.

A request waits only when every rule that refuses it waits, and no longer than the shortest of their waits. It makes one decision
that charges at a later start, and sleeps until then: first come, first served, and those behind move up when a client goes away.
A request is refused at once with 503 where no place is left:

    the rule's queue       `queue 100` requests of the rule, in this process
    the limit's capacity   a leaky bucket queue counts what is in its bucket, in the store
    threads                `waiting_threads` of the policy: a thread that waits serves no other request, so under WSGI (and in
                           threads of gRPC) fewer may wait than the server's pool has; counted for all gates of this process

One client has at most `per_client` of a rule's places (by default a quarter; of the threads, where they are fewer), or it could
refuse all others; beyond that its requests are refused by its limit (429).

Only limits that refused are charged at a later start, and only those of one rule, which delays the request most. The others
are asked when that start has come: what refuses then is waited for in the same way, and where it delays the request longer than
the rule before, its wait comes first. If the request is refused in the end, all starts are given back. A later start closes the
time before it to other requests: in a fixed window or a leaky bucket queue wholly, in other limits in part. A rule with another
key, or for other paths, would so be closed to clients that do not wait for the first. A request that waits does not run
(`concurrent`). And a bucket holds tokens back for later starts, also those of other processes: refunds of earlier charges would
be lost there. The rules waited for before the last are charged by as much too early as the waits after them take.
"""

from __future__ import annotations

from asyncio import CancelledError, Task, current_task
from collections.abc import Hashable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from ..algorithms.claim import Claim
from ..algorithms.constants import MAX_WAIT
from ..algorithms.leaky_queue import LeakyBucketQueue
from ..algorithms.token_bucket import TokenBucket
from ..clock import Clock
from ..decision import Decision, Decisions
from ..errors import RateLimited, StoreError
from ..fork import reset_after_fork
from ..limiter import WaitingLimiter
from ..stores.contract import Store
from ..stores.guarded import GuardedStore
from ..stores.sans_io import Call, Plan, running_loop
from ..wait_queue import BEGUN, Waiter
from .compiled_rule import UNIDENTIFIED, CompiledRule, Entry, identity_of
from .idempotency import release_marks
from .refusal import QUEUE_FULL, QUOTA
from .request_context import RequestContext

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator


class RequestLimiter(WaitingLimiter):
    """A limiter whose keys are the claims of requests. Its own limit, which a limiter must have, is not used."""

    def __init__(self, store: Store, reserves: bool) -> None:
        super().__init__(TokenBucket("1/s"), store, "limitkeeper queue")
        self._reserves = reserves

    def claims(self, key: Any, cost: Any = 1) -> list[Claim]:
        claims: list[Claim] = key
        return claims

    def _gate_key(self, key: Any) -> Hashable:
        """Equal for the same limits and keys."""
        return frozenset((claim.limit.identity, claim.key) for claim in key)

    def _refuse_if_late(self, decision: Decision, deadline: int | None, now_us: int, key: Any, cost: Any) -> None:
        """Also where the store has failed meanwhile: the rules' `on_failure` decides, not the guard's next answer."""
        if not decision and GuardedStore.answered_here(decision):
            raise RateLimited(decision)
        super()._refuse_if_late(decision, deadline, now_us, key, cost)

    def _refuse_behind(self, decision: Decision) -> Decision:
        """An allowed decision, which charged nothing: the request is refused by the rules that refused it when it came."""
        return decision

    def give_up(self, claims: list[Claim], start: Decision) -> Plan[bool]:
        key: Any = claims
        return self._give_up(Waiter(claims, start, None, BEGUN), key, 1, start)

    # Under names that a plan can call.
    acquire, aacquire = WaitingLimiter._acquire, WaitingLimiter._aacquire


class Place(NamedTuple):
    """A place in the queue of a rule. `client` is the rule's key, or the address where the rule has no key of one client."""

    rule: CompiledRule
    client: str | None


class Places:
    """The places of waiting requests in this process, of all gates, and which of them hold a thread. A request may leave again
    after an interrupt, and where it took no place: what it holds is found by the request, not counted."""

    def __init__(self) -> None:
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock, self.threads = RLock(), set[Hashable]()
        self.tasks = WeakSet[Task[Any]]()  # those whose request waits
        self.cancelled = WeakSet[Task[Any]]()  # those whose request is not to wait any more

    def take(self, request: Hashable, places: list[Place], threads: int | None, task: Task[Any] | None) -> str | None:
        """Takes all places, and a thread unless `threads`, the most that may wait, is None; or returns a reason to refuse."""
        with self._lock:
            for rule, client in places:
                waiting, most = rule.waiting, rule.config.on_refusal.queue
                if len(waiting.requests) >= most or (threads is not None and len(self.threads) >= threads):
                    rule.queue_full += 1
                    return QUEUE_FULL
                most = rule.config.on_refusal.per_client or max(1, (most if threads is None else min(most, threads)) // 4)
                if client is not None and len(waiting.clients.get(client, ())) >= most:
                    return QUOTA
            if threads is not None:
                self.threads.add(request)
            for rule, client in places:
                rule.waiting.requests.add(request)
                if client is not None:
                    rule.waiting.clients.setdefault(client, set()).add(request)
            if task is not None:
                self.tasks.add(task)
        return None

    def leave(self, request: Hashable, places: list[Place], task: Task[Any] | None) -> None:
        with self._lock:
            if task is not None:
                self.tasks.discard(task)
            self.threads.discard(request)
            for rule, client in places:
                own = rule.waiting.clients.get(client, set())
                own.discard(request)
                if not own:
                    rule.waiting.clients.pop(client, None)
                rule.waiting.requests.discard(request)


PLACES = Places()


class WaitingRequests:
    """The requests of a gate that wait, in this process."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._reserving = RequestLimiter(store, True)
        self._polling = RequestLimiter(store, False)

    def wait(self, gate: Evaluator, evaluation: Evaluation, refused: Decision, in_thread: bool) -> Plan[Decision]:
        """Waits for the start of a refused request; the decision that allowed it, or that refused it in the end."""
        if evaluation.compiled.store is not self._store:  # a reload has changed the store since
            return (yield from WaitingRequests(evaluation.compiled.store, self._clock).wait(gate, evaluation, refused, in_thread))
        places = places_of(evaluation, refused)
        rules = [rule for rule, _ in places]
        threads = gate.compiled.policy.waiting_threads if in_thread else None
        claims = gate._claims(evaluation)
        reserves = all(self._store.can_reserve(claim.limit) for claim in claims)
        began_us = self._clock.now_us()
        task = None if running_loop() is None else current_task()
        try:
            if task is not None and task in PLACES.cancelled:
                raise CancelledError
            reason = PLACES.take(evaluation, places, threads, task)
            if reason is not None:
                evaluation.reason = reason
                return refused
            if reserves:
                decision = yield from self._reserve(gate, evaluation, refused, began_us)
            else:
                decision = yield Call(self._polling, "acquire", (claims, 1, shortest_wait_us(rules) / 1e6))
                decision = join([Start(list(range(len(claims))), decision)])
        except RateLimited as error:
            decision = refused if error.decision else error.decision
            if not gate._on_failure.has_failed(decision):
                return decision
        except (StoreError, GeneratorExit):
            raise
        except BaseException:  # cancelled, or of a signal handler: the request is not answered
            yield from release_marks(gate, evaluation)
            raise
        finally:
            try:
                PLACES.leave(evaluation, places, task)
            except BaseException:  # of a signal handler: its places would stay taken
                PLACES.leave(evaluation, places, task)
                raise
        evaluation.wait_us = max(0, self._clock.now_us() - began_us)
        for rule in rules if decision.allowed else ():
            rule.waited += 1
        return decision

    def _reserve(self, gate: Evaluator, evaluation: Evaluation, refused: Decision, began_us: int) -> Plan[Decision]:
        """Waits for the rule that delays the request most, then for those that refuse it by then. Where one of them delays it
        longer, what was charged so far is given back; if the request is refused in the end, all is."""
        claims, starts, came = gate._claims(evaluation), list[Start](), refused
        asked, first, longest_us, wait_us, left_us = list(range(len(claims))), list[int](), 0, MAX_WAIT, 0
        try:
            while not refused.allowed:
                refusing = refusing_rules(evaluation, asked, refused)
                if not all(rule.waits and retry_us >= 0 for _, rule, retry_us in refusing):
                    first, left_us = asked, 0
                    raise RateLimited(refused)
                _, slowest, delay_us = max(refusing, key=lambda one: one[2])
                if delay_us > longest_us:
                    longest_us = delay_us
                    yield from self._give_up(claims, starts)
                first = [i for i, rule, _ in refusing if rule is slowest]
                wait_us = min(wait_us, shortest_wait_us([rule for _, rule, _ in refusing]))
                left_us = max(0, wait_us - (self._clock.now_us() - began_us))
                start = yield Call(self._reserving, "acquire", ([claims[i] for i in first], 1, left_us / 1e6))
                starts.append(Start(first, start))
                asked = [i for i in range(len(claims)) if all(i not in one.indexes for one in starts)]
                if not asked:
                    break
                try:
                    refused = yield Call(self._reserving, "acquire", ([claims[i] for i in asked], 1, 0))
                except RateLimited as error:
                    refused = error.decision
                    if gate._on_failure.has_failed(refused):
                        raise
        except BaseException as error:
            yield from self._give_up(claims, starts)
            if not isinstance(error, RateLimited):
                raise
            if gate._on_failure.has_failed(error.decision):
                return error.decision
            if refused is came:
                return (yield from self._refuse(gate, evaluation, refused, first, error.decision, wait_us))
            count_full_bucket(evaluation, error.decision, first, left_us)
            refused = yield Call(self._store, "decide", (claims, 0))
            return join([Start(list(range(len(claims))), refused)]) if refused.allowed else refused
        return join([*starts, Start(asked, refused)] if asked else starts)

    def _give_up(self, claims: list[Claim], starts: list[Start]) -> Plan[None]:
        while starts:
            indexes, start = starts.pop()
            yield from self._reserving.give_up([claims[i] for i in indexes], start)

    def _refuse(
        self, gate: Evaluator, evaluation: Evaluation, refused: Decision, first: list[int], late: Decision, wait_us: int
    ) -> Plan[Decision]:
        """The refusal of a request that does not wait, since the limits `first` admit no start within its wait (decision `late`):
        to be retried when all that refuse it would admit one."""
        claims = gate._claims(evaluation)
        refusing = [i for i, part in enumerate(refused.decisions) if not part.allowed]
        if len(first) < len(refusing):
            late = yield Call(self._store, "decide", ([claims[i] for i in refusing], wait_us), {"commit": False})
            if late.allowed or gate._on_failure.has_failed(late):  # allowed: others have left meanwhile
                return refused if late.allowed else late
        count_full_bucket(evaluation, late, refusing, wait_us)
        passing = [i for i in range(len(claims)) if i not in refusing]
        parts = [Start([i], refused.decisions[i]) for i in passing]
        return join([*parts, Start(refusing, late)]) if passing else late


class Start(NamedTuple):
    """A decision about some claims of a request, which are named by their indexes."""

    indexes: list[int]
    decision: Decision


def places_of(evaluation: Evaluation, refused: Decision) -> list[Place]:
    """The places that a refused request needs: one for each rule that refuses."""
    found: dict[str, Place] = {}
    context = evaluation.context
    assert context is not None
    for entry, key, part in zip(evaluation.entries, evaluation.keys, refused.decisions, strict=True):
        rule = entry.compiled_rule
        if not part.allowed and rule.name not in found:
            found[rule.name] = Place(rule, queue_client(evaluation, context, rule, key))
    return list(found.values())


def queue_client(evaluation: Evaluation, context: RequestContext, rule: CompiledRule | None, key: str | None) -> str | None:
    """Whose places in a queue a request takes: its key under a rule, or its address where the rule has no key of one client."""
    shared = rule is None or not rule.key or key == UNIDENTIFIED
    return identity_of(evaluation.compiled.identities, context, "ip") if shared else key  # type: ignore[return-value]


def count_full_bucket(evaluation: Evaluation, refused: Decision, indexes: list[int], wait_us: int) -> None:
    """Changes the reason of a refusal by a leaky bucket queue whose wait would be short enough: then its capacity is used up.
    `indexes` are those of the entries that `refused` decided."""
    for i, part in zip(indexes, refused.decisions, strict=False):  # a store that failed decides none
        entry = evaluation.entries[i]
        if is_full_queue(entry, part, wait_us):
            entry.compiled_rule.queue_full += 1
            evaluation.reason = QUEUE_FULL


def is_full_queue(entry: Entry, part: Decision, wait_us: float) -> bool:
    """Whether a leaky bucket queue refused a start although the wait would be short enough."""
    refused_later = not part.allowed and part.retry_us >= 0
    return refused_later and isinstance(entry.named.limit, LeakyBucketQueue) and part.reset_us <= wait_us


def refusing_rules(evaluation: Evaluation, indexes: list[int], refused: Decision) -> list[tuple[int, CompiledRule, int]]:
    """The limits that refuse: the index of each, its rule, and when to retry."""
    parts = zip(indexes, refused.decisions, strict=True)
    return [(i, evaluation.entries[i].compiled_rule, part.retry_us) for i, part in parts if not part.allowed]


def shortest_wait_us(rules: Sequence[CompiledRule]) -> int:
    """The shortest wait of these rules: 0 where one of them does not wait."""
    return min([rule.config.on_refusal.wait_us if rule.waits else 0 for rule in rules])


def join(starts: Sequence[Start]) -> Decision:
    """The decision of all claims, in their order; dated as the last of these. Each part has the time of its charge."""
    last = starts[-1].decision
    parts = {i: part for indexes, one in starts for i, part in zip(indexes, dated(one.decisions, one.start_us), strict=True)}
    if len(parts) == 1:
        return last
    joined = Decisions.join([parts[i] for i in sorted(parts)])
    fields = (joined.allowed, joined.limit, joined.remaining, joined.retry_us, joined.reset_us)
    return Decisions(joined.decisions, *fields, last.wait_us, last.start_us, joined.name, joined.source)


def dated(parts: Sequence[Decision], start_us: int) -> list[Decision]:
    """Decisions about claims that were charged together, at this time: a refund names it."""
    times = [(part.retry_us, part.reset_us, part.wait_us, start_us) for part in parts]
    return [
        Decision(part.allowed, part.limit, part.remaining, *time, part.name, part.source)
        for part, time in zip(parts, times, strict=True)
    ]


def may_wait(evaluation: Evaluation, decision: Decision) -> bool:
    """Whether every refusing rule waits, and the request can pass at all."""
    if decision.retry_us < 0:
        return False
    for entry, part in zip(evaluation.entries, decision.decisions, strict=True):
        if not part.allowed and not entry.compiled_rule.waits:
            return False
    return True
