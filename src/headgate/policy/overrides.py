"""Limits of single keys that change while the program runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .model import Limits


@dataclass(frozen=True, slots=True)
class CalledOverrides:
    call: Callable[[str], Any]
    keep_us: int = 10_000_000

    def get(self, key: str) -> Limits | None:
        return None

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HashOverrides:
    url: str
    hash: str
    refresh_us: int = 5_000_000

    def get(self, key: str) -> Limits | None:
        return None

    def close(self) -> None: ...
