"""The transports of client.py for the Redis protocol, over redis-py. Without its retries, which could charge twice."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from ..errors import ConfigurationError, LimitkeeperError, StoreTimeout, StoreUnavailable
from ..stores.urls import masked
from .app import INVALID, RequestError
from .client import Json, Operation, readable


def options(token: str | None, timeout: float) -> dict[str, Any]:
    login = {} if token is None else {"password": token}
    return {"socket_timeout": timeout, "socket_connect_timeout": timeout, "decode_responses": True, **login}


def commands(operation: Operation[Any]) -> list[tuple[Any, ...]]:
    name, body = operation.name, operation.body
    if name == "limits":
        return [("LK.PEEK", body["limit"], body["key"], 0)]
    if name == "check":
        return [hit("LK.HIT", one) for one in body.get("checks", [body])]
    if name == "reserve":
        return [(*hit("LK.RESERVE", body), "MAXWAIT", int(body["max_wait"] * 1000))]
    return [hit("LK.REFUND", body) if "cost" in body else (f"LK.{name.upper()}", *body.values())]


def hit(name: str, body: Json) -> tuple[Any, ...]:
    return (name, body["limit"], body["key"], body["cost"], *(("TIER", body["tier"]) if "tier" in body else ()))


def answer(operation: Operation[Any], replies: list[Any]) -> Json:
    """The JSON that HTTP has for these replies."""
    name, body = operation.name, operation.body
    if name in ("settle", "refund", "reset"):
        return {"settled": replies[0], "refunded": replies[0], "reset": replies[0]}
    found = [decision(reply) for reply in replies]
    if name == "limits":
        one = {**found[0], "name": body["limit"], "capacity": found[0]["limit"]}
        return {"limits": [] if one["limit"] is None else [one]}
    return {"decisions": found} if "checks" in body else found[0]


def decision(reply: list[Any]) -> dict[str, Any]:
    allowed, limit, remaining, retry, reset = reply[:5]
    wait, token = reply[5:] or (0, "")
    times = {"retry_after": None if retry < 0 else retry / 1000, "reset_after": reset / 1000, "wait": wait / 1000}
    return {"allowed": allowed, "limit": None if limit < 0 else limit, "remaining": remaining, **times, "token": token}


def failed(url: str, error: redis.RedisError) -> LimitkeeperError:
    if isinstance(error, redis.TimeoutError):
        return StoreTimeout(f"the service at {masked(url)}: {error}")
    if isinstance(error, AuthenticationError | NoPermissionError) or str(error).startswith(("NOAUTH", "WRONGPASS")):
        return ConfigurationError(f"the service refused access: {error}")
    if isinstance(error, ResponseError) and not str(error).startswith("UNAVAILABLE"):
        return RequestError(INVALID, str(error))
    remedy = "; it speaks HTTP: write http://, or its Redis port" if 'got "H"' in str(error) else ""
    return StoreUnavailable(f"the service at {masked(url)}: {error}{remedy}")


class Transport:
    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self._url = url
        self._redis = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options(token, timeout))

    def call(self, operation: Operation[Any]) -> Json:
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                for one in commands(operation):
                    pipeline.execute_command(*one)  # type: ignore[no-untyped-call]
                return readable(answer, operation, pipeline.execute())
        except redis.RedisError as error:
            raise failed(self._url, error) from error

    def close(self) -> None:
        self._redis.close()


class AsyncTransport:
    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self._url = url
        self._redis = redis.asyncio.Redis.from_url(url, retry=AsyncRetry(NoBackoff(), 0), **options(token, timeout))

    async def call(self, operation: Operation[Any]) -> Json:
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for one in commands(operation):
                    pipeline.execute_command(*one)
                return readable(answer, operation, await pipeline.execute())
        except redis.RedisError as error:
            raise failed(self._url, error) from error

    async def aclose(self) -> None:
        await self._redis.aclose()
