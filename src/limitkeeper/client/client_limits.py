"""ClientLimits: keeps a program's calls under the quota of the server that it calls, without a transport.

One plan (`stores/sans_io.py`) sends a request; the translators (httpx, requests, aiohttp) drive it. For each attempt:

    throttle → learned quota → spend guard → own limits (FIFO, one decision, one sleep) → learned quota again → send → learn

A refused or failed attempt is repeated as `retry.py` says. `total` bounds the whole: a wait that would end later is not begun.
The own limits are shared through their store; what is learned from responses is this process's.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

from ..algorithms import Limit
from ..clock import SYSTEM, Clock
from ..concurrency import Dependencies, Dependency
from ..concurrency.dependency_rate_caps import parse_cap
from ..decision import Decision
from ..errors import ConfigurationError, RateLimited, StoreError
from ..fifo_gate import AsyncEvent, Event, FifoGate
from ..limiter import AsyncLimiter, Limiter
from ..rate import Duration, duration_us
from ..stores import MemoryStore, Store
from ..stores.sans_io import Call, Plan, WakeEvent, arun, run
from ..wait_queue import of_loop
from .adaptive_throttle import AdaptiveThrottle
from .errors import ClientClosed, RetriesExhausted, Throttled
from .learned_quota import ONE_REQUEST, Costs, LearnedQuota
from .response_fields import NO_HINTS, Quota, ServerHints, read_hints
from .retry import Retry
from .spend_guard import SpendGuard
from .sync_and_async_limiter import Charge, LimiterPair

#: Hosts whose quota is kept; the oldest that are idle make room.
MAX_HOSTS = 10_000
Loop = asyncio.AbstractEventLoop | None
Amounts = Mapping[str, int | Decimal]
ClientRates = str | Limit | Mapping[str, str | Limit] | Limiter | AsyncLimiter | Dependencies


class UsageReader(Protocol):
    """Reads the body of one response."""

    def feed(self, chunk: bytes) -> None: ...

    def used(self, complete: bool) -> Amounts | None:
        """What the call has used; None when that is not known. `complete`: the body was read to its end."""


class Meter(Protocol):
    """Estimates what a call will use, by the names of limits ("tokens"; "spend" for the guard), and reads what it has used."""

    def estimate(self, body: bytes) -> Amounts: ...

    def reader(self, content_type: str, content_encoding: str) -> UsageReader: ...


class CallInfo(NamedTuple):
    """A request as the plan sees it. `body` is None when it is a stream, which can be sent once; `marked` is the caller's word
    on whether it is safe to repeat."""

    host: str
    method: str
    body: bytes | None
    marked: bool | None


class Sender(Protocol):
    """What a translator offers to the plan: `send` and `drain` for sync callers, with an `a` in front for async ones. Both are
    given the seconds that are left of the call's total time."""

    failures: tuple[type[Exception], ...]  # of the network, DNS included
    unsent: tuple[type[Exception], ...]  # those of `failures` before anything was sent

    def describe(self, request: Any, metered: bool) -> CallInfo: ...
    def reply(self, response: Any) -> tuple[int, dict[str, str]]: ...  # status, and fields about limits
    def settle_at_end(self, response: Any, held: Settlement) -> bool: ...  # False: the plan settles `held.used` now


class Settlement:
    """What one admitted call holds until its response has ended: charges by guard and limits, and a place."""

    def __init__(self, costs: Costs, meter: Meter | None) -> None:
        self.costs, self.meter = costs, meter
        self.spend: Charge | None = None
        self.limits: Charge | None = None
        self.place: Dependency | None = None
        self.guard: SpendGuard | None = None
        self.used: Amounts | None = None
        self._ended = False

    def end(self, used: Amounts | None, sent: bool = True) -> Plan[None]:
        """Settles what was used; None keeps the estimate. Not `sent`: gives everything back."""
        if self._ended:
            return
        self._ended = True
        if self.place is not None:
            self.place.release()
        yield from self._end_each([charge for charge in (self.spend, self.limits) if charge is not None], used, sent)

    def _end_each(self, charges: list[Charge], used: Amounts | None, sent: bool) -> Plan[None]:
        """Every charge, also when the caller is cancelled, or interrupted, in the middle."""
        if not charges:
            return
        try:
            if not sent:
                yield Call(charges[0], "cancel")
            elif used is not None:
                yield Call(charges[0], "settle", (self._units(charges[0], used),))
        finally:
            yield from self._end_each(charges[1:], used, sent)

    def _units(self, charge: Charge, used: Amounts) -> int | dict[str, int]:
        if charge is self.spend:
            assert self.guard is not None
            return self.guard.units(used.get("spend", 0))
        assert isinstance(charge.cost, Mapping)
        return {name: int(used.get(name, cost)) for name, cost in charge.cost.items()}

    def finish(self, used: Amounts | None) -> None:
        run(self.end(used))

    async def afinish(self, used: Amounts | None) -> None:
        await arun(self.end(used))


