"""What an ask is, and how claims are packed into one. The asks themselves are in `asks.py` and `known.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ...algorithms.claim import Claim
from .codec import LimitEntry
from .key_names import is_hashed, key_bytes, tag

ONE = struct.Struct("<q")
TWO = struct.Struct("<2q")
LENGTH = struct.Struct("<I")
NOW = struct.Struct("<d")
_CLAIM = struct.Struct("<BB7d")
STATE = struct.Struct("<3d")
_STATES = struct.Struct("<6d")
_CHARGED = struct.Struct("<dB")


class ScriptRequest:
    """One operation. `rules` is what its script must hold; after `read`, `answer` is its answer, or `stale` is not None."""

    __slots__ = ("answer", "body", "found_us", "keys", "now_us", "rules", "stale")

    rules: frozenset[str]
    keys: list[bytes]
    body: bytes
    #: None until it was answered.
    answer: Any
    #: For each claim the bytes of a state that must be converted first, b"" where there is none.
    stale: list[bytes] | None
    #: The store's time when the stale state was found.
    found_us: int
    #: The time that travels with the ask; None: the server's.
    now_us: int | None

    def read(self, reply: bytes, at: int) -> int:
        """Takes this ask's part of a reply, and says where the next one's begins."""
        raise NotImplementedError

    def places(self) -> list[LimitEntry]:
        """The limits that are asked, in order."""
        raise NotImplementedError

    def again(self, instead: list[Any]) -> ScriptRequest:
        """The same, with converted states to be taken instead of stale ones."""
        raise NotImplementedError

    def registries(self) -> list[bytes]:
        """The hashes to be read (HGETALL) for `converted`: those of the limits whose states are stale."""
        return [place.registry for place, raw in zip(self.places(), self.stale or (), strict=False) if raw]

    def _read_stale(self, reply: bytes, at: int, n: int) -> int:
        self.found_us = TWO.unpack_from(reply, at)[1]
        at += TWO.size
        self.stale = []
        for _ in range(n):
            (size,) = LENGTH.unpack_from(reply, at)
            at += LENGTH.size
            self.stale.append(reply[at : at + size])
            at += size
        return at


CLOCK = frozenset(("clock",))


def parts_of(verb: str, spots: Sequence[LimitEntry], now_us: int | None) -> frozenset[str]:
    parts = frozenset((verb, *[place.rule.file for place in spots]))
    return parts if now_us is None else parts | CLOCK


def pack_claims(
    parts: list[bytes], spots: Sequence[LimitEntry], claims: Sequence[Claim], instead: Sequence[Any], gives: bool = False
) -> list[bytes]:
    """Packs claims behind what is there already; answers with their keys."""
    keys = []
    for i, (place, claim) in enumerate(zip(spots, claims, strict=True)):
        data = key_bytes(claim.key)
        keys.append(place.head + tag(data) + b"}")
        more, extras = [], 0
        if place.limit.ramp > 0:
            first, ramp_us = place.unseen()
            extras |= 1
            more.append(STATE.pack(first[0], first[1], ramp_us))
        if is_hashed(data):
            extras |= 2
            more += [LENGTH.pack(len(data)), data]
        if instead and instead[i] is not None:
            raw, state = instead[i]
            extras |= 4
            more += [LENGTH.pack(len(raw)), raw, STATE.pack(*(state if not place.limit.logs else (0, 0, 0)))]
        parts.append(_CLAIM.pack(place.rule.code, extras, place.fingerprint, claim.cost, *place.numbers))
        parts += more
        if gives:
            parts.append(_charge(claim))
    return keys


def _charge(claim: Claim) -> bytes:
    """The whole charge that a part is given back of, and the states around it where they are remembered."""
    around = claim.remembered() if claim.cost == claim.charged else None
    if around is None or claim.limit.limit.logs:
        return _CHARGED.pack(claim.charged, 0)
    return _CHARGED.pack(claim.charged, 1) + _STATES.pack(*around[0], *around[1])
