"""RateLimiter: named permissions, with Resilience4j's interface around them: changes, results that drain, decorators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

from ..errors import ConfigurationError
from ..limiter import Limiter
from ..rate import Duration
from ..stores import Store
from .config import Outcome, RateLimiterConfig
from .decorate import decorated
from .events import EventPublisher
from .metrics import Metrics
from .permissions import KEY, Permissions, stand

log = logging.getLogger("limitkeeper")
F = TypeVar("F", bound=Callable[..., Any])
Permits = int | Callable[..., int]


class RateLimiter(Permissions):
    """Permissions under a name. `store` is where they are kept, and its clock is the one that counts.

    `of` also takes a function that returns the configuration.
    """

    def __init__(
        self,
        name: str,
        config: RateLimiterConfig | None = None,
        *,
        store: Store | str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        config = RateLimiterConfig() if config is None else config
        if not isinstance(config, RateLimiterConfig):
            raise ConfigurationError(f"{name!r}: {config!r} is no RateLimiterConfig")
        super().__init__(name, config, store)
        self.tags: Mapping[str, str] = MappingProxyType(dict(tags or {}))
        self._first = self._standing.limiter

    @classmethod
    def of(cls, name: str, config: RateLimiterConfig | Callable[[], RateLimiterConfig], **options: Any) -> RateLimiter:
        return cls(name, config() if callable(config) else config, **options)

    @classmethod
    def of_defaults(cls, name: str, **options: Any) -> RateLimiter:
        return cls(name, **options)

    @property
    def config(self) -> RateLimiterConfig:
        return self._standing.config

    @property
    def limiter(self) -> Limiter:
        """The limitkeeper limiter underneath, with its own events and counters."""
        return self._standing.limiter

    @property
    def metrics(self) -> Metrics:
        return Metrics(self)

    @property
    def event_publisher(self) -> EventPublisher:
        return self._publisher

    def close(self) -> None:
        """Closes the store, if this RateLimiter made it."""
        self._first.close()

    def __repr__(self) -> str:
        return f"<RateLimiter {self.name!r} {self.config!r}>"

    # Changes ---------------------------------------------------------------------------------------------------

    def change_timeout_duration(self, timeout_duration: Duration) -> None:
        """Another patience from now on; who waits already keeps waiting."""
        with self._lock:
            config = self.config.replace(timeout_duration=timeout_duration)
            self._standing = self._standing._replace(config=config)

    def change_limit_for_period(self, limit_for_period: int) -> None:
        """Another rate from now on (not only from a next period). What is missing, or reserved ahead, stays so.

        The capacity follows, unless one was given; a bucket that was born full counts as born full under the new one.
        """
        with self._lock:
            old = self.config
            new = old.replace(limit_for_period=limit_for_period, initial_permits=0)
            full = old.initial_permits == old.permit_capacity
            initial = new.permit_capacity if full else min(old.initial_permits, new.permit_capacity)
            self._standing = stand(self.name, new.replace(initial_permits=initial), self.store)
            self.limiter.peek(KEY)  # what was written at the old rate is read at the new one from this moment on

    # Results ---------------------------------------------------------------------------------------------------

    def on_result(self, result: Any) -> None:
        """Tells what a call returned; drains the permissions if the configuration says so."""
        if self._is_drained_by(Outcome(result=result)):
            self.drain_permissions()

    def on_error(self, error: BaseException) -> None:
        """Tells what a call raised."""
        if self._is_drained_by(Outcome(error=error)):
            self.drain_permissions()

    def on_success(self) -> None:
        """Tells that a call without a result went well."""
        self.on_result(None)

    async def _settle_async(self, outcome: Outcome) -> None:
        if self._is_drained_by(outcome):
            await self.drain_permissions_async()

    def _is_drained_by(self, outcome: Outcome) -> bool:
        predicate = self.config.drain_permissions_on_result
        try:
            return predicate is not None and bool(predicate(outcome))
        except Exception:  # it must not hide how the call ended
            log.exception("drain_permissions_on_result of RateLimiter %r failed; nothing is drained", self.name)
            return False

    # Decorators ------------------------------------------------------------------------------------------------

    @overload
    def decorate(self, function: F, permits: Permits = 1) -> F: ...

    @overload
    def decorate(self, function: None = None, permits: Permits = 1) -> Callable[[F], F]: ...

    def decorate(self, function: F | None = None, permits: Permits = 1) -> F | Callable[[F], F]:
        """A function, or coroutine function, that waits for permission before every call.

        `permits` is a number, or a function of the call's own arguments. Refused calls raise RequestNotPermitted. Without a
        function it is a decorator: `@backend.decorate(permits=3)`.
        """

        def decorate(function: F) -> F:
            return decorated(self, function, permits)  # type: ignore[no-any-return]

        return decorate if function is None else decorate(function)

    def execute(self, function: Callable[..., Any], *args: Any, permits: Permits = 1, **kwargs: Any) -> Any:
        """Calls a function once it has permission; awaits nothing itself when that is a coroutine function."""
        return self.decorate(function, permits)(*args, **kwargs)
