"""CallbackErrors: counts errors in the application's callbacks and logs them, rate-limited; what can be a callback at all.

The first error is logged at once, then at most one line per ten seconds, so that a broken callback can't flood the log; all are
counted. An exception is logged by its type, and once with the lines that raised it; its text may hold a key and is left out.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_tb

from ..clock import steady_us
from ..decorators import is_kind
from ..errors import ConfigurationError

log = logging.getLogger("limitkeeper")
INTERVAL_US = 10_000_000


@dataclass(slots=True, eq=False)
class CallbackErrors:
    """`count` is the number of errors. Lock-free: threads that report at the same instant may be counted as one."""

    every_us: int = INTERVAL_US
    count: int = 0
    _logged_us: int | None = None
    _logged: int = 0
    _traced: bool = False

    def report(self, text: str, *args: object, raised: BaseException | None = None) -> None:
        """Counts an error, and logs it unless a line was logged within `every_us`."""
        self.count += 1
        now = steady_us()
        if self._logged_us is not None and now - self._logged_us < self.every_us:
            return
        skipped = self.count - self._logged - 1
        self._logged_us, self._logged = now, self.count
        traced = [] if raised is None or self._traced else ["\n", *format_tb(raised.__traceback__)]
        self._traced = self._traced or bool(traced)
        log.warning(text + "%s%s", *args, f" ({skipped} more since the last line)" if skipped else "", "".join(traced).rstrip())


def callback_name(call: object) -> str:
    """The import string of a callable, for the log: `shop.people:vip_of`."""
    name = getattr(call, "name", None)
    if isinstance(name, str):
        return name
    return f"{getattr(call, '__module__', '?')}:{getattr(call, '__qualname__', type(call).__name__)}"


def check_parameters(call: Callable[..., object], *parameters: str, option: str = "call") -> None:
    """ConfigurationError for a function that can't be called with these arguments. `option` is what the user wrote it under."""
    try:
        signature = inspect.signature(call)
    except ValueError:  # a function in C may have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        shown = ", ".join(parameters)
        message = f"{option}: {callback_name(call)}{signature} can't be called with ({shown}): {error}"
        raise ConfigurationError(f"{message}; write a function of ({shown})") from None


def check_callback(call: object, *parameters: str, option: str = "call") -> None:
    """ConfigurationError for an object that can't be called with these arguments, or only be awaited."""
    if not callable(call):
        remedy = "package.module:function" if option == "call" else f"a function of ({', '.join(parameters)})"
        raise ConfigurationError(f"{option}: {call!r} can't be called; write {remedy}")
    if is_kind(call, inspect.iscoroutinefunction):
        raise ConfigurationError(
            f"{option}: {callback_name(call)} is async, and a decision can't await; write a synchronous function"
        )
    check_parameters(call, *parameters, option=option)
