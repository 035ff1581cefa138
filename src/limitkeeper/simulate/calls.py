# cython: annotation_typing=False
"""Calls from one service to another: timeout, retries with backoff, and the protections of a dependency, each with the class that
an application would use: cap on the rate (a limit on a store), bulkhead or adaptive bulkhead, circuit breaker.

One attempt takes a place in the bulkhead, waits for its start under the cap, is sent, and ends with the reply or the timeout:

    breaker open → refused        bulkhead full → refused        cap → wait, or refused        target → reply | timeout → retry
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..algorithms import Limit
from ..algorithms.claim import NamedLimit
from ..concurrency import AIMD, AdaptiveBulkhead, Bulkhead, Gradient2
from ..concurrency.bulkhead import PlaceWaiter
from ..errors import BulkheadFull
from ..stores import MemoryStore
from ..stores.guarded.breaker import CLOSED, HALF_OPEN, Breaker
from .event_loop import AwaitedReply, EventLoop, Timeout
from .services import OK, TIMED_OUT, UNAVAILABLE, Reply, Service

if TYPE_CHECKING:
    from .clients import Request


@dataclass(frozen=True)
class Backoff:
    """The wait before the n-th retry: first · factor^(n − 1), at most `most`; with `jitter` a random part of it."""

    first_us: int = 25_000
    factor: float = 2.0
    most_us: int = 250_000
    jitter: bool = True

    def delay_us(self, retry: int, rng: Random) -> int:
        longest = min(self.most_us, self.first_us * self.factor ** (retry - 1))
        return int(longest * rng.random()) if self.jitter else int(longest)


@dataclass(frozen=True)
class BulkheadSettings:
    """The bulkhead of each calling pod. `adaptive`: "", "gradient2" or "aimd", beginning with `concurrent`."""

    concurrent: int
    max_waiting: int | None = None
    timeout_us: int = 1_000_000
    adaptive: str = ""


@dataclass(frozen=True)
class BreakerSettings:
    """The circuit breaker of all pods of the caller."""

    failures: int = 5
    ratio: float = 0.5
    backoff_us: int = 1_000_000
    max_backoff_us: int = 10_000_000
    ramp_us: int = 2_000_000


@dataclass(frozen=True)
class CallSettings:
    """One call of a service: to which service, for which endpoints, how, and behind which protections."""

    to: str
    endpoints: tuple[str, ...] = ()
    probability: float = 1.0
    timeout_us: int = 1_000_000
    attempts: int = 1
    backoff: Backoff = Backoff()
    background: bool = False
    optional: bool = False
    commits: bool = False
    cap: Limit | None = None
    cap_wait_us: int = 1_000_000
    bulkhead: BulkheadSettings | None = None
    breaker: BreakerSettings | None = None


class ServiceCall:
    """The calls from one service to another, with their counters."""

    def __init__(self, caller: Service, target: Service, settings: CallSettings, loop: EventLoop, rng: Random) -> None:
        self.name = f"{caller.name} → {target.name}"
        self.caller, self.target, self.settings, self.loop, self.rng = caller, target, settings, loop, rng
        self.endpoints, self.probability = settings.endpoints, settings.probability
        self.background, self.optional = settings.background, settings.optional
        self.calls = self.attempts = self.timeouts = self.refused = self.failed = 0
        self.bulkheads: Sequence[AdaptiveBulkhead | Bulkhead] = []
        if settings.bulkhead is not None:
            self.bulkheads = [make_bulkhead(self.name, settings.bulkhead, loop) for _ in caller.pods]
        self.named = None if settings.cap is None else NamedLimit("dependencies", self.name, settings.cap)
        self.store = MemoryStore(clock=loop)
        given = settings.breaker
        self.breaker: Breaker | None = None
        if given is not None:
            times = (given.backoff_us, given.max_backoff_us, given.ramp_us)
            self.breaker = Breaker(rng, given.failures, given.ratio, *times)

    def start(self, request: Request, pod: int, done: Reply) -> None:
        """Calls the target; `done(status)` is called with the last attempt's status."""
        if self.settings.commits and request.commits and request.idempotent:
            done(OK)  # the order of this idempotency key exists
            return
        self.calls += 1
        Attempt(self, request, pod, done).begin()

    @property
    def waiting(self) -> int:
        """Calls that wait for a place in a bulkhead."""
        return sum(bulkhead_of(one).waiting for one in self.bulkheads)

    @property
    def breaker_state(self) -> str:
        return CLOSED if self.breaker is None else self.breaker.state


def make_bulkhead(name: str, settings: BulkheadSettings, loop: EventLoop) -> AdaptiveBulkhead | Bulkhead:
    size, waiting, timeout = settings.concurrent, settings.max_waiting, settings.timeout_us / 1e6
    if not settings.adaptive:
        return Bulkhead(size, waiting, timeout, name=name, clock=loop)
    algorithm = (Gradient2 if settings.adaptive == "gradient2" else AIMD)(initial=size, minimum=1, maximum=max(200, size))
    return AdaptiveBulkhead(algorithm, waiting, timeout, name=name, clock=loop)


def bulkhead_of(bulkhead: AdaptiveBulkhead | Bulkhead) -> Bulkhead:
    return bulkhead.bulkhead if isinstance(bulkhead, AdaptiveBulkhead) else bulkhead


