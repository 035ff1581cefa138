"""For tests: a clock that moves when told to, the contract that every store must pass, and a switch to limit nothing.

`StoreContract` needs pytest and hypothesis, and is looked for only when somebody asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clock import ManualClock, unlimited

if TYPE_CHECKING:
    from .contract import StoreContract

__all__ = ["ManualClock", "StoreContract", "unlimited"]


def __getattr__(name: str) -> Any:
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .contract import StoreContract

    return StoreContract