class Attempt(NamedTuple):
    """One attempt: when it began, its number, its response or failure, and what is to be settled."""

    began_us: int
    number: int
    response: Any
    failure: BaseException | None = None
    held: Settlement | None = None


class ClientLimits:
    """The limits of an HTTP client. `limits` is a rate ("10/s": a sliding window log, at most 10 in every second), a mapping of
    names to rates, a limiter, or `Dependencies`, whose hosts are capped; None has no own limit. Each host has its own key,
    unless `key` gives one for a request. `total` bounds the time of a call, waits and retries included.

    `learn=False` ignores the server's quota fields (not its refusals). `throttle` is the K of adaptive throttling. `retry=None`
    sends every request once. `meter` and `spend` charge what a call uses: tokens, money. `store` and `name` are those of a
    limiter: processes with the same store and name share one quota. `clock` and `random` are for tests.
    """

    def __init__(
        self,
        limits: ClientRates | None = None,
        store: Store | str | None = None,
        name: str | None = None,
        *,
        key: Callable[[Any], str] | None = None,
        retry: Retry | None = Retry(),  # noqa: B008  # frozen
        total: Duration = "60s",
        learn: bool = True,
        throttle: float | None = None,
        meter: Meter | None = None,
        spend: SpendGuard | None = None,
        clock: Clock | None = None,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._dependencies = limits if isinstance(limits, Dependencies) else None
        self._pair: LimiterPair | None = None
        if limits is not None and not isinstance(limits, Dependencies):
            self._pair = LimiterPair(_caps(limits), store, name)
        elif store is not None:
            raise ConfigurationError("store is where the own limits are kept; give limits= too, such as '10/s'")
        owner = self._pair.sync.store if self._pair else self._dependencies.store if self._dependencies else None
        self.clock: Clock = clock or (owner.clock if owner is not None else SYSTEM)
        self._names = frozenset(self._pair.sync.limits) if self._pair else frozenset()
        if meter is not None and isinstance(limits, Mapping) and self._dependencies is None:
            measured = sorted({"requests", *meter.estimate(b"")} - {"spend"})
            for given in limits:
                if given not in measured:
                    remedy = f"name it one of {', '.join(measured)}"
                    raise ConfigurationError(f"limits: the meter measures nothing called {given!r}; {remedy}")
        self._key, self._learn, self._meter, self._spend, self._draw = key, learn, meter, spend, random
        self._total_us, self._retry = duration_us(total), retry
        self.total = self._total_us / 1e6
        self._statuses = frozenset((retry or Retry()).statuses)
        self._plain = meter is None and spend is None and self._dependencies is None
        self._k = None if throttle is None else AdaptiveThrottle(throttle).k
        self._quick = self._plain and throttle is None and (self._pair is None or self._pair.hit_first)
        bucket = (retry or Retry()).bucket
        self._budget = Limiter(bucket, MemoryStore(clock=self.clock))
        self._hosts: dict[str, tuple[LearnedQuota, AdaptiveThrottle | None]] = {}
        self._gate = FifoGate()
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FifoGate] = weakref.WeakKeyDictionary()
        self._sleepers: dict[Event, Loop] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<ClientLimits {self._pair.sync if self._pair else self._dependencies or 'without own limits'}>"

    def quotas(self, host: str) -> list[Quota]:
        """What is known of a host's quotas from its responses."""
        return self._hosts[host][0].quotas(self.clock.now_us()) if host in self._hosts else []

    def waiting(self) -> int:
        """Callers of this process that wait for a start or a quota."""
        own = self._pair.sync.waiting() if self._pair else 0
        return own + sum(quota.waiting for quota, _ in list(self._hosts.values()))

    # One call --------------------------------------------------------------------------------------------------

    def start_nowait(self, request: Any, host: str, now_us: int) -> int:
        """The number of a call that starts at once and has nothing to settle: the hot path, without a plan. 0: `send` decides."""
        known = self._hosts.get(host)
        if known is None or not self._quick or self._closed:
            return 0
        quota = known[0]
        if quota.waiting or ((quota.allowances or quota.not_before_us) and quota.wait_us(now_us)):
            return 0
        key = host if self._key is None else self._key(request)
        if self._pair is not None and not self._pair.hit(key):
            return 0
        number = quota.take(now_us)
        if number <= 0 and self._pair is not None:  # another thread has taken the last of the quota: `send` charges again
            self._pair.refund(key)
        return max(0, number)

    def end_plain(self, host: str, number: int, status: int, fields: Mapping[str, str]) -> bool:
        """Ends a call of `start_nowait` whose response says nothing about limits; False: `send` looks at it."""
        if fields or status in self._statuses or host not in self._hosts:
            return False
        self._hosts[host][0].ended(number)
        return True

    def send(self, request: Any, sender: Sender, loop: Loop = None, first: Attempt | None = None) -> Plan[Any]:
        """Sends a request, and returns its response. `loop` is that of an async caller; `first` an attempt that was made."""
        end_us = self._total_us + (self.clock.now_us() if first is None else first.began_us)
        info = sender.describe(request, self._meter is not None)
        quota, throttle = self._hosts.get(info.host) or self._host(info.host)
        number, response = 0, None
        while True:
            number += 1
            if first is None:
                self._check(quota, throttle, response)
                made = yield from self._attempt(request, info, sender, quota, end_us, loop)
            else:
                made, first = first, None
            status, hints, refused = self._learned(made, sender, quota, throttle)
            response, held = made.response, made.held
            if held is not None and (refused or not sender.settle_at_end(response, held)):
                try:
                    yield from self._settle(held, sender, made.failure, refused)
                except BaseException:  # cancelled: nothing else ends the response, which holds a connection
                    if response is not None:
                        yield Call(sender, "drain", (request, response, 0))
                    raise
            if not refused:
                return response
            delay_us = self._delay_us(number, hints, quota)
            if not self._repeatable(info, sender, made.failure):
                if made.failure is not None:
                    raise made.failure
                return response
            if made.failure is None:
                left = max(0, end_us - self.clock.now_us()) / 1e6
                response = yield Call(sender, "drain", (request, response, left))
            reason = self._give_up(number, delay_us, end_us, info.host)
            if reason and made.failure is not None:
                made.failure.add_note(f"limitkeeper: gave up after {number} attempts ({reason})")
                raise made.failure
            if reason:
                raise RetriesExhausted(info.host, number, reason, status, response)
            yield from self._sleep(delay_us, AsyncEvent() if loop else WakeEvent(), loop)

    def _attempt(
        self, request: Any, info: CallInfo, sender: Sender, quota: LearnedQuota, end_us: int, loop: Loop
    ) -> Plan[Attempt]:
        """Waits for the limits, and sends the request once."""
        held = None
        if self._plain:
            number = yield from self._start(request, quota, end_us, loop)
        else:
            held, number = yield from self._charge(request, info, quota, end_us, loop)
        now_us = self.clock.now_us()
        try:
            response = yield Call(sender, "send", (request, max(1000, end_us - now_us) / 1e6))
        except BaseException as error:  # a cancelled task too: the call is no longer in flight
            return Attempt(now_us, number, None, error, held)
        return Attempt(now_us, number, response, None, held)

    def _learned(
        self, made: Attempt, sender: Sender, quota: LearnedQuota, throttle: AdaptiveThrottle | None
    ) -> tuple[int, ServerHints, bool]:
        """The status, what the server says, and whether it refused or failed. A 403 is a refusal when its fields say so."""
        quota.ended(made.number)
        now_us = self.clock.now_us()
        status, fields = sender.reply(made.response) if made.failure is None else (0, None)
        hints = read_hints(fields, now_us) if fields else NO_HINTS
        if hints.quotas and self._learn:
            quota.learn(hints, made.number, now_us)
        refused = status in self._statuses or not status or (status == 403 and hints.exhausted_us is not None)
        if throttle is not None and (made.failure is None or isinstance(made.failure, sender.failures)):
            throttle.count(now_us, not refused)
        return status, hints, refused

    def _settle(self, held: Settlement, sender: Sender, failure: BaseException | None, refused: bool) -> Plan[None]:
        """A refusal has cost the request alone; what was never sent has cost nothing; of other failures nothing is known."""
        if failure is not None:
            yield from held.end(None, sent=not isinstance(failure, sender.unsent))
        else:
            yield from held.end({name: 0 for name in held.costs if name != "requests"} if refused else held.used)

    def _host(self, host: str) -> tuple[LearnedQuota, AdaptiveThrottle | None]:
        if len(self._hosts) >= MAX_HOSTS:
            oldest = list(self._hosts.items())[:64]
            self._hosts.pop(next((name for name, (quota, _) in oldest if quota.idle), oldest[0][0]), None)
        return self._hosts.setdefault(host, (LearnedQuota(host), None if self._k is None else AdaptiveThrottle(self._k)))

    def _check(self, quota: LearnedQuota, throttle: AdaptiveThrottle | None, response: Any) -> None:
        if self._closed:
            raise ClientClosed("the limits of this client are closed")
        if throttle is not None and throttle.refuses(self.clock.now_us(), self._draw()):
            raise Throttled(quota.host, throttle.probability(self.clock.now_us()), response)

    def _delay_us(self, attempt: int, hints: ServerHints, quota: LearnedQuota) -> int:
        """The wait before the next attempt; a refusal blocks the host for what the server asks for."""
        asked_us = hints.exhausted_us or 0
        if asked_us:
            quota.block(self.clock.now_us(), asked_us)
        return asked_us + int(self._draw() * self._spread_us(attempt))

    def _spread_us(self, attempt: int) -> int:
        return (self._retry or Retry()).spread_us(attempt)

    def _repeatable(self, info: CallInfo, sender: Sender, failure: BaseException | None) -> bool:
        if self._retry is None or self._retry.attempts == 1 or info.body is None:
            return False
        if failure is not None and not isinstance(failure, sender.failures):
            return False
        return info.method.upper() in self._retry.methods if info.marked is None else info.marked

    def _give_up(self, attempt: int, delay_us: int, end_us: int, host: str) -> str:
        assert self._retry is not None
        if attempt >= self._retry.attempts:
            return "attempts"
        if self.clock.now_us() + delay_us >= end_us:
            return "time"
        return "" if self._budget.hit(host) else "budget"

    # Starting --------------------------------------------------------------------------------------------------

    def _start(self, request: Any, quota: LearnedQuota, end_us: int, loop: Loop) -> Plan[int]:
        """Waits for the learned quota and the own limits; returns the number of the call."""
        now_us = self.clock.now_us()
        if self._pair is None:
            return (yield from self._take_quota(quota, end_us, loop))
        if quota.waiting or quota.wait_us(now_us):
            yield from self._wait_for_quota(quota, ONE_REQUEST, end_us, loop, take=False)
            now_us = self.clock.now_us()
        key = quota.host if self._key is None else self._key(request)
        if not self._pair.hit_first or not self._pair.hit(key):
            yield Call(self._pair, "acquire", (key, 1, max(0, end_us - now_us) / 1e6))
        try:
            if self._closed:
                raise ClientClosed("the limits of this client were closed while a call waited")
            return (yield from self._take_quota(quota, end_us, loop))
        except BaseException:  # cancelled, or too late: the call is not sent
            with suppress(StoreError):
                yield Call(self._pair, "refund", (key,))
            raise

    def _take_quota(self, quota: LearnedQuota, end_us: int, loop: Loop) -> Plan[int]:
        if not quota.waiting and (number := quota.take(self.clock.now_us())) > 0:
            return number
        return (yield from self._wait_for_quota(quota, ONE_REQUEST, end_us, loop))

    def _charge(self, request: Any, info: CallInfo, quota: LearnedQuota, end_us: int, loop: Loop) -> Plan[tuple[Settlement, int]]:
        """As `_start`, for calls whose charge or place is held until their response has ended."""
        amounts = self._meter.estimate(info.body or b"") if self._meter is not None else {}
        costs = {"requests": 1, **{name: int(amount) for name, amount in amounts.items() if name != "spend"}}
        held = Settlement(costs, self._meter)
        key = quota.host if self._key is None else self._key(request)
        try:
            if quota.waiting or quota.wait_us(self.clock.now_us(), costs):
                yield from self._wait_for_quota(quota, costs, end_us, loop, take=False)
            if self._spend is not None:
                held.guard = self._spend
                held.spend = yield Call(self._spend, "reserve", (amounts.get("spend", self._spend.unit),))
            if self._pair is not None:
                cost = {name: costs.get(name, 1) for name in self._names}
                held.limits = yield Call(self._pair, "reserve", (key, cost, max(0, end_us - self.clock.now_us()) / 1e6))
            place = self._dependencies.of_host(quota.host) if self._dependencies is not None else None
            if place is not None:
                yield Call(place, "acquire")
                held.place = place
            if self._closed:
                raise ClientClosed("the limits of this client were closed while a call waited")
            number = 0 if quota.waiting else quota.take(self.clock.now_us(), costs)
            if number <= 0:
                number = yield from self._wait_for_quota(quota, costs, end_us, loop)
            return held, number
        except BaseException:
            yield from held.end(None, sent=False)
            raise

    def _wait_for_quota(self, quota: LearnedQuota, costs: Costs, end_us: int, loop: Loop, take: bool = True) -> Plan[int]:
        """Waits in order of arrival until the learned quota lets a call start; `take` counts it."""
        gate = self._gate if loop is None else of_loop(self._gates, loop, FifoGate)
        event: Event = WakeEvent() if loop is None else AsyncEvent()
        self._refuse_if_late(quota, quota.wait_us(self.clock.now_us(), costs), end_us)
        quota.join(1)
        try:
            if not gate.enter(quota.host, event):
                yield from self._sleep(max(0, end_us - self.clock.now_us()), event, loop)
                if not event.is_set():
                    self._refuse_if_late(quota, 1 + quota.wait_us(self.clock.now_us(), costs), 0)
            while True:
                event.clear()
                now_us = self.clock.now_us()
                number = quota.take(now_us, costs) if take else -quota.wait_us(now_us, costs)
                if number > 0 or (number == 0 and not take):
                    return number
                self._refuse_if_late(quota, -number, end_us)
                blocked = now_us < quota.not_before_us
                yield from self._sleep(-number, event, loop)
                if blocked:
                    quota.spread(self.clock.now_us(), self._spread_us(1), self._draw())
        finally:
            quota.join(-1)
            gate.leave(quota.host, event)

    def _refuse_if_late(self, quota: LearnedQuota, wait_us: int, end_us: int) -> None:
        now_us = self.clock.now_us()
        if wait_us and now_us + wait_us > end_us:
            raise RateLimited(Decision(False, 0, 0, wait_us, wait_us, 0, now_us + wait_us, quota.host))

    def _sleep(self, wait_us: int, event: Event, loop: Loop) -> Plan[None]:
        self._sleepers[event] = loop
        try:
            if not self._closed:
                yield Call(self.clock, "sleep", (wait_us / 1e6, event))
        finally:
            self._sleepers.pop(event, None)
        if self._closed:
            raise ClientClosed("the limits of this client were closed while a call waited")

    # Closing ---------------------------------------------------------------------------------------------------

    def _wake_all(self) -> None:
        self._closed = True
        for event, loop in list(self._sleepers.items()):
            if loop is None:
                event.set()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Ends the calls that wait, with ClientClosed: for a quota or a retry at once, for an own limit when their start comes.
        Closes a store that was not given as an object."""
        self._wake_all()
        if self._pair is not None:
            self._pair.close()

    async def aclose(self) -> None:
        self._wake_all()
        if self._pair is not None:
            await self._pair.aclose()


def _caps(limits: Any) -> Any:
    """Bare rates become sliding window logs, as for dependencies."""
    if isinstance(limits, (Limiter, AsyncLimiter)):
        return limits
    if isinstance(limits, Mapping):
        return {name: parse_cap(limit) for name, limit in limits.items()}
    return parse_cap(limits)


def client_limits(limits: ClientLimits | ClientRates | None) -> tuple[ClientLimits, bool]:
    """The limits of a translator, and whether it has made them and closes them."""
    return (limits, False) if isinstance(limits, ClientLimits) else (ClientLimits(limits), True)
