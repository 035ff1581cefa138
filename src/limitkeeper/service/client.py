"""Client and AsyncClient: the operations of the service for Python callers. Answers are Decisions.

    http://, https://      over httpx (client_httpx.py)               times in µs
    redis://, rediss://    over redis-py (client_redis.py)            times in ms, rounded up

Both take an Operation and return the JSON that HTTP has for it. A call is sent again, `retries` times, when it was certainly not
received (an HTTP connection was refused), or when repeating it changes nothing (`inspect`, `reset`): a check that timed out may
have been charged. A caller's mistakes raise RequestError; a service that can't be reached, or whose store can't,
StoreUnavailable; one that does not answer in time StoreTimeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ..decision import Decision, Decisions
from ..errors import ConfigurationError, StoreError, StoreUnavailable
from ..stores.urls import masked
from .app import UNLIMITED

T = TypeVar("T")
Json = Mapping[str, Any]
#: A check of many: (limit, key), (limit, key, cost) or (limit, key, cost, tier).
Check = tuple[str, str] | tuple[str, str, int] | tuple[str, str, int, str | None]
MODULES = {"http": "httpx", "https": "httpx", "redis": "redis", "rediss": "redis"}
URL = "http://127.0.0.1:7070"


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A call: its name in the service's paths, the fields of its body, and the reader of its answer. `repeatable`: it may be sent
    again when it is not known whether it was received."""

    name: str
    body: dict[str, Any]
    read: Callable[[Json], T]
    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class ServiceReservation:
    """The decision of a reservation, truthy when granted, and the token that settles it."""

    decision: Decision
    token: str

    def __bool__(self) -> bool:
        return self.decision.allowed


def readable(read: Callable[..., T], *given: Any) -> T:
    """What an answer says; StoreUnavailable for one that is not the service's, such as the page of a proxy."""
    try:
        return read(*given)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        message = f"expected an answer of the limitkeeper service, got another one ({type(error).__name__}: {str(error)[:80]})"
        raise StoreUnavailable(message) from error


# Operations ----------------------------------------------------------------------------------------------------------


def decision(found: Json, name: str = "") -> Decision:
    if found["limit"] is None:
        return UNLIMITED
    retry, reset, wait = found["retry_after"], found["reset_after"], found.get("wait", 0)
    times = -1 if retry is None else round(retry * 1e6), round(reset * 1e6), round(wait * 1e6)
    return Decision(found["allowed"], found["limit"], found["remaining"], *times, name=name)


def hit(limit: str, key: str, cost: int = 1, tier: str | None = None) -> dict[str, Any]:
    return {"limit": limit, "key": key, "cost": cost, **({} if tier is None else {"tier": tier})}


def check(limit: str, key: str, cost: int, tier: str | None) -> Operation[Decision]:
    return Operation("check", hit(limit, key, cost, tier), lambda found: decision(found, limit))


def check_many(checks: Sequence[Check]) -> Operation[list[Decision]]:
    def read(found: Json) -> list[Decision]:
        return [decision(one, check[0]) for one, check in zip(found["decisions"], checks, strict=True)]

    return Operation("check", {"checks": [hit(*one) for one in checks]}, read)


def reserve(limit: str, key: str, cost: int, max_wait: float, tier: str | None) -> Operation[ServiceReservation]:
    def read(found: Json) -> ServiceReservation:
        return ServiceReservation(decision(found, limit), found.get("token", ""))

    return Operation("reserve", {**hit(limit, key, cost, tier), "max_wait": max_wait}, read)


def settle(token: str, used: int) -> Operation[bool]:
    return Operation("settle", {"token": token, "used": used}, lambda found: bool(found["settled"]))


def refund(limit: str, key: str, cost: int, tier: str | None) -> Operation[bool]:
    return Operation("refund", hit(limit, key, cost, tier), lambda found: bool(found["refunded"]))


def reset(limit: str, key: str) -> Operation[None]:
    return Operation("reset", {"limit": limit, "key": key}, lambda found: None, repeatable=True)


def state(one: dict[str, Any]) -> dict[str, Any]:
    """The state of a limit as a decision; a capacity of 0 means that the key is blocked."""
    blocked = one["capacity"] == 0
    return {**one, "allowed": not blocked, "limit": one["capacity"], "retry_after": None if blocked else 0}


