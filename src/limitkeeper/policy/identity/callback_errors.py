"""Rate-limited log of errors in the application's callbacks, and the check that something can be a callback.

The first error is logged at once, then at most one line per ten seconds, so that a broken callback can't flood the log; all are
counted. The text of an exception may hold a key and is left out; its type is logged.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass

from ...clock import steady_us
from ...errors import ConfigurationError

log = logging.getLogger("limitkeeper")
INTERVAL_US = 10_000_000


@dataclass(slots=True, eq=False)
class CallbackErrors:
    """`count` is the number of errors. Lock-free: threads that report at the same instant may be counted as one."""

    every_us: int = INTERVAL_US
    count: int = 0
    _logged_us: int | None = None
    _logged: int = 0

    def report(self, text: str, *args: object) -> None:
        """Counts an error, and logs it unless a line was logged within `every_us`."""
        self.count += 1
        now = steady_us()
        if self._logged_us is not None and now - self._logged_us < self.every_us:
            return
        skipped = self.count - self._logged - 1
        self._logged_us, self._logged = now, self.count
        log.warning(text + "%s", *args, f" ({skipped} more since the last line)" if skipped else "")


def callback_name(call: object) -> str:
    """The import string of a callable, for the log: `shop.people:vip_of`."""
    name = getattr(call, "name", None)
    if isinstance(name, str):
        return name
    return f"{getattr(call, '__module__', '?')}:{getattr(call, '__qualname__', type(call).__name__)}"


def check_callback(call: object) -> None:
    """ConfigurationError for an object that can't be called, or only be awaited."""
    if not callable(call):
        raise ConfigurationError(f"call: {call!r} can't be called; write package.module:function")
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004
        raise ConfigurationError(
            f"call: {callback_name(call)} is async, and a decision can't await; write a synchronous function"
        )
