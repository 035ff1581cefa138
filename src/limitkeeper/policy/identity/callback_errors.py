"""Functions of the application that are called while a request is decided, and what is said when they misbehave.

A complaint goes to the log at once, then at most every ten seconds, so that a broken function can't flood it; all are counted.
What an error says stays out of the line (it may hold a key); its kind is told.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

from ...clock import steady_us
from ...errors import ConfigurationError

log = logging.getLogger("limitkeeper")
EVERY_US = 10_000_000


@dataclass(slots=True, eq=False)
class CallbackErrors:
    """`count` is how many there were; `tell` writes a line unless one was written a moment ago. Without a lock: threads that
    complain in the same instant may be counted as one."""

    every_us: int = EVERY_US
    count: int = 0
    _told_us: int | None = None
    _told: int = 0

    def report(self, text: str, *args: object) -> None:
        self.count += 1
        now = steady_us()
        if self._told_us is not None and now - self._told_us < self.every_us:
            return
        untold = self.count - self._told - 1
        self._told_us, self._told = now, self.count
        log.warning(text + "%s", *args, f" ({untold} more since the last line)" if untold else "")


def callback_name(call: Any) -> str:
    """How a function is called in the log: `shop.people:vip_of`, which may be all that is known of it."""
    name = getattr(call, "name", None)
    if isinstance(name, str):
        return name
    return f"{getattr(call, '__module__', '?')}:{getattr(call, '__qualname__', type(call).__name__)}"


def check_callback(call: object) -> None:
    """ConfigurationError for what can't be called, or only be awaited."""
    if not callable(call):
        raise ConfigurationError(f"call: {call!r} can't be called; write package.module:function")
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004
        raise ConfigurationError(
            f"call: {callback_name(call)} is async, and a decision does not wait; write a function that answers from memory"
        )