def inspect(limit: str, key: str) -> Operation[Decision]:
    def read(found: Json) -> Decision:
        parts = [state(one) for one in found["limits"]]
        return Decisions.join([decision(one, one["name"]) for one in parts]) if parts else UNLIMITED

    return Operation("limits", {"limit": limit, "key": key}, read, repeatable=True)


# Clients -------------------------------------------------------------------------------------------------------------


def transport(kind: str, url: str, token: str | None, timeout: float, retries: int) -> Any:
    module = MODULES.get(urlsplit(url).scheme)
    if module is None:
        raise ConfigurationError(f"{masked(url)}: expected http://host:7070 or redis://host:7071")
    try:
        found = import_module(f".client_{module}", __package__)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{masked(url)} needs {error.name}; pip install 'limitkeeper[service-client]'") from None
    return getattr(found, kind)(url, token, timeout, retries)


class Client:
    """A client of the service: `Client("http://127.0.0.1:7070")`, or `redis://host:7071` for its Redis protocol.

    Args:
        url: the address of the service.
        token: the access token, where the service wants one.
        timeout: seconds, for connecting and for each read.
        retries: how often a call that may be repeated is sent again after a failed connection.
    """

    def __init__(self, url: str = URL, *, token: str | None = None, timeout: float = 1.0, retries: int = 1) -> None:
        self._transport, self._retries = transport("Transport", url, token, timeout, retries), retries

    def _call(self, operation: Operation[T]) -> T:
        for left in reversed(range(self._retries + 1)):
            try:
                return readable(operation.read, self._transport.call(operation))
            except StoreError:
                if not left or not operation.repeatable:
                    raise
        raise AssertionError

    def check(self, limit: str, key: str, cost: int = 1, *, tier: str | None = None) -> Decision:
        """Charges a cost to a limit of the service's policy under a key."""
        return self._call(check(limit, key, cost, tier))

    def check_many(self, checks: Sequence[Check]) -> list[Decision]:
        """Up to 1000 independent checks, decided in order, in one round trip."""
        return self._call(check_many(checks))

    def reserve(self, limit: str, key: str, cost: int, *, max_wait: float = 0, tier: str | None = None) -> ServiceReservation:
        """Charges an estimate at the earliest start within `max_wait` seconds: `decision.wait` seconds from now."""
        return self._call(reserve(limit, key, cost, max_wait, tier))

    def settle(self, token: str, used: int) -> bool:
        """Sets the actual cost of a reservation; 0 cancels it. False: it was settled before."""
        return self._call(settle(token, used))

    def refund(self, limit: str, key: str, cost: int = 1, *, tier: str | None = None) -> bool:
        """Gives units back that were not used. False: nothing limits this key."""
        return self._call(refund(limit, key, cost, tier))

    def reset(self, limit: str, key: str) -> None:
        """Deletes the state of a key."""
        return self._call(reset(limit, key))

    def inspect(self, limit: str, key: str) -> Decision:
        """What a key has left; nothing is charged."""
        return self._call(inspect(limit, key))

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClient:
    """The same methods as `Client`, awaited; `aclose` closes it."""

    def __init__(self, url: str = URL, *, token: str | None = None, timeout: float = 1.0, retries: int = 1) -> None:
        self._transport, self._retries = transport("AsyncTransport", url, token, timeout, retries), retries

    async def _call(self, operation: Operation[T]) -> T:
        for left in reversed(range(self._retries + 1)):
            try:
                return readable(operation.read, await self._transport.call(operation))
            except StoreError:
                if not left or not operation.repeatable:
                    raise
        raise AssertionError

    async def check(self, limit: str, key: str, cost: int = 1, *, tier: str | None = None) -> Decision:
        return await self._call(check(limit, key, cost, tier))

    async def check_many(self, checks: Sequence[Check]) -> list[Decision]:
        return await self._call(check_many(checks))

    async def reserve(
        self, limit: str, key: str, cost: int, *, max_wait: float = 0, tier: str | None = None
    ) -> ServiceReservation:
        return await self._call(reserve(limit, key, cost, max_wait, tier))

    async def settle(self, token: str, used: int) -> bool:
        return await self._call(settle(token, used))

    async def refund(self, limit: str, key: str, cost: int = 1, *, tier: str | None = None) -> bool:
        return await self._call(refund(limit, key, cost, tier))

    async def reset(self, limit: str, key: str) -> None:
        return await self._call(reset(limit, key))

    async def inspect(self, limit: str, key: str) -> Decision:
        return await self._call(inspect(limit, key))

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