class SimulatedWaiter(PlaceWaiter):
    """An attempt in the queue of a bulkhead: `wake` continues it instead of a thread."""

    __slots__ = ("attempt", "bulkhead", "limit")

    def __init__(self, attempt: Attempt, bulkhead: AdaptiveBulkhead | Bulkhead) -> None:
        self.granted, self.attempt, self.bulkhead = False, attempt, bulkhead
        self.limit = Timeout(None)

    def join(self, timeout_us: int) -> None:
        """Waits for a place; raises BulkheadFull when too many wait."""
        bulkhead_of(self.bulkhead)._join(self)
        if not self.granted:
            self.limit.call = self.time_out
            self.attempt.call.loop.start_timeout(timeout_us, self.limit)

    def wake(self) -> bool:
        """Within the bulkhead's release: the attempt continues when that is complete."""
        self.limit.call = None
        self.attempt.call.loop.after(0, self.begin)
        return True

    def begin(self, _: object) -> None:
        bulkhead_of(self.bulkhead)._begin(self)
        self.attempt.send_from(self.bulkhead)

    def time_out(self) -> None:
        try:
            bulkhead_of(self.bulkhead)._begin(self)
        except BulkheadFull:
            self.attempt.refuse()


@cython.cclass
class CommittingReply(AwaitedReply):
    """The reply of a call that writes an order: written is written, also when its timeout has passed."""

    __slots__ = ()

    def reply(self, status: int) -> None:
        if status == OK:
            self.owner.request.commit()
        AwaitedReply.reply(self, status)


@cython.cclass
class Attempt:
    """One call with its attempts, one after the other."""

    __slots__ = ("bulkhead", "call", "done", "in_flight", "pod", "probes", "request", "sent_us", "tries")

    def __init__(self, call: ServiceCall, request: Request, pod: int, done: Reply) -> None:
        self.call, self.request, self.pod, self.done = call, request, pod, done
        self.tries = self.sent_us = self.in_flight = 0
        self.probes = False
        self.bulkhead: AdaptiveBulkhead | Bulkhead | None = None

    def begin(self, _: object = None) -> None:
        call = self.call
        self.tries += 1
        call.attempts += 1
        if call.breaker is not None and not self._passes(call.breaker):
            self.refuse()
        elif call.settings.bulkhead is not None:
            self._join(call.bulkheads[self.pod], call.settings.bulkhead.timeout_us)
        elif call.named is not None:
            self._wait_for_start()
        else:
            self._send()

    def _passes(self, breaker: Breaker) -> bool:
        """Whether the breaker lets this attempt through: the first after the time of the next probe is the probe."""
        now_us = self.call.loop.now
        self.probes = not breaker.closed and now_us >= breaker.probe_at_us and breaker.begin_probe()
        if breaker.state == HALF_OPEN:
            breaker.close_after_ramp(now_us)
        return self.probes or breaker.lets_through(now_us)

    def _join(self, bulkhead: AdaptiveBulkhead | Bulkhead, timeout_us: int) -> None:
        """Takes a place in the bulkhead, or waits for one."""
        places = bulkhead_of(bulkhead)
        if places.in_use < places.max_concurrent:
            places.try_acquire()
            self.send_from(bulkhead)
            return
        try:
            SimulatedWaiter(self, bulkhead).join(timeout_us)
        except BulkheadFull:
            self.refuse()

    def send_from(self, bulkhead: AdaptiveBulkhead | Bulkhead) -> None:
        """It has a place in the bulkhead."""
        self.bulkhead = bulkhead
        if isinstance(bulkhead, AdaptiveBulkhead):
            self.sent_us, self.in_flight = bulkhead._begin(None)
        if self.call.named is not None:
            self._wait_for_start()
        else:
            self._send()

    def _wait_for_start(self) -> None:
        call = self.call
        assert call.named is not None
        decision = call.store.decide_one(call.named, call.name, 1, call.settings.cap_wait_us, True)
        if not decision:
            self.refuse()
        elif decision.wait > 0:
            call.loop.after(round(decision.wait * 1e6), self._send)
        else:
            self._send()

    def _send(self, _: object = None) -> None:
        call = self.call
        sent = CommittingReply(self) if call.settings.commits else AwaitedReply(self)
        call.loop.start_timeout(call.settings.timeout_us, sent)
        call.target.submit(self.request, sent.reply)

    def answered(self, status: int) -> None:
        self._leave(status)
        if status == OK:
            self.done(OK)
        else:
            self._retry(status)

    def timed_out(self) -> None:
        self.call.timeouts += 1
        self._leave(TIMED_OUT)
        self._retry(TIMED_OUT)

    def refuse(self) -> None:
        """A protection of the caller refuses: another attempt would meet it again."""
        self.call.refused += 1
        if self.bulkhead is not None:
            self._leave(UNAVAILABLE, sent=False)
        self.done(UNAVAILABLE)

    def _leave(self, status: int, sent: bool = True) -> None:
        """Gives the place back and records the outcome of an attempt."""
        call, bulkhead, self.bulkhead = self.call, self.bulkhead, None
        if isinstance(bulkhead, AdaptiveBulkhead):
            bulkhead._end(None, self.sent_us, self.in_flight, status == TIMED_OUT, not sent or status == UNAVAILABLE)
        elif bulkhead is not None:
            bulkhead.release()
        breaker = call.breaker
        if breaker is None or not sent:
            return
        now_us = call.loop.now
        if self.probes:
            (breaker.probe_succeeded if status == OK else breaker.probe_failed)(now_us)
        elif status == OK:
            breaker.streak += 1
        else:
            breaker.record_failure(now_us)

    def _retry(self, status: int) -> None:
        call = self.call
        if self.tries < call.settings.attempts:
            call.loop.after(call.settings.backoff.delay_us(self.tries, call.rng), self.begin)
        else:
            call.failed += 1
            self.done(status)
