"""The stores: where state lives, and what makes read, decide, write one step.

Stores beyond this process are imported when first used, so that what is not used costs nothing.
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
    from .sharded import ShardedStore
    from .shared import SharedStore
else:  # hidden from type checkers, to which every misspelt name would have a type

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_LATER[name]}", __name__), name)


#: The modules of the stores that are imported later.
_LATER = {
    "GuardedStore": "guarded",
    "LeasedStore": "leased",
    "RedisStore": "redis",
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
    "ShardedStore",
    "SharedStore",
    "Store",
    "store_from_url",
]
