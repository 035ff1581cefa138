"""The state of a fair share in Redis or Valkey: one script call for each decision, on the server's time."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from ..errors import StoreUnavailable
from ..stores.redis import RedisStore
from .tenant_fair_share import AnswerFields
from .virtual_time_admission import FairAdmission

#: The numbers of a call, and of its reply, as in lua/fair_share.lua.
SETTINGS, ANSWER = struct.Struct(">4d"), struct.Struct(">4q")


@cache
def script() -> bytes:
    return files(__package__).joinpath("lua/fair_share.lua").read_bytes()


class RedisBackend:
    """Keeps the state of one capacity in two keys of one slot."""

    local = False

    def __init__(self, store: RedisStore, name: str, queue: FairAdmission) -> None:
        self.store, self._script = store, script()
        self._settings = queue.rate, queue.size, queue.window
        both = b"\x92" + packed_map(queue.weights) + packed_list(queue.guarantees)
        self._shares = [both] if queue.weights or queue.guarantees else []
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        key = f"{{{store.names.prefix}:share:{digest}}}"
        self._keys = [f"{key}:clock".encode(), f"{key}:finish".encode()]

    def _args(self, tenant: str, cost: int, operation: str) -> list[bytes]:
        given_us = self.store.given_us()
        settings = SETTINGS.pack(*self._settings, -1.0 if given_us is None else given_us)
        return [tenant.encode("utf-8", "surrogatepass"), b"%d" % cost, operation.encode(), settings, *self._shares]

    def decide(self, tenant: str, cost: int, commit: bool) -> AnswerFields:
        return answer_of(self.store.run_script(self._script, self._keys, self._args(tenant, cost, "hit" if commit else "peek")))

    async def adecide(self, tenant: str, cost: int, commit: bool) -> AnswerFields:
        args = self._args(tenant, cost, "hit" if commit else "peek")
        return answer_of(await self.store.arun_script(self._script, self._keys, args))

    def refund(self, tenant: str, cost: int) -> None:
        self.store.run_script(self._script, self._keys, self._args(tenant, cost, "refund"))

    async def arefund(self, tenant: str, cost: int) -> None:
        await self.store.arun_script(self._script, self._keys, self._args(tenant, cost, "refund"))

    def close(self) -> None:
        self.store.close()


def answer_of(reply: object) -> AnswerFields:
    if not isinstance(reply, bytes) or len(reply) != ANSWER.size:
        raise StoreUnavailable(f"a fair share gave an unexpected reply: {reply!r}")
    allowed, remaining, retry_us, reset_us = ANSWER.unpack(reply)
    return bool(allowed), remaining, retry_us, reset_us


def packed(value: float) -> bytes:
    """A double in MessagePack."""
    return b"\xcb" + struct.pack(">d", value)


def packed_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"\xdb" + struct.pack(">I", len(data)) + data


def packed_pairs(values: Mapping[str, float]) -> bytes:
    return b"".join([packed_text(key) + packed(float(value)) for key, value in values.items()])


def packed_map(values: Mapping[str, float]) -> bytes:
    """A map of strings to doubles in MessagePack."""
    return b"\xdf" + struct.pack(">I", len(values)) + packed_pairs(values)


def packed_list(values: Mapping[str, float]) -> bytes:
    """Strings and doubles in turn, in MessagePack: the script takes guarantees in this order."""
    return b"\xdd" + struct.pack(">I", 2 * len(values)) + packed_pairs(values)
