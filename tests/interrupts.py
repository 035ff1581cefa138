"""Raises from a signal handler after any call and where any function begins: at every such moment of a call in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(Exception):
    pass


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Whether a call has so many moments at which a handler may run; it is interrupted at the last of them."""
    left = number

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        if event == "c_return" or (event == "call" and frame.f_code.co_name != "critical_section"):  # `close` has no such moment
            left -= 1
            if left == 0:
                raise Interrupted  # the interpreter then removes this function

    sys.setprofile(count)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False
