"""For tests: ManualClock, the StoreContract that every store must pass, and `unlimited()`, which switches limiting off.

`StoreContract` needs pytest and hypothesis, so it is imported on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clock import ManualClock
from .unlimited import unlimited

if TYPE_CHECKING:
    from .contract import StoreContract

__all__ = ["ManualClock", "StoreContract", "unlimited"]


def __getattr__(name: str) -> object:
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .contract import StoreContract

    return StoreContract
