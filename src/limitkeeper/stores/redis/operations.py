"""An ask: one operation ready to travel, and what came back of it.

`keys` and `body` go out, `read` takes the reply; the bytes of an ask say where they end, on both ways, so any number of asks
travel as one script call by being put one behind the other (`call_of`, `read_all`). Everything in a reply is whole
microseconds, counted from the server's now; exact while it lies within 285 years (2^53 µs).

A state that was written under another rate of its name is not decided on: the ask comes back `stale`, with the bytes as they
lie there. `converted` makes the ask that is to be sent then: "if the state is still those bytes, take this one instead".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import MAX_WAIT
from ...decision import Decision, Decisions
from .codec import LimitEntry, entry_of
from .key_names import LONGEST, KeyNames, key_bytes, tag
from .limit_registry import in_units, item, knowing, loading
from .script_builder import VERBS, Script, script_of
from .script_request import CLOCK, NOW, ONE, TWO, ScriptRequest, pack_claims, parts_of

_FOUR = struct.Struct("<4q")
_SIX = struct.Struct("<6q")
_DECIDE = struct.Struct("<BHBdd")
_GIVE_BACK = struct.Struct("<BHd")
_REBOOK = struct.Struct("<BI")
_TURN = struct.Struct("<HBdd")


class HitRequest(ScriptRequest):
    """One limit, one short key, no patience: the straight way."""

    __slots__ = ("cost", "key", "place")
    place: LimitEntry
    key: str
    cost: int

    def read(self, reply: bytes, at: int) -> int:
        now_us, left, retry_us, reset_us = _FOUR.unpack_from(reply, at)
        if now_us < 0:
            return self._read_stale(reply, at, 1)
        place = self.place
        self.answer = Decision(retry_us == 0, place.capacity, left, retry_us, reset_us, 0, now_us, place.name)
        return at + 32

    def places(self) -> list[LimitEntry]:
        return [self.place]

    def again(self, instead: list[Any]) -> ScriptRequest:
        claim = Claim(self.place.named, self.key, self.cost)
        return DecideRequest(self.place.names, [claim], 0, True, self.now_us, 0, instead)


class DecideRequest(ScriptRequest):
    """Any number of limits, patience, peeks: the long way."""

    __slots__ = ("_again", "claims", "commit", "max_wait_us", "spots")

    def __init__(
        self,
        names: KeyNames,
        claims: Sequence[Claim],
        max_wait_us: int,
        commit: int,
        now_us: int | None,
        not_before_us: int,
        instead: Sequence[Any] = (),
    ) -> None:
        self._again = (names, claims, max_wait_us, commit, now_us, not_before_us)
        self.claims, self.max_wait_us, self.commit, self.now_us = claims, max_wait_us, commit, now_us
        self.stale = self.answer = None
        self.spots = [entry_of(names, claim.limit) for claim in claims]
        self.rules = parts_of("decide", self.spots, now_us)
        parts = [_DECIDE.pack(VERBS["decide"][0], len(claims), int(commit), max_wait_us, not_before_us)]
        if now_us is not None:
            parts.append(NOW.pack(now_us))
        self.keys = pack_claims(parts, self.spots, claims, instead)
        self.body = b"".join(parts)

    def places(self) -> list[LimitEntry]:
        return self.spots

    def again(self, instead: list[Any]) -> ScriptRequest:
        return DecideRequest(*self._again, instead)

    def read(self, reply: bytes, at: int) -> int:
        now_us, start_us = TWO.unpack_from(reply, at)
        if now_us < 0:
            return self._read_stale(reply, at, len(self.claims))
        undoable = self.commit > 0 and start_us >= 0 and (self.max_wait_us > 0 or self.commit > 1)
        self.answer, at = _decision(reply, at + 8, self.spots, self.claims, now_us, undoable)
        return at


class GiveBackRequest(ScriptRequest):
    """Takes charges away from where they were made."""

    __slots__ = ("_again", "spots")

    def __init__(
        self, names: KeyNames, claims: Sequence[Claim], charged_at: int, now_us: int | None, instead: Sequence[Any] = ()
    ) -> None:
        self._again = (names, claims, charged_at, now_us)
        self.now_us = now_us
        self.stale = self.answer = None
        self.spots = [entry_of(names, claim.limit) for claim in claims]
        self.rules = parts_of("give_back", self.spots, now_us)
        parts = [_GIVE_BACK.pack(VERBS["give_back"][0], len(claims), charged_at)]
        if now_us is not None:
            parts.append(NOW.pack(now_us))
        self.keys = pack_claims(parts, self.spots, claims, instead, gives=True)
        self.body = b"".join(parts)

    def places(self) -> list[LimitEntry]:
        return self.spots

    def again(self, instead: list[Any]) -> ScriptRequest:
        return GiveBackRequest(*self._again, instead)

    def read(self, reply: bytes, at: int) -> int:
        (now_us,) = ONE.unpack_from(reply, at)
        if now_us < 0:
            return self._read_stale(reply, at, len(self.spots))
        self.answer = True
        return at + 8


class RebookRequest(ScriptRequest):
    """Some leave a line and the others move up: `MemoryStore.rebook` in one call."""

    __slots__ = ("_again", "spots", "turns")

    def __init__(self, names: KeyNames, turns: Sequence[Any], now_us: int | None, instead: Sequence[Any] = ()) -> None:
        self._again = (names, turns, now_us)
        self.turns, self.now_us = turns, now_us
        self.stale = self.answer = None
        self.spots = [[entry_of(names, claim.limit) for claim in claims] for claims, _, _, _ in turns]
        self.rules = parts_of("rebook", self.places(), now_us)
        parts, self.keys = [_REBOOK.pack(VERBS["rebook"][0], len(turns))], []
        if now_us is not None:
            parts.append(NOW.pack(now_us))
        for spots, (claims, charged_at, deadline_us, stays, _) in zip(self.spots, turns, strict=True):
            parts.append(_TURN.pack(len(claims), stays, charged_at, -1 if deadline_us is None else deadline_us))
            at = len(self.keys)
            self.keys += pack_claims(parts, spots, claims, instead[at : at + len(claims)], gives=True)
        self.body = b"".join(parts)

    def places(self) -> list[LimitEntry]:
        return [place for spots in self.spots for place in spots]

    def again(self, instead: list[Any]) -> ScriptRequest:
        return RebookRequest(*self._again, instead)

    def read(self, reply: bytes, at: int) -> int:
        (now_us,) = ONE.unpack_from(reply, at)
        if now_us < 0:
            return self._read_stale(reply, at, len(self.keys))
        at += 8
        answer: list[Decision | None] = []
        for spots, (claims, *_) in zip(self.spots, self.turns, strict=True):
            moved = reply[at]
            decision, at = _decision(reply, at + 1, spots, claims, now_us, True) if moved else (None, at + 1)
            answer.append(decision)
        self.answer = answer
        return at


# Making asks ---------------------------------------------------------------------------------------------------------------


def hitting(names: KeyNames, named: NamedLimit, key: str, cost: int = 1, now_us: int | None = None) -> ScriptRequest:
    """A hit on one limit: what most calls are."""
    place = names.places.get(named)
    if place is None:
        place = entry_of(names, named)
    data = key_bytes(key)
    if cost <= 0 or not place.straight or len(data) > LONGEST:
        return DecideRequest(names, [Claim(named, key, cost)], 0, True, now_us, 0)
    ask = HitRequest()
    ask.place, ask.key, ask.cost, ask.now_us = place, key, cost, now_us
    ask.stale = ask.answer = None
    ask.keys = [place.head + tag(data) + b"}"]
    ask.body = place.hit if cost == 1 else place.hit_body(cost)
    ask.rules = place.plain
    if now_us is not None:
        ask.body += NOW.pack(now_us)
        ask.rules |= CLOCK
    return ask


def deciding(
    names: KeyNames,
    claims: Sequence[Claim],
    max_wait_us: int | None = 0,
    commit: bool = True,
    now_us: int | None = None,
    not_before_us: int = 0,
    *,
    remember: bool = False,
) -> ScriptRequest:
    """A decision on claims; its answer is a Decision. `not_before_us`: none of them starts earlier than that. `remember` keeps
    the states around the charge also when nothing waits, so that the charge can be undone exactly."""
    patience = MAX_WAIT if max_wait_us is None or max_wait_us > MAX_WAIT else int(max_wait_us)
    if len(claims) == 1 and not patience and commit and not remember and not not_before_us:
        return hitting(names, claims[0].limit, claims[0].key, claims[0].cost, now_us)
    return DecideRequest(names, claims, patience, (2 if remember else 1) if commit else 0, now_us, not_before_us)


def giving_back(names: KeyNames, claims: Sequence[Claim], charged_at: int = -1, now_us: int | None = None) -> ScriptRequest:
    """Takes the claims' cost away from where it was charged; answers True."""
    return GiveBackRequest(names, list(claims), charged_at, now_us)


