"""The stores, which keep the state of limits and make each decision atomic.

Stores other than MemoryStore are imported on first use, so that unused ones cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algorithms.claim import Claim, NamedLimit
from .contract import Store
from .memory import MemoryStore
from .urls import store_from_url

if TYPE_CHECKING:
    from .guarded import GuardedStore
    from .leased import LeasedStore
    from .redis import RedisStore
    from .remote import RemoteStore
    from .sharded import ShardedStore
    from .shared import SharedStore
else:  # hidden from type checkers, which would otherwise accept every misspelt name

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_LATER[name]}", __name__), name)


#: Store class -> its module, imported on first use.
_LATER = {
    "GuardedStore": "guarded",
    "LeasedStore": "leased",
    "RedisStore": "redis",
    "RemoteStore": "remote",
    "ShardedStore": "sharded",
    "SharedStore": "shared",
}


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])


__all__ = [
    "Claim",
    "GuardedStore",
    "LeasedStore",
    "MemoryStore",
    "NamedLimit",
    "RedisStore",
    "RemoteStore",
    "ShardedStore",
    "SharedStore",
    "Store",
    "store_from_url",
]
