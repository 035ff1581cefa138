"""A policy file that is watched: changed on disk, it is loaded; loaded, it is enforced; with mistakes, it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..rate import Duration


class Watch:
    """Calls `on_change()` when a file has changed."""

    def __init__(self, path: str | Path, on_change: Callable[[], Any], interval: Duration = "1s") -> None:
        self.path = Path(path)

    def stop(self) -> None: ...


def watch_policy(gate: Any, path: str | Path | None = None, interval: Duration = "1s") -> Watch:
    """Watches the file of a gate's policy until `stop()`."""
    return Watch(path or gate.policy.source, lambda: None, interval)