def rebooking(names: KeyNames, turns: Sequence[Any], now_us: int | None = None) -> ScriptRequest:
    """Each turn is (claims, charged_at, deadline_us, stays); the answer is a list of their new Decisions, None for one that
    stays as it is."""
    return RebookRequest(names, turns, now_us)


def call_of(asks: Sequence[ScriptRequest]) -> tuple[Script, list[bytes], bytes]:
    """One script call for all of these: EVALSHA script.sha, the keys, the body."""
    if len(asks) == 1:
        return script_of(asks[0].rules), asks[0].keys, asks[0].body
    rules = asks[0].rules
    for ask in asks:
        if ask.rules is not rules:
            rules |= ask.rules
    return script_of(rules), [key for ask in asks for key in ask.keys], b"".join([ask.body for ask in asks])


def read_all(asks: Iterable[ScriptRequest], reply: bytes) -> None:
    """Hands each ask its part of the reply. What was stale before and is answered now has been decided: it is not asked again."""
    at = 0
    for ask in asks:
        ask.stale = None
        at = ask.read(reply, at)


def converted(ask: ScriptRequest, texts: Mapping[bytes, Mapping[bytes, bytes]]) -> ScriptRequest:
    """The ask to be sent after one came back stale. `texts`: registry -> its fields, for all of `ask.registries()`."""
    instead: list[Any] = []
    for place, raw in zip(ask.places(), ask.stale or (), strict=True):
        fields = texts.get(place.registry, {})
        instead.append((raw, in_units(place, raw, fields, ask.found_us)) if raw else None)
    return ask.again(instead)


