"""Trips: what travels, told apart from how it travels, so that both colours follow the same plan.

A plan is a generator. It yields a list of `Trip`s (some commands for one place, written in one go) and is sent back an
`Outcome` for each: the replies, or why there are none. Whoever drives it (`link.py` on blocking sockets, `stream.py` on an event
loop) knows nothing of scripts, slots or sentinels; whoever plans knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from ...errors import StoreError
from .address import Endpoint, Login
from .resp import Command

T = TypeVar("T")


class Trip(NamedTuple):
    """Commands for one place, written in one go."""

    place: Endpoint
    login: Login
    commands: list[Command]


class Outcome(NamedTuple):
    """The replies of a trip, or why there are none. `unsent`: certainly nothing was done."""

    replies: list[Any]
    error: StoreError | None = None
    unsent: bool = False


class Pause(NamedTuple):
    """A plan may also yield this: go on after a moment."""

    seconds: float


Step = list[Trip] | Pause
Plan = Generator[Step, list[Outcome], T]
