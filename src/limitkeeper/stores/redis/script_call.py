"""Parcels: what shares one call to one place.

A `Parcel` of asks is one script call; an `Errand` is plain commands on the keys of one slot. Both know how they are written,
what a reply means to them, and why they failed if they did.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ...errors import StoreError
from .address import Endpoint
from .operations import ScriptRequest, call_of, read_all
from .resp import Command

#: So many asks travel in one script call at most: a larger batch would keep the server, and the callers behind it, waiting.
MOST = 64
#: Of asks that somebody wants decided at one moment, so many: some milliseconds of the server.
MANY = 1000


class RoutedCommands:
    """Commands for the place that keeps `key`; without a key, for any."""

    __slots__ = ("_commands", "asking", "begun", "error", "key", "place", "replies")

    def __init__(self, commands: Sequence[Command], key: bytes | None = None, place: Endpoint | None = None) -> None:
        self._commands = list(commands)
        self.key = key
        self.place = place
        self.asking = False
        self.begun = 0  # how many lessons had been given when it was sent, see `Route._teach`
        self.error: StoreError | None = None
        self.replies: list[Any] = []

    def commands(self) -> list[Command]:
        if not self.asking:
            return self._commands
        return [one for command in self._commands for one in (["ASKING"], command)]

    @property
    def size(self) -> int:
        """How many replies there will be."""
        return len(self._commands) * (2 if self.asking else 1)

    def take(self, replies: list[Any]) -> bool:
        """Keeps the replies; whether they make sense."""
        self.replies = replies
        return True


class ScriptCall(RoutedCommands):
    """Asks that share one script call."""

    __slots__ = ("asks", "whole")

    def __init__(self, asks: Sequence[ScriptRequest]) -> None:
        super().__init__((), asks[0].keys[0])
        self.asks = asks
        self.whole = False  # whether the script travels itself: the server does not know it yet

    def commands(self) -> list[Command]:
        script, keys, body = call_of(self.asks)
        name, text = ("EVAL", script.source) if self.whole else ("EVALSHA", script.sha)
        call: Command = [name, text, b"%d" % len(keys), *keys, body]
        return [["ASKING"], call] if self.asking else [call]

    @property
    def size(self) -> int:
        return 2 if self.asking else 1

    @property
    def sha(self) -> bytes:
        return call_of(self.asks)[0].sha

    def take(self, replies: list[Any]) -> bool:
        return understood(self.asks, replies[0])


def understood(asks: Sequence[ScriptRequest], reply: Any) -> bool:
    """Hands each ask its part of a reply. False: no script of ours said that; whoever answered is no Redis, or a broken one."""
    try:
        read_all(asks, reply)
    except (struct.error, TypeError, ValueError, IndexError):
        return False
    return True


def parcelled(asks: Sequence[ScriptRequest], most: int = MOST) -> list[ScriptCall]:
    """Asks of one slot (or of a single server), in order, so many to a call."""
    return [ScriptCall(asks[at : at + most]) for at in range(0, len(asks), most)]