# Putting together, and taking apart ------------------------------------------------------------------------------------------


def _decision(
    reply: bytes, at: int, spots: Sequence[LimitEntry], claims: Sequence[Claim], now_us: int, undoable: bool
) -> tuple[Decision, int]:
    """The Decision at a place in a reply, and where it ends; claims remember the states around an undoable charge."""
    (start_us,) = ONE.unpack_from(reply, at)
    at += 8
    parts = []
    for place, claim in zip(spots, claims, strict=True):
        start, retry_us, left, reset_us = _FOUR.unpack_from(reply, at)
        at += 32
        parts.append(_part(place, now_us, start, retry_us, left, reset_us))
        if undoable and not place.limit.logs:
            around = _SIX.unpack_from(reply, at)
            at += 48
            if claim.cost > 0:
                claim.remember(around[:3], around[3:])
    return (parts[0] if len(parts) == 1 else spoken(parts, now_us, start_us)), at


def _part(place: LimitEntry, now_us: int, start: int, retry_us: int, left: int, reset_us: int) -> Decision:
    """The answer of one limit, as `all_of.alone` gives it."""
    if start >= 0:
        return Decision(True, place.capacity, left, 0, reset_us, start - now_us, start, place.name)
    return Decision(False, place.capacity, left, retry_us if start == -1 else -1, reset_us, 0, now_us, place.name)


def spoken(parts: list[Decision], now_us: int, start_us: int) -> Decision:
    """For all, as `all_of.together` gives it: refused, the longest retry speaks; allowed, the one closest to its end."""
    allowed = start_us >= 0
    speaker = parts[0]
    for part in parts[1:]:
        if allowed:
            if part.remaining * speaker.limit < speaker.remaining * part.limit:
                speaker = part
        elif speaker.retry_us >= 0 and (part.retry_us < 0 or part.retry_us > speaker.retry_us):
            speaker = part
    wait = start_us - now_us if allowed else 0
    fields = (speaker.limit, speaker.remaining, speaker.retry_us, speaker.reset_us, wait, now_us + wait, speaker.name)
    return Decisions(parts, allowed, *fields)


__all__ = [
    "ScriptRequest",
    "call_of",
    "converted",
    "deciding",
    "giving_back",
    "hitting",
    "item",
    "knowing",
    "loading",
    "read_all",
    "rebooking",
]
