"""Dependencies: caps on the calls that a service makes to others, shared through a store by all its processes.

    dependencies = Dependencies({"inventory": "300/s", "payment": DependencyCap("200/s", concurrent=40)}, store="redis://…")
    async with dependencies["inventory"]:
        ...

"300/s" is a sliding window log here: at most 300 calls start in *every* window of one second. (A token bucket with a burst of
its count admits up to 599, a fixed window 600.) Another rule can be written out: "token bucket 300/s burst 1".

A call takes its place in the bulkhead first, and then waits for its start: a start that was decided before a wait for a place
would be late, and late starts could come together in one window. `timeout` bounds both waits together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..algorithms import Limit, SlidingWindowLog
from ..algorithms.limit_parser import parse_limit
from ..errors import ConfigurationError, InvalidLimit
from ..limiter import AsyncLimiter, Limiter
from ..observe.snapshot import Snapshot
from ..rate import Duration, duration_us
from ..stores import Store
from ..stores.urls import open_store
from .bulkhead import Bulkhead, PlaceContext, checked_size

if TYPE_CHECKING:
    from ..policy.model import Policy


def parse_cap(text: object) -> Limit:
    """The limit of a dependency: a bare rate is a sliding window log."""
    if isinstance(text, Limit):
        return text
    if not isinstance(text, str):
        raise InvalidLimit(f"expected a rate or a limit, got {text!r}; write it like '300/s' or 'token bucket 300/s burst 10'")
    return SlidingWindowLog(text) if text.strip()[:1].isdigit() else parse_limit(text)


@dataclass(frozen=True, init=False)
class DependencyCap:
    """The cap of one dependency: a rate for all processes together, and in each process at most `concurrent` calls at a time,
    with `max_waiting` more that wait. `timeout` is the longest wait of a call; `hosts` are the names under which HTTP clients
    find the dependency."""

    limit: Limit
    concurrent: int | None
    max_waiting: int | None
    timeout_us: int
    hosts: tuple[str, ...]

    def __init__(
        self,
        rate: str | Limit,
        concurrent: int | None = None,
        max_waiting: int | None = None,
        timeout: Duration = "1s",
        hosts: tuple[str, ...] = (),
    ) -> None:
        if max_waiting is not None and concurrent is None:
            raise ConfigurationError("max_waiting is the queue of the bulkhead; give concurrent= too")
        vars(self).update(  # the fields are frozen
            limit=parse_cap(rate),
            concurrent=None if concurrent is None else checked_size(concurrent, "concurrent", 1),
            max_waiting=None if max_waiting is None else checked_size(max_waiting, "max_waiting", 0),
            timeout_us=duration_us(timeout),
            hosts=tuple(host.lower() for host in hosts),
        )


class Dependency(PlaceContext):
    """One dependency: a context manager, sync and async, and a decorator. Refused calls raise `RateLimited` or `BulkheadFull`."""

    def __init__(self, name: str, cap: DependencyCap, store: Store, owner: str) -> None:
        self.name, self.cap = name, cap
        self._limiter = Limiter({name: cap.limit}, store, owner)
        self._async_limiter = AsyncLimiter({name: cap.limit}, store, owner)
        self._clock = store.clock
        self.bulkhead: Bulkhead | None = None
        if cap.concurrent is not None:
            timeout = cap.timeout_us / 1e6
            self.bulkhead = Bulkhead(cap.concurrent, cap.max_waiting, timeout, name=name, clock=self._clock)

    def __repr__(self) -> str:
        return f"<Dependency {self.name!r}: {self.cap.limit}, {self.bulkhead or 'any number at a time'}>"

    def acquire(self) -> None:
        """Waits for a place and for the start of a call; `release` ends it."""
        if self.bulkhead is None:
            self._limiter.acquire(self.name, timeout=self.cap.timeout_us / 1e6)
            return
        began_us = self._clock.now_us()
        self.bulkhead.acquire()
        try:
            self._limiter.acquire(self.name, timeout=self._left(began_us))
        except BaseException:
            self.bulkhead.release()
            raise

    async def aacquire(self) -> None:
        if self.bulkhead is None:
            await self._async_limiter.acquire(self.name, timeout=self.cap.timeout_us / 1e6)
            return
        began_us = self._clock.now_us()
        await self.bulkhead.aacquire()
        try:
            await self._async_limiter.acquire(self.name, timeout=self._left(began_us))
        except BaseException:
            self.bulkhead.release()
            raise

    def release(self) -> None:
        """Ends a call. What its start has charged stays charged: the dependency has had it."""
        if self.bulkhead is not None:
            self.bulkhead.release()

    def _left(self, began_us: int) -> float:
        return max(0, began_us + self.cap.timeout_us - self._clock.now_us()) / 1e6


class Dependencies(Mapping[str, Dependency]):
    """Dependencies by name. `store` is a store or a URL, by default the memory of this process; `name` is the namespace of
    their state: services that use other names count apart."""

    def __init__(
        self,
        caps: Mapping[str, str | Limit | DependencyCap],
        store: Store | str | None = None,
        name: str = "dependencies",
    ) -> None:
        self._owns_store = store is None or isinstance(store, str)
        self.store = open_store(store)
        self._by_name = {
            each: Dependency(each, cap if isinstance(cap, DependencyCap) else DependencyCap(cap), self.store, name)
            for each, cap in caps.items()
        }
        self._by_host = {host: one for one in self.values() for host in one.cap.hosts}
        if len(self._by_host) < sum(len(one.cap.hosts) for one in self.values()):
            raise ConfigurationError("a host belongs to one dependency: the same host is given twice")

    @classmethod
    def of_policy(cls, policy: Policy, store: Store | str | None = None) -> Dependencies:
        """The dependencies of a policy's section `dependencies`, by default on the policy's store."""
        return cls(policy.dependencies, policy.store if store is None else store, f"{policy.name}.dependencies")

    def __getitem__(self, name: str) -> Dependency:
        found = self._by_name.get(name)
        if found is None:
            raise KeyError(f"unknown dependency {name!r}; known are: {', '.join(self._by_name) or 'none'}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def of_host(self, host: str) -> Dependency | None:
        """The dependency of a host name, for the transports of HTTP clients; None: calls to this host have no cap."""
        return self._by_host.get(host.lower())

    def snapshot(self) -> Snapshot:
        """The bulkheads, for metrics sinks."""
        return Snapshot("", bulkheads=tuple(one.bulkhead.stats() for one in self.values() if one.bulkhead is not None))

    def close(self) -> None:
        """Closes the store if it was not given as an object."""
        if self._owns_store:
            self.store.close()

    async def aclose(self) -> None:
        if self._owns_store:
            await self.store.aclose()
