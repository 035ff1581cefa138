"""Audit log: who changed what, the last MAX_ENTRIES of them, in the store beside the overrides."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from typing import Any

from ..stores.store_hash import StoreHash

MAX_ENTRIES, MAX_TEXT = 200, 300


class AuditLog:
    """Entries in the order of their times; a field is the time (microseconds, 16 digits) and a random part. Each call may wait
    for the store: call it in a thread."""

    def __init__(self, hash: StoreHash, now_us: Callable[[], int]) -> None:
        self._hash = hash
        self._now_us = now_us

    def record(self, by: str, action: str, **details: Any) -> None:
        now_us = self._now_us()
        shown = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in details.items()}
        entry = {"at": now_us / 1e6, "by": by, "action": action, **shown}
        self._hash.write(f"{now_us:016d}-{token_hex(4)}", json.dumps(entry))
        for field in sorted(self._hash.read())[:-MAX_ENTRIES]:
            self._hash.write(field, None)

    def entries(self) -> list[dict[str, Any]]:
        """The newest first; what is no entry (other programs may write to the store) is left out."""
        found = []
        for _, text in sorted(self._hash.read().items(), reverse=True):
            with suppress(ValueError, RecursionError):
                entry = json.loads(text)
                found += [entry] if isinstance(entry, dict) else []
        return found
