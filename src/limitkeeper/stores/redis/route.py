"""Routes: which place a call goes to, and what to do when it was the wrong one. This one leads to a single server.

The plan is the same for every topology: find the places, write everything in one go to each, and look at the replies. What a
reply says was not done (see `resp.UNDONE`) may be asked again, at the place that the topology then says; what was perhaps done
is never sent again. `tries` bounds it, and the budget of the call ends it in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import StoreError, StoreUnavailable
from .address import Address, Endpoint
from .operations import ScriptRequest
from .resp import ReplyError, unavailable, word
from .script_call import RoutedCommands, ScriptCall, parcelled
from .trips import Outcome, Pause, Plan, Trip

AGAIN, LATER, FAILED = "again", "later", "failed"
#: Between two tries at something that takes a moment, in seconds.
MOMENT = 0.01


class Route:
    """The way to a single server."""

    tries = 3

    def __init__(self, address: Address) -> None:
        self.address = address
        self.login = address.login
        #: The one place where everything is, when there is one and it is known.
        self.direct: Endpoint | None = address.places[0]
        #: Called when a server turns out to have lost what it knew (restarted, flushed, another took its place).
        self.forgotten: Callable[[], None] = _nothing
        self._taught: dict[tuple[Endpoint | None, bytes], int] = {}  # scripts that a place has learnt from us, and when
        self._lessons = 0

    # What topologies differ in -------------------------------------------------------------------------------------------

    def parcels(self, asks: Sequence[ScriptRequest], most: int) -> list[ScriptCall]:
        """What may travel in one script call: at most so many asks."""
        return parcelled(asks, most)

    def find(self, errands: Sequence[RoutedCommands]) -> Plan[None]:
        """Says for each errand where it goes."""
        for errand in errands:
            errand.place = self.direct
        return
        yield []

    def everywhere(self) -> Plan[list[Endpoint]]:
        """All places that keep keys."""
        assert self.direct is not None
        return [self.direct]
        yield []

    def wrong(self, errand: RoutedCommands, error: Any) -> str:
        """What to do about an error reply: ask again, ask again after a moment, or give up."""
        return FAILED

    def gone(self, place: Endpoint | None) -> None:
        """A place could not be reached."""

    # What they share -----------------------------------------------------------------------------------------------------

    def carried(self, errands: Sequence[RoutedCommands]) -> Plan[None]:
        """Brings every errand where it belongs. Afterwards each has taken its replies, or holds its error."""
        waiting = list(errands)
        for _ in range(self.tries):
            try:
                yield from self.find(waiting)
            except StoreError as error:
                for errand in waiting:
                    errand.error = error
                return
            for errand in waiting:
                errand.begun = self._lessons
            loads = self._loads(waiting)
            outcomes = yield [
                Trip(place, self.login, [one for errand in load for one in errand.commands()]) for place, load in loads
            ]
            waiting, pause = [], False
            for (place, load), outcome in zip(loads, outcomes, strict=True):
                for errand, verdict in zip(load, self._verdicts(place, load, outcome), strict=True):
                    if verdict is not None and verdict != FAILED:
                        waiting.append(errand)
                        pause = pause or verdict == LATER
            if not waiting:
                return
            if pause:
                yield Pause(MOMENT)

    def _loads(self, errands: Sequence[RoutedCommands]) -> list[tuple[Endpoint, list[RoutedCommands]]]:
        """Errands by their place: one write each."""
        loads: dict[Endpoint, list[RoutedCommands]] = {}
        for errand in errands:
            assert errand.place is not None
            loads.setdefault(errand.place, []).append(errand)
        return list(loads.items())

    def _verdicts(self, place: Endpoint, load: list[RoutedCommands], outcome: Outcome) -> list[str | None]:
        if outcome.error is not None:
            self.gone(place)
            for errand in load:
                errand.error = outcome.error
            return [AGAIN if outcome.unsent else FAILED] * len(load)
        found: list[str | None] = []
        at = 0
        for errand in load:
            replies = outcome.replies[at : at + errand.size]
            at += errand.size
            found.append(self._verdict(errand, replies[1::2] if errand.asking else replies))
        return found

    def _verdict(self, errand: RoutedCommands, replies: list[Any]) -> str | None:
        errors = [reply for reply in replies if isinstance(reply, ReplyError)]
        errand.asking = False
        if not errors:
            return self._taken(errand, replies)
        errand.error = unavailable(errors[0], errand.place)
        if word(errors[0]) == "NOSCRIPT" and isinstance(errand, ScriptCall):
            self._teach(errand)
            return AGAIN
        return self.wrong(errand, errors[0])

    def _teach(self, parcel: ScriptCall) -> None:
        """The script itself is to travel. A place that had learnt it before this was sent has lost it, and perhaps all else."""
        parcel.whole = True
        if self._taught.get((parcel.place, parcel.sha), parcel.begun + 1) <= parcel.begun:
            self._taught = {lesson: when for lesson, when in self._taught.items() if lesson[0] != parcel.place}
            self.forgotten()

    def _taken(self, errand: RoutedCommands, replies: list[Any]) -> str | None:
        if not errand.take(replies):
            errand.error = StoreUnavailable(f"{errand.place} answered what no Redis would: {replies!r}")
            return FAILED
        errand.error = None
        if isinstance(errand, ScriptCall) and errand.whole:
            self._lessons += 1
            self._taught[errand.place, errand.sha] = self._lessons
        return None


def _nothing() -> None:
    """Nobody wants to know."""
